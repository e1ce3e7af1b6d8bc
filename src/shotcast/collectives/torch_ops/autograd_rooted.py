"""Derivatives of calls with a root. Those of ranks that get no result go back through the empty tensor they get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shotcast.collectives.interface import Collectives
from shotcast.collectives.torch_ops.autograd import LINEAR, Gradients, keep_nothing, plain, refuse, share, slopes

# mypy sees torch.autograd.Function as untyped


class Reduce(torch.autograd.Function):
    """y_root = sum_r x_r, so dx_i = dy_root; for other reductions, times the slope."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Collectives, root: int, algorithm: str, reduction: str
    ) -> torch.Tensor:
        Reduce.keep(ctx, (x, comm, root, 0, algorithm, reduction), x)
        return comm.reduce(x.detach(), root, algorithm=algorithm, reduction=reduction)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        grad = plain(grads[0])
        if ctx.reduction in LINEAR:
            return spread(ctx.comm, grad, ctx.shape, ctx.root, ctx.reduction), None, None, None, None
        (x,) = ctx.saved_tensors
        return reduce_gradient(ctx.comm, x, grad, ctx.root, ctx.reduction), None, None, None, None

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, ctx.comm, ctx.root, _, _, ctx.reduction = inputs
        ctx.shape = x.shape
        if ctx.reduction not in LINEAR:
            ctx.save_for_backward(x)

    @staticmethod
    def traced(ctx: Any, grad: torch.Tensor) -> Gradients:
        grad = plain(grad)
        if ctx.reduction in LINEAR:
            spread = torch.ops.shotcast.spread(grad, ctx.comm, ctx.shape, ctx.root, ctx.reduction)
            return spread, None, None, None, None, None
        (x,) = ctx.saved_tensors
        gradient = torch.ops.shotcast.reduce_gradient(x, grad, ctx.comm, ctx.root, ctx.reduction)
        return gradient, None, None, None, None, None


class Gather(torch.autograd.Function):
    """y_root = (x_0, ..., x_{N-1}), so dx_i = dy_root[i]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Collectives, root: int, algorithm: str) -> torch.Tensor:
        Gather.keep(ctx, (x, comm, root, 0, algorithm), x)
        return comm.gather(x.detach(), root, algorithm=algorithm)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        return scattered(ctx.comm, plain(grads[0]), ctx.root, ctx.algorithm, ctx.shape), None, None, None

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, ctx.comm, ctx.root, _, ctx.algorithm = inputs
        ctx.shape = x.shape

    @staticmethod
    def traced(ctx: Any, grad: torch.Tensor) -> Gradients:
        part = torch.ops.shotcast.scattered(plain(grad), ctx.comm, ctx.root, ctx.shape, ctx.algorithm)
        return part, None, None, None, None


class Scatter(torch.autograd.Function):
    """y_i = x_root[i], so dx_root = (dy_0, ..., dy_{N-1}), and dx_i = 0 elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Collectives, root: int, algorithm: str) -> torch.Tensor:
        ctx.comm, ctx.root, ctx.algorithm = comm, root, algorithm
        return comm.scatter(x.detach(), root, algorithm=algorithm)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        grad = plain(grads[0])
        whole = ctx.comm.gather(grad, ctx.root, algorithm=ctx.algorithm)
        if ctx.comm.rank != ctx.root:
            whole = _zeros_like_parts(grad, ctx.comm.world_size) + whole.sum()
        return whole, None, None, None

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.comm, ctx.root, ctx.world_size, ctx.algorithm = inputs

    @staticmethod
    def traced(ctx: Any, grad: torch.Tensor) -> Gradients:
        operands = plain(grad), ctx.comm, ctx.root, ctx.world_size, ctx.algorithm
        whole = torch.ops.shotcast.gathered_or_zeros(*operands)
        return whole, None, None, None, None


def spread(
    comm: Collectives, grad: torch.Tensor, shape: tuple[int, ...], root: int, reduction: str = "sum"
) -> torch.Tensor:
    """Return the gradient of each rank's part of a sum or an average at ``root``. Collective.

    ``grad`` is that of the result, of this shape at the root and empty elsewhere.
    """
    whole = grad.clone() if comm.rank == root else grad.new_zeros(shape) + grad.sum()
    return share(comm.broadcast(whole, root), reduction, comm.world_size)


def reduce_gradient(comm: Collectives, x: torch.Tensor, grad: torch.Tensor, root: int, reduction: str) -> torch.Tensor:
    """Return the gradient of ``x``; ``grad`` is that of the result at the root, empty elsewhere. Collective."""
    whole = spread(comm, grad, x.shape, root)
    parts = comm.all_gather(x.contiguous().view(1, *x.shape))
    return slopes(parts, whole, reduction)[comm.rank].clone()


def gathered_or_zeros(comm: Collectives, x: torch.Tensor, root: int, algorithm: str) -> torch.Tensor:
    """Return the parts of all ranks at the root, as many zeros elsewhere. Collective."""
    whole = comm.gather(x, root, algorithm=algorithm)
    return whole if comm.rank == root else _zeros_like_parts(x, comm.world_size)


def _zeros_like_parts(x: torch.Tensor, parts: int) -> torch.Tensor:
    return x.new_zeros((x.shape[0] * parts, *x.shape[1:]))


def scattered(
    comm: Collectives, whole: torch.Tensor, root: int, algorithm: str, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return this rank's part of the root's tensor; the others have an empty one."""
    if comm.rank != root:
        whole = whole.new_zeros((shape[0] * comm.world_size, *shape[1:])) + whole.sum()
    return comm.scatter(whole, root, algorithm=algorithm)


OPERATORS: dict[str, tuple[Callable[..., None], Callable[..., Gradients]]] = {
    "reduce": (Reduce.keep, Reduce.traced),
    "gather": (Gather.keep, Gather.traced),
    "scatter": (Scatter.keep, Scatter.traced),
    "spread": (keep_nothing, refuse),
    "reduce_gradient": (keep_nothing, refuse),
    "scattered": (keep_nothing, refuse),
    "gathered_or_zeros": (keep_nothing, refuse),
}
"""The function that saves the context of a backward, and the backward, for each operator."""
