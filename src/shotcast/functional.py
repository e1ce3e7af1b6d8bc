"""Functions of ``torch.distributed._functional_collectives`` on a :class:`shotcast.Communicator`.

Code written for those functions runs with these: pass a communicator instead of a process group. Differences:

- Results are ordinary tensors: complete on the CPU, enqueued on the current stream on CUDA. :func:`wait_tensor` (and
  PyTorch's) returns them unchanged.
- Results are differentiable, except those of :func:`broadcast`, under every name: the ``_autograd`` names are the same
  functions. PyTorch's plain names are differentiable from 2.12 on.
- ``avg`` of integers is cut to a whole number. Reductions have the bits of ``docs/reference/numerics.md``.
- ``src`` is a rank of the communicator.

The functions can be traced under ``torch.compile(fullgraph=True)``, by themselves or mixed with PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shotcast.collectives.communicator import Communicator
from shotcast.collectives.torch_private import is_traced
from shotcast.errors import ConfigError
from shotcast.wire import REDUCTIONS

__all__ = [
    "all_gather_single",
    "all_gather_single_autograd",
    "all_gather_tensor",
    "all_gather_tensor_autograd",
    "all_reduce",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "broadcast",
    "reduce_scatter_single",
    "reduce_scatter_single_autograd",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd",
    "wait_tensor",
]

_REDUCTIONS = {name: name for name in REDUCTIONS if name != "prod"} | {"product": "prod"}
"""Our reduction names by the names that these functions use."""


def all_reduce(self: torch.Tensor, reduceOp: str, group: Communicator, tag: str = "") -> torch.Tensor:  # noqa: N803
    """Reduce the tensors of all ranks elementwise; return the result, shaped like ``self``, on every rank.

    Args:
        self: any shape.
        reduceOp: ``sum``, ``avg``, ``max``, ``min``, ``product``, ``band``, ``bor`` or ``bxor``, upper or lower case.
        group: the communicator.
        tag: not used.
    """
    return _communicator(group).all_reduce(_plain(self), reduction=_reduction(reduceOp))


def all_gather_tensor(self: torch.Tensor, gather_dim: int, group: Communicator, tag: str = "") -> torch.Tensor:
    """Concatenate the equally shaped tensors of all ranks along ``gather_dim``."""
    parts, x = _communicator(group).world_size, _plain(self)
    if x.dim() == 0:
        x = x.view(1)
    dim = _dimension(gather_dim, x)
    gathered = group.all_gather(x)
    if dim == 0:
        return gathered
    return gathered.view(parts, *x.shape).movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter_tensor(
    self: torch.Tensor,
    reduceOp: str,  # noqa: N803
    scatter_dim: int,
    group: Communicator,
    tag: str = "",
) -> torch.Tensor:
    """Reduce like :func:`all_reduce`; return this rank's part of ``scatter_dim``, divided into equal parts."""
    parts, reduction, dim = _communicator(group).world_size, _reduction(reduceOp), _dimension(scatter_dim, self)
    if self.shape[dim] % parts:
        raise ConfigError(f"dimension {scatter_dim} of {list(self.shape)} is not divisible among {parts} ranks")
    x = self if dim == 0 else self.unflatten(dim, (parts, -1)).movedim(dim, 0).flatten(0, 1)
    return group.reduce_scatter(_plain(x), reduction=reduction)


def all_to_all_single(
    self: torch.Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: Communicator,
    tag: str = "",
) -> torch.Tensor:
    """Send part i of this rank's tensor to rank i; return the received parts, concatenated by rank.

    Either all ranks pass both split sizes, or none does and parts are equal.
    """
    _communicator(group)
    return group.all_to_all(_plain(self), input_sizes=input_split_sizes, output_sizes=output_split_sizes)


def broadcast(self: torch.Tensor, src: int, group: Communicator, tag: str = "") -> torch.Tensor:
    """Return the tensor of rank ``src`` of the communicator on every rank. Not differentiable, like PyTorch's."""
    _communicator(group)
    return group.broadcast(_plain(self).detach().clone(), src)


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, which is already complete; wait for a result of PyTorch's functions."""
    return _plain(tensor, contiguous=False)


all_gather_single = all_gather_single_autograd = all_gather_tensor_autograd = all_gather_tensor
reduce_scatter_single = reduce_scatter_single_autograd = reduce_scatter_tensor_autograd = reduce_scatter_tensor
all_to_all_single_autograd: Callable[..., torch.Tensor] = all_to_all_single


def _communicator(group: Communicator) -> Communicator:
    if not isinstance(group, Communicator):
        raise ConfigError(f"group must be a shotcast.Communicator, not {type(group).__name__}")
    return group


def _reduction(name: str) -> str:
    reduction = _REDUCTIONS.get(name.lower()) if isinstance(name, str) else None
    if reduction is None:
        raise ConfigError(f"reduceOp must be one of {', '.join(_REDUCTIONS)}, not {name!r}")
    return reduction


def _dimension(dim: int, x: torch.Tensor) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ConfigError(f"{list(x.shape)} has no dimension {dim}")
    return dim % x.dim()


def _plain(x: torch.Tensor, contiguous: bool = True) -> torch.Tensor:
    """Return ``x`` without the wrapper that PyTorch's functions put around unfinished results."""
    if not is_traced():  # there are no wrappers in a graph
        from torch.distributed._functional_collectives import AsyncCollectiveTensor

        if isinstance(x, AsyncCollectiveTensor):
            x = x.wait()
    return x.contiguous() if contiguous else x
