"""Derivatives of the fused calls: those of the sum, the residual add and the RMSNorm, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shotcast.collectives.interface import Collectives
from shotcast.collectives.torch_ops.autograd import Gradients, plain
from shotcast.memory.operands import NormTensors

Both = tuple[torch.Tensor, torch.Tensor]


def requires_grad(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: Both | None) -> bool:
    """Return whether a call reads or writes a tensor that requires grad."""
    if x.requires_grad or residual.requires_grad or weight.requires_grad:
        return True
    return out is not None and (out[0].requires_grad or out[1].requires_grad)


def differentiated(x: torch.Tensor, tensors: NormTensors, out: Both | None, *arguments: Any) -> Both:
    """Return (normed, new_residual) as :class:`SumNorm` does with ``arguments``; with ``out``, copied there."""
    made = SumNorm.apply(x, tensors.residual, tensors.weight, tensors.eps, *arguments)
    return made if out is None else (out[0].copy_(made[0]), out[1].copy_(made[1]))


class SumNorm(torch.autograd.Function):
    """new_residual = sum + residual, and normed = rms_norm(new_residual) * weight.

    The sum is an all-reduce or, with ``scatter``, a reduce-scatter, after which the norm may be gathered.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        comm: Collectives,
        scatter: bool,
        gather: bool,
        algorithm: str,
    ) -> Both:
        ctx.comm, ctx.eps, ctx.scatter, ctx.gather = comm, eps, scatter, gather
        operands = x.detach(), residual.detach(), weight.detach(), eps
        if scatter:
            normed, new_residual = comm.reduce_scatter_rms_norm(*operands, gather, algorithm)
        else:
            normed, new_residual = comm.all_reduce_rms_norm(*operands, algorithm)
        ctx.save_for_backward(new_residual, weight)
        return normed, new_residual

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        share = ctx.comm.reduce_scatter if ctx.gather else None
        whole = ctx.comm.all_gather if ctx.scatter else ctx.comm.all_reduce
        return *_gradients(ctx, grads, share, whole), None, None, None, None, None

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...], output: Both) -> None:
        x, residual, weight, ctx.comm, ctx.eps, *gather, _ = inputs
        ctx.gather = bool(gather and gather[0])
        ctx.world_size = x.shape[0] // residual.shape[0] if gather else 0
        ctx.save_for_backward(output[1], weight)

    @staticmethod
    def traced(ctx: Any, *grads: torch.Tensor) -> Gradients:
        def whole(grad: torch.Tensor) -> torch.Tensor:
            return torch.ops.shotcast.all_reduce(grad, ctx.comm, "auto", "sum")

        return *_gradients(ctx, grads, None, whole), None, None, None

    @staticmethod
    def traced_scattered(ctx: Any, *grads: torch.Tensor) -> Gradients:
        def share(grad: torch.Tensor) -> torch.Tensor:
            return torch.ops.shotcast.reduce_scatter(grad, ctx.comm, ctx.world_size, "auto", "sum")

        def whole(grad: torch.Tensor) -> torch.Tensor:
            return torch.ops.shotcast.all_gather(grad, ctx.comm, ctx.world_size, "auto")

        return *_gradients(ctx, grads, share if ctx.gather else None, whole), None, None, None, None


def _gradients(
    ctx: Any,
    grads: tuple[torch.Tensor, ...],
    share: Callable[[torch.Tensor], torch.Tensor] | None,
    whole: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, residual and weight.

    With y = r / rms(r), the gradient of r is (g - y mean(g y)) / rms(r), where g is that of y; in float32.
    """
    new_residual, weight = ctx.saved_tensors
    dtype = new_residual.dtype
    d_normed = (plain(grads[0]) if share is None else share(plain(grads[0]))).float()
    rows = new_residual.float()
    inverse = torch.rsqrt(rows.square().mean(-1, keepdim=True) + ctx.eps)
    unit = rows * inverse
    d_unit = d_normed * weight.float()
    d_rows = inverse * (d_unit - unit * (d_unit * unit).mean(-1, keepdim=True))
    d_residual = (d_rows + grads[1].float()).to(dtype)
    d_weight = (d_normed * unit).view(-1, weight.shape[0]).sum(0).to(dtype)
    return whole(plain(d_residual)), d_residual, d_weight


OPERATORS: dict[str, tuple[Callable[..., None], Callable[..., Gradients]]] = {
    "all_reduce_rms_norm": (SumNorm.keep, SumNorm.traced),
    "reduce_scatter_rms_norm": (SumNorm.keep, SumNorm.traced_scattered),
}
"""The same as in :mod:`shotcast.collectives.torch_ops.autograd`."""
