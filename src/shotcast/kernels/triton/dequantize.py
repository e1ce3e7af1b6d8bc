"""Dequantization of whole matrices from groups of inputs that share a scale (:mod:`shotcast.kernels.triton.grouped`).

Kernels that multiply few rows dequantize as they go; for more rows, the whole matrix is dequantized first, and reading
and writing it is a small part of the matmul's cost.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import has_float8_conversions, launch_options
from shotcast.device.triton.words import round_float
from shotcast.kernels.triton.grouped import BLOCK, SLICE, codes_as_float32, load_float8, load_scales, step_columns


@triton.jit
def dequantize_kernel(
    values,
    scales,
    zeros,
    out,
    outputs,
    inputs,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Program (tile of outputs, step of columns): write COLUMNS columns of TILE rows to ``out`` [outputs, inputs]."""
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    rows = tl.minimum(n, outputs - 1).to(tl.int64)
    start = tl.program_id(1) * COLUMNS
    if zeros is not None:
        i = tl.arange(0, SLICE)
        width = tl.cdiv(inputs, BLOCK) * SLICE
        words = tl.load(values + rows[:, None] * width + (start // 8 + i)[None, :], eviction_policy="evict_first")
        for place in tl.static_range(8):
            k = start + place * SLICE + i
            group = (start + place * SLICE) // GROUP
            scale, zero = load_scales(scales, zeros, rows, group, outputs, inputs, GROUP)
            found = (codes_as_float32(words, place) - zero[:, None]) * scale[:, None]
            inside = (n < outputs)[:, None] & (k < inputs)[None, :]
            tl.store(out + rows[:, None] * inputs + k[None, :], round_float(found, out.dtype.element_ty), mask=inside)
    else:
        k = start + tl.arange(0, COLUMNS)
        scale, _ = load_scales(scales, zeros, rows, start // GROUP, outputs, inputs, GROUP)
        found = load_float8(values, rows, start, inputs, COLUMNS, NATIVE) * scale[:, None]
        rounded = round_float(found, out.dtype.element_ty)
        tl.store(out + rows[:, None] * inputs + k[None, :], rounded, mask=(n < outputs)[:, None])


_TILE = 16
"""Outputs per program."""


def dequantize(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantize to a matrix [outputs, inputs] in ``dtype``, rounding each value once.

    The other arguments are as in :class:`~shotcast.layers.quantized.GroupedRows`; 16 divides the group.
    """
    outputs, inputs = values.shape[0], scales.shape[0] * group
    out = torch.empty(outputs, inputs, dtype=dtype, device=values.device)
    columns = step_columns(group) if zeros is None else BLOCK.value
    options = launch_options(values.device, 4)
    options.pop("launch_pdl")
    grid = (triton.cdiv(outputs, _TILE), triton.cdiv(inputs, columns))
    shape = group, _TILE, columns, has_float8_conversions(values.device)
    dequantize_kernel[grid](values, scales, zeros, out, outputs, inputs, *shape, **options)
    return out
