"""The calls with a root as PyTorch operators; see :mod:`shotcast.collectives.torch_ops.operators`.

Ranks share compiled code, so the shape of a result is given by numbers: a rank that gets none has 0 parts of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shotcast.collectives.arguments import output
from shotcast.collectives.interface import Collectives
from shotcast.collectives.torch_ops import autograd_rooted
from shotcast.collectives.torch_ops.communicators import named
from shotcast.collectives.torch_ops.operators import kept, operator, register_derivatives, written


def _reduced(x: torch.Tensor, comm: str, root: int, parts: int, *_: Any, **__: Any) -> torch.Tensor:
    return x.new_empty(x.shape if parts else (0, *x.shape[1:]))


def _gathered(x: torch.Tensor, comm: str, root: int, parts: int, *_: Any, **__: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0] * parts, *x.shape[1:]))


def _scattered(x: torch.Tensor, comm: str, root: int, parts: int, *_: Any, **__: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0] // parts, *x.shape[1:]))


def _part(x: torch.Tensor, comm: str, root: int, shape: Sequence[int], *_: Any, **__: Any) -> torch.Tensor:
    return x.new_empty(tuple(shape))


def _whole(grad: torch.Tensor, comm: str, shape: Sequence[int], *_: Any, **__: Any) -> torch.Tensor:
    return grad.new_empty(tuple(shape))


def _like(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


@operator("reduce(Tensor x, str comm, int root, int parts, str algorithm, str reduction) -> Tensor", _reduced)
def _reduce(x: torch.Tensor, comm: str, root: int, parts: int, algorithm: str, reduction: str) -> torch.Tensor:
    return named(comm).reduce(x.contiguous(), root, algorithm=algorithm, reduction=reduction)


@operator("gather(Tensor x, str comm, int root, int parts, str algorithm) -> Tensor", _gathered)
def _gather(x: torch.Tensor, comm: str, root: int, parts: int, algorithm: str) -> torch.Tensor:
    return named(comm).gather(x.contiguous(), root, algorithm=algorithm)


@operator("scatter(Tensor x, str comm, int root, int parts, str algorithm) -> Tensor", _scattered)
def _scatter(x: torch.Tensor, comm: str, root: int, parts: int, algorithm: str) -> torch.Tensor:
    return named(comm).scatter(x.contiguous(), root, algorithm=algorithm)


@operator("scattered(Tensor x, str comm, int root, SymInt[] shape, str algorithm) -> Tensor", _part)
def _scatter_gradient(x: torch.Tensor, comm: str, root: int, shape: Sequence[int], algorithm: str) -> torch.Tensor:
    return autograd_rooted.scattered(named(comm), x.contiguous(), root, algorithm, tuple(shape))


@operator("gathered_or_zeros(Tensor x, str comm, int root, int parts, str algorithm) -> Tensor", _gathered)
def _gathered_or_zeros(x: torch.Tensor, comm: str, root: int, parts: int, algorithm: str) -> torch.Tensor:
    return autograd_rooted.gathered_or_zeros(named(comm), x.contiguous(), root, algorithm)


@operator("spread(Tensor grad, str comm, SymInt[] shape, int root, str reduction) -> Tensor", _whole)
def _spread(grad: torch.Tensor, comm: str, shape: Sequence[int], root: int, reduction: str) -> torch.Tensor:
    return autograd_rooted.spread(named(comm), grad.contiguous(), tuple(shape), root, reduction)


@operator("reduce_gradient(Tensor x, Tensor grad, str comm, int root, str reduction) -> Tensor", _like)
def _reduce_gradient(x: torch.Tensor, grad: torch.Tensor, comm: str, root: int, reduction: str) -> torch.Tensor:
    return autograd_rooted.reduce_gradient(named(comm), x, grad.contiguous(), root, reduction)


register_derivatives(autograd_rooted.OPERATORS)

# -- calls of a communicator ------------------------------------------------------------------------------------------


def reduce(
    comm: Collectives, x: torch.Tensor, root: int, out: torch.Tensor | None, algorithm: str, reduction: str
) -> torch.Tensor:
    """Run :meth:`Communicator.reduce` as an operator."""
    at_root = comm.rank == root
    if out is not None and at_root:
        output(x, out, x.shape)
        x = kept(x, reduction)
    result = torch.ops.shotcast.reduce(x, comm.name, root, int(at_root), algorithm, reduction)
    return written(out, result) if out is not None and at_root else result


def gather(comm: Collectives, x: torch.Tensor, root: int, out: torch.Tensor | None, algorithm: str) -> torch.Tensor:
    """Run :meth:`Communicator.gather` as an operator; ``x`` has a dimension."""
    parts = comm.world_size if comm.rank == root else 0
    if out is not None and parts:
        output(x, out, (x.shape[0] * parts, *x.shape[1:]))
    result = torch.ops.shotcast.gather(x, comm.name, root, parts, algorithm)
    return written(out, result) if out is not None and parts else result


def scatter(
    comm: Collectives,
    x: torch.Tensor | None,
    root: int,
    out: torch.Tensor | None,
    algorithm: str,
    shape: tuple[int, ...],
) -> torch.Tensor:
    """Run :meth:`Communicator.scatter` as an operator; ``shape`` is that of the result."""
    if x is None:
        assert out is not None
        x = out.new_empty((out.shape[0] * comm.world_size, *shape[1:]))
    elif out is not None:
        output(x, out, shape)
    result = torch.ops.shotcast.scatter(x, comm.name, root, comm.world_size, algorithm)
    return result if out is None else written(out, result)
