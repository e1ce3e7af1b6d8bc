"""Row-wise operations between two matmuls: gating, FP8 quantization with one scale per row, or both in one kernel.

value     = x, or activation(first half) * second half        in float32
scale     = max |value| / 448 of the row, at least 2^-126
quantized = e4m3(value / scale)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import await_prior_kernel, launch_options, release_next_kernel
from shotcast.device.triton.words import round_float
from shotcast.kernels.activation import Activation
from shotcast.kernels.triton.norm import e4m3_byte, magnitude, scale_of


@triton.jit
def silu(x):
    """Compute x / (1 + exp(-x)) without overflow."""
    small = tl.exp(-tl.abs(x))
    return x * tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def tanh(x):
    """Compute the hyperbolic tangent to within 2^-23, without overflow."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def gelu_tanh(x):
    """Compute the tanh approximation of GELU (Hendrycks and Gimpel, arXiv 1606.08415)."""
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def rows_kernel(
    x,
    out,
    scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    QUANTIZE: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, part): write BLOCK columns (with QUANTIZE, all WIDTH columns) of the row to ``out`` [rows,
    WIDTH]."""
    release_next_kernel(PDL)
    await_prior_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    source = x + row * (2 * WIDTH if GATED else WIDTH)
    value = tl.load(source + i, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        gate = gelu_tanh(value) if GELU else silu(value)
        value = gate * tl.load(source + WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    if QUANTIZE:
        factor = scale_of(tl.max(magnitude(value), axis=0))
        tl.store(scale + row, factor)
        byte = e4m3_byte(value * tl.div_rn(1.0, factor))
        tl.store(out + row * WIDTH + i, byte.to(tl.uint8).to(out.dtype.element_ty, bitcast=True), mask=inside)
    else:
        tl.store(out + row * WIDTH + i, round_float(value, out.dtype.element_ty), mask=inside)


_BLOCK = 2048
"""Columns per program if rows may be divided."""


def gate(x: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """Compute ``activation(first half of the columns) * second half``, rounded once: [rows, 2 * width] to [rows,
    width]."""
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    block = min(_BLOCK, triton.next_power_of_2(out.shape[1]))
    _launch(x, out, None, block, True, activation)
    return out


def quantize(
    x: torch.Tensor, gated: bool = False, activation: Activation = "silu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows to FP8; with ``gated``, after :func:`gate`.

    Returns float8_e4m3fn [rows, width] and float32 [rows, 1], whose product approximates the rows.

    Args:
        x: contiguous [rows, columns], in a floating-point dtype.
    """
    width = x.shape[1] // 2 if gated else x.shape[1]
    out = x.new_empty(x.shape[0], width, dtype=torch.float8_e4m3fn)
    scale = x.new_empty(x.shape[0], 1, dtype=torch.float32)
    _launch(x, out, scale, triton.next_power_of_2(width), gated, activation)
    return out, scale


def _launch(
    x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor | None, block: int, gated: bool, activation: Activation
) -> None:
    rows, width = out.shape
    if rows:
        options = launch_options(x.device, warps=max(1, min(16, block // 512)))
        quantizes = scale is not None
        grid = (rows, triton.cdiv(width, block))
        gelu = activation == "gelu_tanh"
        rows_kernel[grid](x, out, scale, width, block, gated, quantizes, gelu, options["launch_pdl"], **options)
