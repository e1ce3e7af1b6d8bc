"""Weights from codes of 4 bits or FP8 with a scale for each group of inputs.

    weight = (code - zero) * scale       or       weight = e4m3 * scale

Kernels that multiply few rows dequantize as they go (:mod:`shotcast.kernels.triton.skinny_gemm`); for more rows, the
matrix is dequantized first, and its read and write are a small part of the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shotcast.device.triton.float8 import from_e4m3
from shotcast.device.triton.intrinsics import has_float8_conversions, launch_options
from shotcast.device.triton.words import round_float

_MAGIC = tl.constexpr(0x4B000000)
_MAGIC_FLOAT = tl.constexpr(8388608.0)
"""2^23 as float32, and its bits: of the numbers from here to 2^24, the last bits are the whole number beyond it."""


@triton.jit
def load_codes(
    values, zeros, rows, group, start, outputs, inputs, TILE: tl.constexpr, COLUMNS: tl.constexpr, NATIVE: tl.constexpr
):
    """Load COLUMNS columns from ``start`` on, all of one group, as whole numbers or FP8 without their scale: float32
    [TILE, COLUMNS].

    ``zeros`` is None for FP8.
    """
    if zeros is not None:
        i = tl.arange(0, COLUMNS // 8)
        words = tl.load(
            values + rows[:, None] * (inputs // 8) + (start // 8 + i)[None, :], eviction_policy="evict_first"
        )
        zero = tl.load(zeros + group * outputs + rows).to(tl.float32) + _MAGIC_FLOAT
        codes = (words[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15
        # faster than a conversion of each code
        found = (tl.reshape(codes, [TILE, COLUMNS]) | _MAGIC).to(tl.float32, bitcast=True) - zero[:, None]
    else:
        address = rows[:, None] * inputs + (start + tl.arange(0, COLUMNS))[None, :]
        if NATIVE:
            found = tl.load(values + address, eviction_policy="evict_first").to(tl.float32)
        else:
            bytes_of = values.to(tl.pointer_type(tl.uint8))
            found = from_e4m3(tl.load(bytes_of + address, eviction_policy="evict_first").to(tl.int32))
    return found


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
    group = start // GROUP
    found = load_codes(values, zeros, rows, group, start, outputs, inputs, TILE, COLUMNS, NATIVE)
    found = found * tl.load(scales + group * outputs + rows).to(tl.float32)[:, None]
    address = rows[:, None] * inputs + (start + tl.arange(0, COLUMNS))[None, :]
    tl.store(out + address, round_float(found, out.dtype.element_ty), mask=(n < outputs)[:, None])


_TILE = 16
"""Outputs of a program."""
MOST_COLUMNS = 128
"""The most columns of a step."""


def step_columns(group: int) -> int:
    """Return the columns of a step: the largest power of two that divides the group, at most MOST_COLUMNS."""
    return min(MOST_COLUMNS, group & -group)


def dequantize(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the matrix [outputs, inputs] in ``dtype``, each value rounded once.

    The others are as in :class:`~shotcast.layers.quantized.GroupedRows`; 8 divides the group.
    """
    outputs, inputs = values.shape[0], values.shape[1] * (1 if zeros is None else 8)
    out = torch.empty(outputs, inputs, dtype=dtype, device=values.device)
    columns = step_columns(group)
    options = launch_options(values.device, 4)
    options.pop("launch_pdl")
    dequantize_kernel[(triton.cdiv(outputs, _TILE), inputs // columns)](
        values,
        scales,
        zeros,
        out,
        outputs,
        inputs,
        group,
        _TILE,
        columns,
        has_float8_conversions(values.device),
        **options,
    )
    return out
