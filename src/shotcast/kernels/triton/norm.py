"""Residual addition, norm and FP8 quantization of a row, as a separate kernel and as the epilogue of the fused kernels.

    residual' = round(x + residual)
    normed    = round(residual' / sqrt(mean(residual'^2) + eps) * weight)                                    RMSNorm
    normed    = round((residual' - mean(residual')) / sqrt(variance(residual') + eps) * weight + bias)       LayerNorm
    quantized = e4m3(clamp(normed * (1 / scale), -448, 448)),  scale given, or max |normed| / 448 of the row

Weight and bias may have another dtype. Everything is computed in float32, from ``residual'`` and ``normed`` as rounded.
A program holds a whole row in registers, as 32-bit words. Squares are added in an order that depends only on the row's
length (:func:`tree_sum_of_squares`), and so are mean and variance (:func:`moments_of`). Every kernel that normalizes a
row therefore gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

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
RMS = tl.constexpr(wire.NORM_KINDS.index(wire.RMS))
LAYER_WITH_BIAS = tl.constexpr(wire.NORM_KINDS.index(wire.LAYER_WITH_BIAS))


class NormAddresses(NamedTuple):
    """The per-call arguments of every kernel with a norm; see :func:`norm_addresses`."""

    residual: Any
    weight: Any
    bias: Any
    new_residual: Any
    normed: Any
    quantized: Any
    scale: Any
    eps: Any


@dataclass(frozen=True, slots=True)
class NormShape:
    """The SHAPE argument of a kernel with a norm: the :class:`~shotcast.wire.Norm`, and the dtype of rows."""

    HIDDEN: int
    QUANTIZE: int
    KEEPS_NORMED: bool
    WEIGHT: tl.dtype
    KIND: int
    DTYPE: tl.dtype
    PDL: bool


@dataclass(frozen=True, slots=True)
class RowShape(NormShape):
    """The SHAPE argument of a kernel that normalizes whole rows of up to ROW_BLOCK words; UNIT is as in
    ``load_words``."""

    UNIT: int
    ROW_BLOCK: int


@triton.jit
def tree_sum(values, COUNT: tl.constexpr):
    """Sum COUNT values, a power of two: neighbors, then neighboring pairs, and so on, whichever threads hold them."""
    for level in tl.static_range(10):
        if COUNT >> level > 1:
            values = tl.sum(tl.reshape(values, [COUNT >> (level + 1), 2]), axis=1)
    return tl.sum(values, axis=0)


@triton.jit
def sums_of_leaves(low, high, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Sum the values of each leaf of a row, the 128 words (or all, if there are fewer) that a warp loads at once.

    ``low`` and ``high`` are the values of BLOCK words (16 or more). They are added up within each quad, and then over
    32 quads as the lanes of a warp do: quads 16 apart, then 8 apart, and so on. Each step adds two values, because the
    order of a longer sum would depend on which threads hold the values, and thus on unrelated loads such as loads of
    weights.
    """
    QUADS: tl.constexpr = BLOCK // 4
    LANES: tl.constexpr = QUADS if QUADS < 32 else 32
    values = low
    if DTYPE != tl.float32:
        values = low + high
    even, odd = tl.split(tl.reshape(values, [QUADS, 2, 2]))
    first, second = tl.split(even + odd)
    sums = first + second
    for level in tl.static_range(5):
        if LANES >> level > 1:
            sums = tl.sum(tl.reshape(sums, [QUADS // LANES, 2, LANES >> (level + 1)]), axis=1)
    return tl.reshape(sums, [QUADS // LANES])


@triton.jit
def tree_sum_of_squares(words, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Sum the squares of all values in BLOCK words (16 or more), within each leaf and then over the leaves in a tree.

    No order is left to the compiler's choice of layout, so a row gives the same bits whether one program holds it or
    several hold a tile each.
    """
    low, high = unpack(words, DTYPE)
    LEAVES: tl.constexpr = BLOCK // 128 if BLOCK > 128 else 1
    return tree_sum(sums_of_leaves(low * low, high * high, BLOCK, DTYPE), LEAVES)


@triton.jit
def count_within(count, first, size):
    """Count, in float32, how many of the ``size`` values starting at ``first`` are among the first ``count``."""
    return tl.minimum(tl.maximum(count - first, 0), size).to(tl.float32)


@triton.jit
def merge_moments(means, squares, count, LEAVES: tl.constexpr, LEAF: tl.constexpr):
    """Merge the (mean, sum of squared differences from it) of LEAVES parts of LEAF values each.

    LEAVES is a power of two, and only the first ``count`` values exist. Neighbors are merged, then neighboring pairs,
    and so on, so the bits are the same whether one program has all parts or several have some of them each.
    """
    for level in tl.static_range(10):
        if LEAVES >> level > 1:
            left, right = tl.split(tl.reshape(means, [LEAVES >> (level + 1), 2]))
            left_squares, right_squares = tl.split(tl.reshape(squares, [LEAVES >> (level + 1), 2]))
            first = tl.arange(0, LEAVES >> (level + 1)) * (2 * LEAF << level)
            lefts = count_within(count, first, LEAF << level)
            rights = count_within(count, first + (LEAF << level), LEAF << level)
            share = tl.div_rn(rights, tl.maximum(lefts + rights, 1.0))
            apart = right - left
            means = left + apart * share
            squares = left_squares + right_squares + apart * apart * (lefts * share)
    return tl.sum(means, axis=0), tl.sum(squares, axis=0)


@triton.jit
def moments_of(low, high, count, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Compute (mean, sum of squared differences from it) of the first ``count`` values in BLOCK words.

    Each leaf takes two passes: one for its mean, and one for the squared differences from it. Leaves are then merged.
    """
    VALUES: tl.constexpr = 1 if DTYPE == tl.float32 else 2  # in a word
    LEAVES: tl.constexpr = BLOCK // 128 if BLOCK > 128 else 1
    WORDS: tl.constexpr = BLOCK // LEAVES
    counts = count_within(count, tl.arange(0, LEAVES) * (WORDS * VALUES), WORDS * VALUES)
    means = tl.div_rn(sums_of_leaves(low, high, BLOCK, DTYPE), tl.maximum(counts, 1.0))
    from_mean = tl.reshape(tl.broadcast_to(means[:, None], [LEAVES, WORDS]), [BLOCK])
    place = tl.arange(0, BLOCK) * VALUES
    low = tl.where(place < count, low - from_mean, 0.0)
    high = tl.where(place + 1 < count, high - from_mean, 0.0)
    return merge_moments(means, sums_of_leaves(low * low, high * high, BLOCK, DTYPE), count, LEAVES, WORDS * VALUES)


@triton.jit
def load_weights(address, first, offs, end, UNIT: tl.constexpr, SHAPE: tl.constexpr):
    """Load the weights that belong to words ``offs`` from byte ``first`` of a row on, and zero from byte ``end`` on.

    ``first`` and ``end`` count bytes of DTYPE, and UNIT is the UNIT of rows, as in :func:`load_words`; the weights
    begin at a multiple of 16 bytes. Weights of dtype WEIGHT are returned in the form that :func:`unpack_weights`
    expects: words if they are as wide as DTYPE, otherwise 16 bits or 64 bits for each word.
    """
    COUNT_UNIT: tl.constexpr = 4 if UNIT == 16 else 1
    words = end // (4 * COUNT_UNIT) * COUNT_UNIT
    if SHAPE.DTYPE.primitive_bitwidth == SHAPE.WEIGHT.primitive_bitwidth:
        weights = load_words(address, first, offs, end, UNIT)
    elif SHAPE.DTYPE == tl.float32:
        pointer = tl.multiple_of((address.to(tl.int64) + first // 2).to(tl.pointer_type(tl.int16)), 16)
        weights = tl.load(pointer + offs, mask=offs < words, other=0)
    elif SHAPE.HIDDEN % 2 == 0:
        pointer = tl.multiple_of((address.to(tl.int64) + first * 2).to(tl.pointer_type(tl.int64)), 16)
        weights = tl.load(pointer + offs, mask=offs < words, other=0)
    else:
        pointer = (address.to(tl.int64) + first * 2).to(tl.pointer_type(tl.int32))
        low = tl.load(pointer + 2 * offs, mask=2 * offs < end // 2, other=0)
        high = tl.load(pointer + 2 * offs + 1, mask=2 * offs + 1 < end // 2, other=0)
        weights = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
    return weights


@triton.jit
def load_weight_and_bias(norm, offs, SHAPE: tl.constexpr):
    """Load the weights and biases of a row, or the weights for both if there are no biases."""
    ROW: tl.constexpr = SHAPE.HIDDEN * SHAPE.DTYPE.primitive_bitwidth // 8
    weights = load_weights(norm.weight, 0, offs, ROW, SHAPE.UNIT, SHAPE)
    biases = weights
    if SHAPE.KIND == LAYER_WITH_BIAS:
        biases = load_weights(norm.bias, 0, offs, ROW, SHAPE.UNIT, SHAPE)
    return weights, biases


@triton.jit
def unpack_weights(weights, SHAPE: tl.constexpr):
    """Convert the result of :func:`load_weights` to float32, for the low and the high halves of words of DTYPE."""
    if SHAPE.DTYPE.primitive_bitwidth == SHAPE.WEIGHT.primitive_bitwidth:
        low, high = unpack(weights, SHAPE.WEIGHT)
    elif SHAPE.WEIGHT == tl.float32:
        low = weights.to(tl.int32).to(tl.float32, bitcast=True)
        high = (weights >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        low, _ = unpack(weights.to(tl.int32) & 0xFFFF, SHAPE.WEIGHT)
        high = low
    return low, high


@triton.jit
def scale_and_shift(low, high, factor, weights, biases, SHAPE: tl.constexpr):
    """Compute the words of the norm from centered values; ``weights`` and ``biases`` are from :func:`load_weights`."""
    weight_low, weight_high = unpack_weights(weights, SHAPE)
    low = low * factor * weight_low
    high = high * factor * weight_high
    if SHAPE.KIND == LAYER_WITH_BIAS:
        bias_low, bias_high = unpack_weights(biases, SHAPE)
        low = low + bias_low
        high = high + bias_high
    return pack(low, high, SHAPE.DTYPE)


@triton.jit
def add_norm(total, residual, weights, biases, eps, SHAPE: tl.constexpr):
    """Compute (new residual, norm) of a row from the words of the sum and the residual, and the weights and biases.

    The new residual is zero past the row's end, and the norm there is zero or NaN.
    """
    low, high = unpack(total, SHAPE.DTYPE)
    more_low, more_high = unpack(residual, SHAPE.DTYPE)
    new_residual = pack(low + more_low, high + more_high, SHAPE.DTYPE)
    low, high = unpack(new_residual, SHAPE.DTYPE)
    if SHAPE.KIND == RMS:
        factor = tl.rsqrt(tree_sum_of_squares(new_residual, SHAPE.ROW_BLOCK, SHAPE.DTYPE) / SHAPE.HIDDEN + eps)
    else:
        mean, squares = moments_of(low, high, SHAPE.HIDDEN, SHAPE.ROW_BLOCK, SHAPE.DTYPE)
        factor = tl.rsqrt(squares / SHAPE.HIDDEN + eps)
        low = low - mean
        high = high - mean
    return new_residual, scale_and_shift(low, high, factor, weights, biases, SHAPE)


@triton.jit
def magnitude(value):
    """Map |value| to an integer that sorts the same way; 0 for NaN."""
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits > _INFINITY, 0, bits)


@triton.jit
def scale_of(largest):
    """Compute a row's dynamic scale: its largest :func:`magnitude` / 448, at least 2^-126, whose inverse is finite."""
    return tl.maximum(tl.div_rn(largest.to(tl.float32, bitcast=True), E4M3_MAX), SMALLEST_SCALE)


@triton.jit
def e4m3_byte(value):
    """Convert a scaled value to its byte. NaN is 0x7F regardless of its sign, so no word of bytes equals the
    sentinel."""
    byte = to_e4m3(value)
    return tl.where((byte & 0x7F) == 0x7F, 0x7F, byte)


@triton.jit
def quantized_words(normed, scale, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Quantize a row to FP8, four values per word: BLOCK / 2 words of 16-bit floats, BLOCK / 4 of float32."""
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
def finish_row(live, row, at, total, before, gain, shift, norm, SHAPE: tl.constexpr):
    """Compute and store everything that follows from the words of a row's sum.

    The row is ``row`` of the new residual, and ``at`` of the other results. ``before`` holds words of the residual, and
    ``gain`` weights as :func:`load_weights` loads them. All results are NaN if the call was stopped.

    Returns the words of the norm and of its FP8 form (if asked for), and the row's dynamic scale (if it has one).
    """
    ROW: tl.constexpr = SHAPE.HIDDEN * SHAPE.DTYPE.primitive_bitwidth // 8
    FP8_UNIT: tl.constexpr = (
        16 if SHAPE.HIDDEN % 16 == 0 else 4 if SHAPE.HIDDEN % 4 == 0 else 2 if SHAPE.HIDDEN % 2 == 0 else 1
    )
    FP8_BLOCK: tl.constexpr = SHAPE.ROW_BLOCK // (SHAPE.DTYPE.primitive_bitwidth // 8)
    offs = tl.arange(0, SHAPE.ROW_BLOCK)
    after, normed = add_norm(nan_unless(live, total, SHAPE.DTYPE), before, gain, shift, norm.eps, SHAPE)
    store_words(norm.new_residual, row * ROW, offs, after, ROW, SHAPE.UNIT)
    if SHAPE.KEEPS_NORMED:
        store_words(norm.normed, at * ROW, offs, normed, ROW, SHAPE.UNIT)
    packed = normed
    row_factor = norm.eps
    if SHAPE.QUANTIZE != NONE:
        if SHAPE.QUANTIZE == DYNAMIC:
            low, high = unpack(normed, SHAPE.DTYPE)
            largest = tl.max(tl.maximum(magnitude(low), magnitude(high)), axis=0)
            row_factor = tl.where(live != 0, scale_of(largest), float("nan"))
            tl.store(norm.scale.to(tl.int64).to(tl.pointer_type(tl.float32)) + at, row_factor)
        else:
            row_factor = tl.load(norm.scale.to(tl.int64).to(tl.pointer_type(tl.float32)))
        packed = quantized_words(normed, row_factor, SHAPE.ROW_BLOCK, SHAPE.DTYPE)
        store_words(norm.quantized, at * SHAPE.HIDDEN, tl.arange(0, FP8_BLOCK), packed, SHAPE.HIDDEN, FP8_UNIT)
    return normed, packed, row_factor


@kernel(shape=RowShape)
def norm_rows(x, residual, weight, bias, new_residual, normed, quantized, scale, eps, SHAPE: tl.constexpr):
    """Program (row): normalize one row."""
    release_next_kernel(SHAPE.PDL)
    await_prior_kernel(SHAPE.PDL)
    ROW: tl.constexpr = SHAPE.HIDDEN * SHAPE.DTYPE.primitive_bitwidth // 8
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, SHAPE.ROW_BLOCK)
    start = row * ROW
    total = load_words(x, start, offs, ROW, SHAPE.UNIT)
    before = load_words(residual, start, offs, ROW, SHAPE.UNIT)
    # passed as separate arguments, since Triton's launcher specializes the elements of tuples
    norm = NormAddresses(residual, weight, bias, new_residual, normed, quantized, scale, eps)
    gain, shift = load_weight_and_bias(norm, offs, SHAPE)
    finish_row(tl.program_id(0) * 0 + 1, row, row, total, before, gain, shift, norm, SHAPE)


DTYPES = {"float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16}


def norm_addresses(tensors: NormTensors, nowhere: int) -> tuple[Any, ...]:
    """Collect the values of :class:`NormAddresses`. Missing tensors get the address ``nowhere``."""
    residual, weight, eps, new_residual, normed, quantized, scale, bias = tensors
    return (
        residual.data_ptr() or nowhere,
        weight.data_ptr() or nowhere,
        (nowhere if bias is None else bias.data_ptr()) or nowhere,
        new_residual.data_ptr() or nowhere,
        (nowhere if normed is None else normed.data_ptr()) or nowhere,
        (nowhere if quantized is None else quantized.data_ptr()) or nowhere,
        (nowhere if scale is None else scale.data_ptr()) or nowhere,
        eps,
    )


def norm_arguments(norm: Norm, dtype: str, nowhere: int) -> dict[str, Any]:
    """Build the arguments of a norm of ``dtype`` rows for collective kernels, and the fields of their SHAPE.

    Per-call arguments are set to ``nowhere`` and 0.
    """
    return {"norm": NormAddresses._make([*[nowhere] * 7, 0.0])} | _fields(norm, dtype)


def _fields(norm: Norm, dtype: str) -> dict[str, Any]:
    return {
        "HIDDEN": norm.hidden,
        "QUANTIZE": wire.QUANTIZATIONS.index(norm.quantize),
        "KEEPS_NORMED": norm.keeps_normed,
        "WEIGHT": DTYPES[norm.weight or dtype],
        "KIND": wire.NORM_KINDS.index(norm.kind),
    }


def launch_norm_sum(x: torch.Tensor, tensors: NormTensors, norm: Norm) -> None:
    """Normalize the rows of ``x`` [rows, hidden]. All tensors begin at multiples of 16 bytes; ``x`` may be one of
    ``tensors``."""
    item = x.element_size()
    row = norm.hidden * item
    block, warps = tiles.row_tile(-(-row // 4))
    launched = launch_options(x.device, warps)
    dtype = str(x.dtype).removeprefix("torch.")
    shape = RowShape(
        **_fields(norm, dtype),
        DTYPE=DTYPES[dtype],
        PDL=launched["launch_pdl"],
        UNIT=16 if row % 16 == 0 else item,
        ROW_BLOCK=block,
    )
    arguments = (x.data_ptr(), *norm_addresses(tensors, x.data_ptr()), shape)
    options = launched | {"enable_fp_fusion": False}
    if INTERPRETED or torch.cuda.current_device() == x.device.index:
        norm_rows[(x.numel() // norm.hidden,)](*arguments, **options)
    else:
        with torch.cuda.device(x.device):
            norm_rows[(x.numel() // norm.hidden,)](*arguments, **options)
