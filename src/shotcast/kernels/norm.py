"""Residual add and RMSNorm of an all-reduced tensor, one row a program.

    residual' = round(x + residual)
    normed    = round(residual' / sqrt(mean(residual'^2) + eps) * weight)

in float32, with ``residual'`` as rounded. The sum of squares goes over BLOCK partial sums, so its order, and with it
the last bits of ``normed``, depend on the hidden size alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shotcast.kernels.target import INTERPRETED, await_prior_kernel, round_to

EXPLICIT_ROUNDING = tl.constexpr(INTERPRETED)


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """float32 rounded to DTYPE, as float32; the interpreter would truncate to bfloat16."""
    if EXPLICIT_ROUNDING and DTYPE == tl.bfloat16:
        result = (round_to(value, DTYPE) << 16).to(tl.float32, bitcast=True)
    else:
        result = value.to(DTYPE).to(tl.float32)
    return result


@triton.jit
def add_rms_norm(
    x, residual, weight, normed, new_residual, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    # x, residual, normed, new_residual: [tokens, HIDDEN]; weight: [HIDDEN]
    await_prior_kernel(PDL)
    dtype = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, HIDDEN, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < HIDDEN
        value = tl.load(x + row + offs, mask=mask, other=0).to(tl.float32)
        value += tl.load(residual + row + offs, mask=mask, other=0).to(tl.float32)
        value = rounded(value, dtype)
        tl.store(new_residual + row + offs, value.to(dtype), mask=mask)
        squares += value * value
    scale = tl.rsqrt(tl.sum(squares, axis=0) / HIDDEN + eps)
    for start in range(0, HIDDEN, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < HIDDEN
        value = tl.load(x + row + offs, mask=mask, other=0).to(tl.float32)
        value += tl.load(residual + row + offs, mask=mask, other=0).to(tl.float32)
        value = rounded(value, dtype) * scale * tl.load(weight + offs, mask=mask, other=0).to(tl.float32)
        tl.store(normed + row + offs, rounded(value, dtype).to(dtype), mask=mask)
