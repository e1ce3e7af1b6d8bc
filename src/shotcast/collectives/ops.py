"""The collectives as PyTorch operators, ``torch.ops.shotcast.*``: what torch.compile puts in its graphs.

:class:`~shotcast.collectives.communicator.Communicator` calls these while it is traced; eager calls go past them, as an
operator costs the host as much again as the call. It takes numbers, strings and tensors only, so a communicator goes by
its name, and what shapes depend on, ``world_size`` and for uneven parts ``rank``, comes with it: compiled code is
cached by what a graph says, and ranks share the cache.

Operators write to new tensors. They take any strides, as a compiler may lay out a tensor in its own way. They are
ordered: a compiler runs all calls of a graph, used or not, in the order of the program. Left alone it drops calls and
swaps them as sizes suggest, and sizes may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shotcast.collectives import autograd, inductor
from shotcast.collectives.arguments import output, rows_per_rank
from shotcast.collectives.registry import named
from shotcast.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from shotcast.collectives.communicator import Communicator

_library = torch.library.Library("shotcast", "DEF")

OPERATORS: list[str] = []
"""Their names in ``torch.ops.shotcast``."""


def _operator(schema: str, shaped: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define ``shotcast::schema``, run by the decorated function; ``shaped`` gives results of the right shapes."""
    name = schema[: schema.index("(")]
    _library.define(schema)
    try:
        torch.library._register_effectful_op(f"shotcast::{name}", torch.library.EffectType.ORDERED, lib=_library)
        obstacle = ""
    except AttributeError as error:  # there is no public name for it
        obstacle = str(error)

    def traced(*args: Any, **kwargs: Any) -> Any:
        if obstacle:
            raise UnsupportedError(f"PyTorch {torch.__version__} cannot order operators in a graph: {obstacle}")
        inductor.order(OPERATORS)
        return shaped(*args, **kwargs)

    torch.library.register_fake(f"shotcast::{name}", traced, lib=_library)
    OPERATORS.append(name)

    def run_by(function: Callable[..., Any]) -> Callable[..., Any]:
        _library.impl(name, function, "CompositeExplicitAutograd")
        return function

    return run_by


# -- operators --------------------------------------------------------------------------------------------------------


def _like(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def _part(x: torch.Tensor, comm: str, world_size: int, *_: Any, **__: Any) -> torch.Tensor:
    return x.new_empty((rows_per_rank(x, world_size, "reduce_scatter"), *x.shape[1:]))


def _joined(x: torch.Tensor, comm: str, world_size: int, *_: Any, **__: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0] * world_size, *x.shape[1:]))


def _joined_uneven(x: torch.Tensor, comm: str, sizes: Sequence[int], *_: Any, **__: Any) -> torch.Tensor:
    return x.new_empty((sum(sizes), *x.shape[1:]))


def _nothing(*_: Any, **__: Any) -> None:
    return None


@_operator("all_reduce(Tensor x, str comm, str algorithm, str reduction) -> Tensor", _like)
def _all_reduce(x: torch.Tensor, comm: str, algorithm: str, reduction: str) -> torch.Tensor:
    return named(comm).all_reduce(x.contiguous(), algorithm=algorithm, reduction=reduction)


@_operator(
    "reduce_scatter(Tensor x, str comm, int world_size, str algorithm, str reduction, bool strict=True) -> Tensor",
    _part,
)
def _reduce_scatter(
    x: torch.Tensor, comm: str, world_size: int, algorithm: str, reduction: str, strict: bool = True
) -> torch.Tensor:
    """Not ``strict``: another algorithm is taken where this one cannot serve."""
    x, by = x.contiguous(), named(comm)
    algorithm = algorithm if strict else autograd.where_legal(by, x, algorithm)
    return by.reduce_scatter(x, algorithm=algorithm, reduction=reduction)


@_operator("all_gather(Tensor x, str comm, int world_size, str algorithm) -> Tensor", _joined)
def _all_gather(x: torch.Tensor, comm: str, world_size: int, algorithm: str) -> torch.Tensor:
    return named(comm).all_gather(x.contiguous(), algorithm=algorithm)


@_operator("all_gather_uneven(Tensor x, str comm, SymInt[] sizes, int rank, str algorithm) -> Tensor", _joined_uneven)
def _all_gather_uneven(x: torch.Tensor, comm: str, sizes: Sequence[int], rank: int, algorithm: str) -> torch.Tensor:
    by = named(comm)
    if rank != by.rank:
        raise ConfigError(f"all_gather_uneven was compiled on rank {rank} and runs on rank {by.rank}")
    return by.all_gather(x.contiguous(), sizes=sizes, algorithm=algorithm)


@_operator("all_to_all(Tensor x, str comm, str algorithm) -> Tensor", _like)
def _all_to_all(x: torch.Tensor, comm: str, algorithm: str) -> torch.Tensor:
    return named(comm).all_to_all(x.contiguous(), algorithm=algorithm)


@_operator("broadcast(Tensor x, str comm, int root, str algorithm) -> Tensor", _like)
def _broadcast(x: torch.Tensor, comm: str, root: int, algorithm: str) -> torch.Tensor:
    by = named(comm)
    out = x.new_empty(x.shape)
    if by.rank == root:
        out.copy_(x.detach())
    return by.broadcast(out, root, algorithm)


@_operator("send(Tensor x, str comm, int dst) -> ()", _nothing)
def _send(x: torch.Tensor, comm: str, dst: int) -> None:
    named(comm).send(x.contiguous(), dst)


@_operator("recv(Tensor x, str comm, int src) -> Tensor", _like)
def _recv(x: torch.Tensor, comm: str, src: int) -> torch.Tensor:
    """A new tensor like ``x``, received."""
    return named(comm).recv(x.new_empty(x.shape), src)


@_operator("barrier(str comm) -> ()", _nothing)
def _barrier(comm: str) -> None:
    named(comm).barrier()


for _name, (_keep, _backward) in autograd.OPERATORS.items():
    torch.library.register_autograd(f"shotcast::{_name}", _backward, setup_context=_keep, lib=_library)

# -- calls of a communicator ------------------------------------------------------------------------------------------


def _written(out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """``result`` in ``out``, which has been checked. A compiler leaves the copy out where nobody else sees ``out``."""
    return out.copy_(result)


def all_reduce(
    comm: Communicator, x: torch.Tensor, out: torch.Tensor | None, algorithm: str, reduction: str
) -> torch.Tensor:
    """:meth:`Communicator.all_reduce` by its operator."""
    if out is None and reduction == "sum":
        return torch.ops.shotcast.all_reduce(x, comm.name, algorithm, reduction)
    if out is not None:
        output(x, out, x.shape)
    result = torch.ops.shotcast.all_reduce(x.detach(), comm.name, algorithm, reduction)
    return result if out is None else _written(out, result)


def reduce_scatter(
    comm: Communicator, x: torch.Tensor, out: torch.Tensor | None, algorithm: str, reduction: str
) -> torch.Tensor:
    """:meth:`Communicator.reduce_scatter` by its operator."""
    rows = rows_per_rank(x, comm.world_size, "reduce_scatter")
    if out is None and reduction == "sum":
        return torch.ops.shotcast.reduce_scatter(x, comm.name, comm.world_size, algorithm, reduction)
    if out is not None:
        output(x, out, (rows, *x.shape[1:]))
    result = torch.ops.shotcast.reduce_scatter(x.detach(), comm.name, comm.world_size, algorithm, reduction)
    return result if out is None else _written(out, result)


def all_gather(
    comm: Communicator, x: torch.Tensor, out: torch.Tensor | None, sizes: Sequence[int] | None, algorithm: str
) -> torch.Tensor:
    """:meth:`Communicator.all_gather` by its operators; ``x`` has a dimension, and ``sizes`` were checked."""
    source = x
    if out is not None:
        output(x, out, (x.shape[0] * comm.world_size if sizes is None else sum(sizes), *x.shape[1:]))
        source = x.detach()
    if sizes is None:
        result = torch.ops.shotcast.all_gather(source, comm.name, comm.world_size, algorithm)
    else:
        result = torch.ops.shotcast.all_gather_uneven(source, comm.name, sizes, comm.rank, algorithm)
    return result if out is None else _written(out, result)


def all_to_all(comm: Communicator, x: torch.Tensor, out: torch.Tensor | None, algorithm: str) -> torch.Tensor:
    """:meth:`Communicator.all_to_all` by its operator."""
    if out is None:
        return torch.ops.shotcast.all_to_all(x, comm.name, algorithm)
    output(x, out, x.shape)
    return _written(out, torch.ops.shotcast.all_to_all(x.detach(), comm.name, algorithm))


def broadcast(comm: Communicator, x: torch.Tensor, root: int, algorithm: str) -> torch.Tensor:
    """:meth:`Communicator.broadcast` by its operator."""
    with torch.no_grad():
        return _written(x, torch.ops.shotcast.broadcast(x.detach(), comm.name, root, algorithm))


def send(comm: Communicator, x: torch.Tensor, dst: int) -> None:
    """:meth:`Communicator.send` by its operator."""
    torch.ops.shotcast.send(x.detach(), comm.name, dst)


def recv(comm: Communicator, x: torch.Tensor, src: int) -> torch.Tensor:
    """:meth:`Communicator.recv` by its operator."""
    with torch.no_grad():
        return _written(x, torch.ops.shotcast.recv(x.detach(), comm.name, src))


def barrier(comm: Communicator) -> None:
    """:meth:`Communicator.barrier` by its operator."""
    torch.ops.shotcast.barrier(comm.name)
