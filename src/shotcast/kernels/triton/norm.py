"""Residual addition, RMSNorm and FP8 quantisation of a row, as a separate kernel and as the end of the fused kernels.

    residual' = round(x + residual)
    normed    = round(residual' / sqrt(mean(residual'^2) + eps) * weight)
    quantized = e4m3(clamp(normed * (1 / scale), -448, 448)),  scale given, or max |normed| / 448 of the row

All is computed in float32, from ``residual'`` and ``normed`` as rounded. A program holds a whole row in registers, as
32-bit words. The squares add up in an order that depends only on the row's length (:func:`tree_sum_of_squares`), so
every kernel that normalises a row gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from shotcast import wire
from shotcast.device.triton import tiles
from shotcast.device.triton.float8 import E4M3_MAX, to_e4m3
from shotcast.device.triton.intrinsics import (
    INTERPRETED,
    await_prior_kernel,
    kernel,
    launch_options,
    release_next_kernel,
)
from shotcast.device.triton.words import load_words, nan_unless, pack, store_words, unpack
from shotcast.memory.operands import NormTensors
from shotcast.wire import Norm

NONE = tl.constexpr(wire.QUANTIZATIONS.index(""))
STATIC = tl.constexpr(wire.QUANTIZATIONS.index("static"))
DYNAMIC = tl.constexpr(wire.QUANTIZATIONS.index("dynamic"))
SMALLEST_SCALE = tl.constexpr(2.0**-126)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def tree_sum(values, COUNT: tl.constexpr):
    """Sum COUNT values, a power of two: neighbours, then neighbouring pairs, and so on, whichever threads hold them."""
    for level in tl.static_range(10):
        if COUNT >> level > 1:
            values = tl.sum(tl.reshape(values, [COUNT >> (level + 1), 2]), axis=1)
    return tl.sum(values, axis=0)


@triton.jit
def tree_sum_of_squares(words, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Sum the squares of all values in BLOCK words (16 or more): of each quad, then of 32 quads by the lanes of a warp,
    then in a tree.

    No order is left to the compiler's choice of layout, so a row gives the same bits whether one program holds it or
    several hold a tile each.
    """
    QUADS: tl.constexpr = BLOCK // 4
    LANES: tl.constexpr = QUADS if QUADS < 32 else 32
    low, high = unpack(words, DTYPE)
    squares = low * low
    if DTYPE != tl.float32:
        squares = squares + high * high
    even, odd = tl.split(tl.reshape(squares, [QUADS, 2, 2]))
    first, second = tl.split(even + odd)
    return tree_sum(tl.sum(tl.reshape(first + second, [QUADS // LANES, LANES]), axis=1), QUADS // LANES)


@triton.jit
def add_norm(total, residual, weight, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Return (new residual, norm) of a row, from the words of the sum, the residual and the weight; zero beyond the
    row's end."""
    low, high = unpack(total, DTYPE)
    more_low, more_high = unpack(residual, DTYPE)
    new_residual = pack(low + more_low, high + more_high, DTYPE)
    low, high = unpack(new_residual, DTYPE)
    factor = tl.rsqrt(tree_sum_of_squares(new_residual, BLOCK, DTYPE) / HIDDEN + eps)
    weight_low, weight_high = unpack(weight, DTYPE)
    return new_residual, pack(low * factor * weight_low, high * factor * weight_high, DTYPE)


@triton.jit
def magnitude(value):
    """Return |value| as an integer of the same order; 0 for NaN."""
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits > _INFINITY, 0, bits)


@triton.jit
def scale_of(largest):
    """Return a row's own scale: its largest :func:`magnitude` / 448, at least 2^-126, whose inverse is finite."""
    return tl.maximum(tl.div_rn(largest.to(tl.float32, bitcast=True), E4M3_MAX), SMALLEST_SCALE)


@triton.jit
def e4m3_byte(value):
    """Return the byte of a scaled value. NaN is 0x7F, whatever its sign, so that no word of bytes is the sentinel."""
    byte = to_e4m3(value)
    return tl.where((byte & 0x7F) == 0x7F, 0x7F, byte)


@triton.jit
def quantized_words(normed, scale, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Quantise a row to FP8, four values a word: BLOCK / 2 words of 16-bit floats, BLOCK / 4 of float32."""
    inverse = tl.div_rn(1.0, scale)
    low, high = unpack(normed, DTYPE)
    if DTYPE == tl.float32:
        even, odd = tl.split(tl.reshape(e4m3_byte(low * inverse), [BLOCK // 2, 2]))
        pairs = even | (odd << 8)
        first, second = tl.split(tl.reshape(pairs, [BLOCK // 4, 2]))
    else:
        pairs = e4m3_byte(low * inverse) | (e4m3_byte(high * inverse) << 8)
        first, second = tl.split(tl.reshape(pairs, [BLOCK // 2, 2]))
    return first | (second << 16)


@triton.jit
def finish_row(
    live,
    row,
    at,
    total,
    before,
    gain,
    new_residual,
    normed,
    quantized,
    scale,
    eps,
    HIDDEN: tl.constexpr,
    QUANTIZE: tl.constexpr,
    KEEPS_NORMED: tl.constexpr,
    DTYPE: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute and store everything that follows from the words of a row's sum.

    The row is ``row`` in this rank's tensors, and ``at`` in tensors that may be gathered. ``before`` and ``gain`` are
    words of the residual and the weight. All results are NaN if the call was stopped.

    Returns:
        The words of the norm and of its FP8 form (if asked for), and the row's own scale (if it has one).
    """
    ROW: tl.constexpr = HIDDEN * DTYPE.primitive_bitwidth // 8
    FP8_UNIT: tl.constexpr = 16 if HIDDEN % 16 == 0 else 4 if HIDDEN % 4 == 0 else 2 if HIDDEN % 2 == 0 else 1
    FP8_BLOCK: tl.constexpr = BLOCK // (DTYPE.primitive_bitwidth // 8)
    offs = tl.arange(0, BLOCK)
    after, norm = add_norm(nan_unless(live, total, DTYPE), before, gain, eps, HIDDEN, BLOCK, DTYPE)
    store_words(new_residual, row * ROW, offs, after, ROW, UNIT)
    if KEEPS_NORMED:
        store_words(normed, at * ROW, offs, norm, ROW, UNIT)
    packed = norm
    row_factor = eps
    if QUANTIZE != NONE:
        if QUANTIZE == DYNAMIC:
            low, high = unpack(norm, DTYPE)
            largest = tl.max(tl.maximum(magnitude(low), magnitude(high)), axis=0)
            row_factor = tl.where(live != 0, scale_of(largest), float("nan"))
            tl.store(scale.to(tl.int64).to(tl.pointer_type(tl.float32)) + at, row_factor)
        else:
            row_factor = tl.load(scale.to(tl.int64).to(tl.pointer_type(tl.float32)))
        packed = quantized_words(norm, row_factor, BLOCK, DTYPE)
        store_words(quantized, at * HIDDEN, tl.arange(0, FP8_BLOCK), packed, HIDDEN, FP8_UNIT)
    return norm, packed, row_factor


@kernel
def add_rms_norm(
    x,
    residual,
    weight,
    new_residual,
    normed,
    quantized,
    scale,
    eps,
    HIDDEN: tl.constexpr,
    QUANTIZE: tl.constexpr,
    KEEPS_NORMED: tl.constexpr,
    DTYPE: tl.constexpr,
    UNIT: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row): normalise one row of up to ROW_BLOCK words; UNIT is as in ``words.load_words``."""
    release_next_kernel(PDL)
    await_prior_kernel(PDL)
    ROW: tl.constexpr = HIDDEN * DTYPE.primitive_bitwidth // 8
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, ROW_BLOCK)
    start = row * ROW
    finish_row(
        tl.program_id(0) * 0 + 1,
        row,
        row,
        load_words(x, start, offs, ROW, UNIT),
        load_words(residual, start, offs, ROW, UNIT),
        load_words(weight, 0, offs, ROW, UNIT),
        new_residual,
        normed,
        quantized,
        scale,
        eps,
        HIDDEN,
        QUANTIZE,
        KEEPS_NORMED,
        DTYPE,
        UNIT,
        ROW_BLOCK,
    )


DTYPES = {"float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16}


NORM_ADDRESSES = ("residual", "weight", "new_residual", "normed", "quantized", "scale", "eps")
"""Arguments of every kernel with a norm that differ from call to call; see :func:`norm_addresses`."""


def norm_addresses(tensors: NormTensors, nowhere: int) -> tuple[Any, ...]:
    """Return the values of :data:`NORM_ADDRESSES`. Tensors that do not exist get the address ``nowhere``."""

    def address(tensor: torch.Tensor | None) -> int:
        return (tensor.data_ptr() if tensor is not None else 0) or nowhere

    return (
        address(tensors.residual),
        address(tensors.weight),
        address(tensors.new_residual),
        address(tensors.normed),
        address(tensors.quantized),
        address(tensors.scale),
        tensors.eps,
    )


def norm_arguments(norm: Norm, nowhere: int) -> dict[str, Any]:
    """Return the arguments of a norm for every kernel, with ``nowhere`` and 0 for those that differ from call to
    call."""
    return dict.fromkeys(NORM_ADDRESSES, nowhere) | {
        "eps": 0.0,
        "HIDDEN": norm.hidden,
        "QUANTIZE": wire.QUANTIZATIONS.index(norm.quantize),
        "KEEPS_NORMED": norm.keeps_normed,
    }


def launch_add_rms_norm(x: torch.Tensor, tensors: NormTensors, norm: Norm) -> None:
    """Normalise the rows of ``x`` [rows, hidden]. All tensors begin at multiples of 16 bytes; ``x`` may be one of
    ``tensors``."""
    item = x.element_size()
    row = norm.hidden * item
    block, warps = tiles.row_tile(-(-row // 4))
    launched = launch_options(x.device, warps)
    addresses = dict(zip(NORM_ADDRESSES, norm_addresses(tensors, x.data_ptr()), strict=True))
    arguments = (
        norm_arguments(norm, x.data_ptr())
        | addresses
        | {
            "x": x.data_ptr(),
            "DTYPE": DTYPES[str(x.dtype).removeprefix("torch.")],
            "UNIT": 16 if row % 16 == 0 else item,
            "ROW_BLOCK": block,
            "PDL": launched["launch_pdl"],
        }
    )
    options = launched | {"enable_fp_fusion": False}
    if INTERPRETED or torch.cuda.current_device() == x.device.index:
        add_rms_norm[(x.numel() // norm.hidden,)](**arguments, **options)
    else:
        with torch.cuda.device(x.device):
            add_rms_norm[(x.numel() // norm.hidden,)](**arguments, **options)
