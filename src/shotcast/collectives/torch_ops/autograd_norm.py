"""Derivatives of the fused calls: those of the sum, the residual add and the norm, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shotcast.collectives.interface import Collectives
from shotcast.collectives.torch_ops.autograd import Gradients, plain
from shotcast.memory.operands import NormTensors

Both = tuple[torch.Tensor, torch.Tensor]


def requires_grad(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: Both | None
) -> bool:
    """Return whether a call reads or writes a tensor that requires grad."""
    if x.requires_grad or residual.requires_grad or weight.requires_grad:
        return True
    if bias is not None and bias.requires_grad:
        return True
    return out is not None and (out[0].requires_grad or out[1].requires_grad)


def differentiated(x: torch.Tensor, tensors: NormTensors, out: Both | None, *arguments: Any) -> Both:
    """Return (normed, new_residual) as :class:`SumNorm` does with ``arguments``; with ``out``, copied there."""
    made = SumNorm.apply(x, tensors.residual, tensors.weight, tensors.bias, tensors.eps, *arguments)
    return made if out is None else (out[0].copy_(made[0]), out[1].copy_(made[1]))


class SumNorm(torch.autograd.Function):
    """new_residual = sum + residual, and normed = rms_norm(new_residual) * weight, or with ``layer`` a LayerNorm.

    The sum is an all-reduce or, with ``scatter``, a reduce-scatter, after which the norm may be gathered.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        comm: Collectives,
        layer: bool,
        scatter: bool,
        gather: bool,
        algorithm: str,
    ) -> Both:
        ctx.comm, ctx.eps, ctx.layer, ctx.scatter, ctx.gather = comm, eps, layer, scatter, gather
        operands = x.detach(), residual.detach(), weight.detach()
        if layer:
            shift = None if bias is None else bias.detach()
            if scatter:
                normed, new_residual = comm.reduce_scatter_layer_norm(*operands, shift, eps, gather, algorithm)
            else:
                normed, new_residual = comm.all_reduce_layer_norm(*operands, shift, eps, algorithm)
        elif scatter:
            normed, new_residual = comm.reduce_scatter_rms_norm(*operands, eps, gather, algorithm)
        else:
            normed, new_residual = comm.all_reduce_rms_norm(*operands, eps, algorithm)
        ctx.has_bias = bias is not None
        ctx.save_for_backward(new_residual, weight)
        return normed, new_residual

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        share = ctx.comm.reduce_scatter if ctx.gather else None
        whole = ctx.comm.all_gather if ctx.scatter else ctx.comm.all_reduce
        return *_gradients(ctx, grads, share, whole), *(None,) * 6

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...], output: Both) -> None:
        x, residual, weight, ctx.comm, ctx.eps, *gather, _ = inputs
        ctx.layer = ctx.has_bias = False
        _keep(ctx, x, residual, gather, output[1], weight)

    @staticmethod
    def keep_layer(ctx: Any, inputs: tuple[Any, ...], output: Both) -> None:
        x, residual, weight, bias, ctx.comm, ctx.eps, *gather, _ = inputs
        ctx.layer, ctx.has_bias = True, bias is not None
        _keep(ctx, x, residual, gather, output[1], weight)

    @staticmethod
    def traced(ctx: Any, *grads: torch.Tensor) -> Gradients:
        def whole(grad: torch.Tensor) -> torch.Tensor:
            return torch.ops.shotcast.all_reduce(grad, ctx.comm, "auto", "sum")

        return _of_operator(ctx, _gradients(ctx, grads, None, whole), 3)

    @staticmethod
    def traced_scattered(ctx: Any, *grads: torch.Tensor) -> Gradients:
        def share(grad: torch.Tensor) -> torch.Tensor:
            return torch.ops.shotcast.reduce_scatter(grad, ctx.comm, ctx.world_size, "auto", "sum")

        def whole(grad: torch.Tensor) -> torch.Tensor:
            return torch.ops.shotcast.all_gather(grad, ctx.comm, ctx.world_size, "auto")

        return _of_operator(ctx, _gradients(ctx, grads, share if ctx.gather else None, whole), 4)


def _keep(
    ctx: Any,
    x: torch.Tensor,
    residual: torch.Tensor,
    gather: list[bool],
    new_residual: torch.Tensor,
    weight: torch.Tensor,
) -> None:
    ctx.gather = bool(gather and gather[0])
    ctx.world_size = x.shape[0] // residual.shape[0] if gather else 0
    ctx.save_for_backward(new_residual, weight)


def _of_operator(ctx: Any, gradients: Gradients, others: int) -> Gradients:
    """Return the gradients of an operator's inputs, of which the last ``others`` have none."""
    return *(gradients if ctx.layer else gradients[:3]), *(None,) * others


def _gradients(
    ctx: Any,
    grads: tuple[torch.Tensor, ...],
    share: Callable[[torch.Tensor], torch.Tensor] | None,
    whole: Callable[[torch.Tensor], torch.Tensor],
) -> Gradients:
    """Return the gradients of x, residual, weight and bias.

    With y = r / rms(r), the gradient of r is (g - y mean(g y)) / rms(r), where g is that of y; in float32. The same
    holds for r less its mean, through which the mean of the gradient is subtracted, too.
    """
    new_residual, weight = ctx.saved_tensors
    dtype = new_residual.dtype
    d_normed = (plain(grads[0]) if share is None else share(plain(grads[0]))).float()
    rows = new_residual.float()
    if ctx.layer:
        rows = rows - rows.mean(-1, keepdim=True)
    inverse = torch.rsqrt(rows.square().mean(-1, keepdim=True) + ctx.eps)
    unit = rows * inverse
    d_unit = d_normed * weight.float()
    d_rows = inverse * (d_unit - unit * (d_unit * unit).mean(-1, keepdim=True))
    if ctx.layer:
        d_rows = d_rows - d_rows.mean(-1, keepdim=True)
    d_residual = (d_rows + grads[1].float()).to(dtype)
    d_weight = (d_normed * unit).view(-1, weight.shape[0]).sum(0).to(weight.dtype)
    d_bias = d_normed.view(-1, weight.shape[0]).sum(0).to(weight.dtype) if ctx.has_bias else None
    return whole(plain(d_residual)), d_residual, d_weight, d_bias


OPERATORS: dict[str, tuple[Callable[..., None], Callable[..., Gradients]]] = {
    "all_reduce_rms_norm": (SumNorm.keep, SumNorm.traced),
    "reduce_scatter_rms_norm": (SumNorm.keep, SumNorm.traced_scattered),
}
LAYER_OPERATORS: dict[str, tuple[Callable[..., None], Callable[..., Gradients]]] = {
    "all_reduce_layer_norm": (SumNorm.keep_layer, SumNorm.traced),
    "reduce_scatter_layer_norm": (SumNorm.keep_layer, SumNorm.traced_scattered),
}
"""The same as in :mod:`shotcast.collectives.torch_ops.autograd`."""
