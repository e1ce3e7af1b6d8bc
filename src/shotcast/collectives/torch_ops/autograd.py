"""Derivatives of the collectives: each is the transpose of the linear map that the call computes.

Each derivative exists twice: for calls of a communicator, and for operators in a graph (``operators.py``), where a
communicator is a name. The latter could serve eager calls too, at three times the host cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shotcast.collectives.interface import Collectives
from shotcast.errors import UnsupportedError

Gradients = tuple[torch.Tensor | None, ...]

# mypy sees torch.autograd.Function as untyped


class AllReduce(torch.autograd.Function):
    """y_i = sum_r x_r, so dx_i = sum_r dy_r."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Collectives, algorithm: str) -> torch.Tensor:
        ctx.comm, ctx.algorithm = comm, algorithm
        return comm.all_reduce(x.detach(), algorithm=algorithm)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        return ctx.comm.all_reduce(_plain(grads[0]), algorithm=ctx.algorithm), None, None

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.comm, ctx.algorithm, ctx.reduction = inputs

    @staticmethod
    def traced(ctx: Any, grad: torch.Tensor) -> Gradients:
        _only_sums("all_reduce", ctx.reduction)
        return torch.ops.shotcast.all_reduce(_plain(grad), ctx.comm, ctx.algorithm, "sum"), None, None, None


class ReduceScatter(torch.autograd.Function):
    """y_i = sum_r x_r[i], so dx_i = (dy_0, ..., dy_{N-1})."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Collectives, algorithm: str) -> torch.Tensor:
        ctx.comm, ctx.algorithm = comm, algorithm
        return comm.reduce_scatter(x.detach(), algorithm=algorithm)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        return ctx.comm.all_gather(_plain(grads[0]), algorithm=ctx.algorithm), None, None

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.comm, ctx.world_size, ctx.algorithm, ctx.reduction, _ = inputs

    @staticmethod
    def traced(ctx: Any, grad: torch.Tensor) -> Gradients:
        _only_sums("reduce_scatter", ctx.reduction)
        whole = torch.ops.shotcast.all_gather(_plain(grad), ctx.comm, ctx.world_size, ctx.algorithm)
        return whole, None, None, None, None, None


class AllGather(torch.autograd.Function):
    """y = (x_0, ..., x_{N-1}) on all ranks, so dx_i = sum_r dy_r[i].

    Uneven parts have no reduce_scatter: all of dy is summed, and this rank's part is taken.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Collectives, sizes: tuple[int, ...] | None, algorithm: str
    ) -> torch.Tensor:
        ctx.comm, ctx.algorithm, ctx.sizes = comm, algorithm, sizes
        return comm.all_gather(x.detach(), sizes=sizes, algorithm=algorithm)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        grad = _plain(grads[0])
        if ctx.sizes is None:
            algorithm = where_legal(ctx.comm, grad, ctx.algorithm)
            return ctx.comm.reduce_scatter(grad, algorithm=algorithm), None, None, None
        return _own_part(ctx.comm.all_reduce(grad), ctx.sizes, ctx.comm.rank), None, None, None

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.comm, ctx.world_size, ctx.algorithm = inputs

    @staticmethod
    def traced(ctx: Any, grad: torch.Tensor) -> Gradients:
        part = torch.ops.shotcast.reduce_scatter(_plain(grad), ctx.comm, ctx.world_size, ctx.algorithm, "sum", False)
        return part, None, None, None

    @staticmethod
    def keep_uneven(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.comm, ctx.sizes, ctx.rank, _ = inputs

    @staticmethod
    def traced_uneven(ctx: Any, grad: torch.Tensor) -> Gradients:
        total = torch.ops.shotcast.all_reduce(_plain(grad), ctx.comm, "auto", "sum")
        return _own_part(total, ctx.sizes, ctx.rank), None, None, None, None


class AllToAll(torch.autograd.Function):
    """y_i = (x_0[i], ..., x_{N-1}[i]), so dx_i = (dy_0[i], ..., dy_{N-1}[i])."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Collectives, algorithm: str) -> torch.Tensor:
        ctx.comm, ctx.algorithm = comm, algorithm
        return comm.all_to_all(x.detach(), algorithm=algorithm)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        return ctx.comm.all_to_all(_plain(grads[0]), algorithm=ctx.algorithm), None, None

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.comm, ctx.algorithm = inputs

    @staticmethod
    def traced(ctx: Any, grad: torch.Tensor) -> Gradients:
        return torch.ops.shotcast.all_to_all(_plain(grad), ctx.comm, ctx.algorithm), None, None


def _plain(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient in the form that calls accept; autograd conjugates and negates lazily."""
    return grad.resolve_conj().resolve_neg().contiguous()


def _only_sums(op: str, reduction: str) -> None:
    if reduction != "sum":
        raise UnsupportedError(f"{op} has a derivative for the reduction sum, not for {reduction}")


def _own_part(total: torch.Tensor, sizes: tuple[int, ...], rank: int) -> torch.Tensor:
    start = sum(sizes[:rank])
    return total[start : start + sizes[rank]].clone()


def where_legal(comm: Collectives, x: torch.Tensor, algorithm: str) -> str:
    """Return ``algorithm`` if it can serve this reduce_scatter, else ``auto``.

    An algorithm that gathers a dtype need not be able to add it.
    """
    return algorithm if algorithm in comm.candidates(x, "reduce_scatter") else "auto"


OPERATORS: dict[str, tuple[Callable[..., None], Callable[..., Gradients]]] = {
    "all_reduce": (AllReduce.keep, AllReduce.traced),
    "reduce_scatter": (ReduceScatter.keep, ReduceScatter.traced),
    "all_gather": (AllGather.keep, AllGather.traced),
    "all_gather_uneven": (AllGather.keep_uneven, AllGather.traced_uneven),
    "all_to_all": (AllToAll.keep, AllToAll.traced),
}
"""The function that saves the context of a backward, and the backward, for each operator."""
