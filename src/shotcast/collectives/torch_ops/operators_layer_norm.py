"""The fused operations with a LayerNorm as PyTorch operators; see :mod:`shotcast.collectives.torch_ops.operators`."""

from __future__ import annotations

import torch

from shotcast.collectives.arguments import without_gradient
from shotcast.collectives.interface import Collectives
from shotcast.collectives.norm_operands import Fp8Normed, norm_rows
from shotcast.collectives.torch_ops import autograd_norm
from shotcast.collectives.torch_ops.communicators import named
from shotcast.collectives.torch_ops.operators import (
    Quantized,
    all_four,
    fp8_written,
    normed,
    normed_of_all,
    norms_written,
    operator,
    quantized,
    quantized_of_all,
    register_derivatives,
)

Both = tuple[torch.Tensor, torch.Tensor]
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
_OPERANDS = "Tensor x, Tensor residual, Tensor weight, Tensor? bias"


def _contiguous(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Operands:
    return x.contiguous(), residual.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()


@operator(f"all_reduce_layer_norm({_OPERANDS}, str comm, float eps, str algorithm) -> (Tensor, Tensor)", normed)
def _all_reduce_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    comm: str,
    eps: float,
    algorithm: str,
) -> Both:
    return named(comm).all_reduce_layer_norm(*_contiguous(x, residual, weight, bias), eps, algorithm)


@operator(
    f"all_reduce_layer_norm_fp8({_OPERANDS}, Tensor? scale, str comm, float eps, bool with_normed, str algorithm)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    quantized,
)
def _all_reduce_layer_norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    comm: str,
    eps: float,
    with_normed: bool,
    algorithm: str,
) -> Quantized:
    call = named(comm).all_reduce_layer_norm_fp8
    return all_four(call(*_contiguous(x, residual, weight, bias), eps, scale, with_normed, algorithm), scale)


@operator(
    f"reduce_scatter_layer_norm({_OPERANDS}, str comm, float eps, bool gather, str algorithm) -> (Tensor, Tensor)",
    normed_of_all,
)
def _reduce_scatter_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    comm: str,
    eps: float,
    gather: bool,
    algorithm: str,
) -> Both:
    return named(comm).reduce_scatter_layer_norm(*_contiguous(x, residual, weight, bias), eps, gather, algorithm)


@operator(
    f"reduce_scatter_layer_norm_fp8({_OPERANDS}, Tensor? scale, str comm, float eps, bool with_normed, bool gather, "
    "str algorithm) -> (Tensor, Tensor, Tensor, Tensor)",
    quantized_of_all,
)
def _reduce_scatter_layer_norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    comm: str,
    eps: float,
    with_normed: bool,
    gather: bool,
    algorithm: str,
) -> Quantized:
    call = named(comm).reduce_scatter_layer_norm_fp8
    return all_four(call(*_contiguous(x, residual, weight, bias), eps, scale, with_normed, gather, algorithm), scale)


register_derivatives(autograd_norm.LAYER_OPERATORS)

# -- calls of a communicator ------------------------------------------------------------------------------------------


def all_reduce_layer_norm(
    comm: Collectives,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    algorithm: str,
    out: Both | None,
) -> Both:
    """Run :meth:`Communicator.all_reduce_layer_norm` as an operator."""
    name = "all_reduce_layer_norm"
    norm_rows(name, comm.device, x, residual, weight, eps, 1, bias)
    made = torch.ops.shotcast.all_reduce_layer_norm(x, residual, weight, bias, comm.name, eps, algorithm)
    return made if out is None else norms_written(name, out, *made)


def all_reduce_layer_norm_fp8(
    comm: Collectives,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    scale: torch.Tensor | None,
    with_normed: bool,
    algorithm: str,
    out: Fp8Normed | None,
) -> Fp8Normed:
    """Run :meth:`Communicator.all_reduce_layer_norm_fp8` as an operator."""
    name = "all_reduce_layer_norm_fp8"
    norm_rows(name, comm.device, x, residual, weight, eps, 1, bias)
    operands = _constants(name, x, residual, weight, bias, scale)
    made = torch.ops.shotcast.all_reduce_layer_norm_fp8(*operands, comm.name, eps, with_normed, algorithm)
    return fp8_written(name, out, made, scale, with_normed)


def reduce_scatter_layer_norm(
    comm: Collectives,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    gather: bool,
    algorithm: str,
    out: Both | None,
) -> Both:
    """Run :meth:`Communicator.reduce_scatter_layer_norm` as an operator."""
    name = "reduce_scatter_layer_norm"
    norm_rows(name, comm.device, x, residual, weight, eps, comm.world_size, bias)
    made = torch.ops.shotcast.reduce_scatter_layer_norm(x, residual, weight, bias, comm.name, eps, gather, algorithm)
    return made if out is None else norms_written(name, out, *made)


def reduce_scatter_layer_norm_fp8(
    comm: Collectives,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    scale: torch.Tensor | None,
    with_normed: bool,
    gather: bool,
    algorithm: str,
    out: Fp8Normed | None,
) -> Fp8Normed:
    """Run :meth:`Communicator.reduce_scatter_layer_norm_fp8` as an operator."""
    name = "reduce_scatter_layer_norm_fp8"
    norm_rows(name, comm.device, x, residual, weight, eps, comm.world_size, bias)
    operands = _constants(name, x, residual, weight, bias, scale)
    made = torch.ops.shotcast.reduce_scatter_layer_norm_fp8(*operands, comm.name, eps, with_normed, gather, algorithm)
    return fp8_written(name, out, made, scale, with_normed)


def _constants(
    name: str,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the operands of a call that has no derivative. Raises UnsupportedError if one requires grad."""
    without_gradient(name, x=x, residual=residual, weight=weight, bias=bias, scale=scale)
    operands = x, residual, weight, bias, scale
    return tuple(None if operand is None else operand.detach() for operand in operands)
