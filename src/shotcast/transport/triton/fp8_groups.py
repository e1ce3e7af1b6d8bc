"""Tiles of FP8 words: from the values of a message to slot words with scales, and back.

Several blocks of 128 elements become one block of slot words, so that no value moves to another thread: four blocks of
float32, or two of 16-bit floats, are a *group*. Each word of a group takes its bytes from all blocks of the group, at
the same position in each. ``docs/reference/numerics.md`` ("FP8 transport") defines the values and scales to the bit.

A tile is [quads, rows, 4 words], or [rows, quads, 4 words] with ROWS_FIRST. A row holds the words of a block or the
slot words of a group, which are equally many, and stays within one warp; a quad is what a thread moves at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shotcast import wire
from shotcast.device.triton.float8 import from_words, to_words
from shotcast.device.triton.intrinsics import ROWS_FIRST
from shotcast.device.triton.words import load_words, nan_unless, pack, store_words, unpack
from shotcast.transport.triton.sync import escape_sentinel

FP8_MAX = tl.constexpr(wire.FP8_LARGEST)
AMAX_FLOOR = tl.constexpr(wire.FP8_FLOOR)


@triton.jit
def to_rows(values):
    """Return one value per row as a matrix with one quad."""
    if ROWS_FIRST:
        matrix = values[:, None]
    else:
        matrix = values[None, :]
    return matrix


@triton.jit
def to_quads(values):
    """Return one value per quad as a matrix with one row."""
    if ROWS_FIRST:
        matrix = values[None, :]
    else:
        matrix = values[:, None]
    return matrix


@triton.jit
def tile_offsets(rows, PITCH: tl.constexpr, DTYPE: tl.constexpr):
    """Return the offsets of the words of a tile whose rows are PITCH words apart."""
    QUADS: tl.constexpr = 32 if DTYPE == tl.float32 else 16
    starts = to_quads(tl.arange(0, QUADS) * 4) + to_rows(rows * PITCH)
    return starts[:, :, None] + tl.arange(0, 4)[None, None, :]


@triton.jit
def load_group(address, start, rows, nbytes, DTYPE: tl.constexpr, UNIT: tl.constexpr):
    """Load the groups ``rows`` of a slice as four tiles of float32.

    The slice begins at byte ``start`` and has ``nbytes`` bytes. For float32, the tiles are four blocks. For 16-bit
    floats, they are the even and the odd elements of one block, then of the other.
    """
    if DTYPE == tl.float32:
        offs = tile_offsets(rows, 512, DTYPE)
        a, _ = unpack(load_words(address, start, offs, nbytes, UNIT), DTYPE)
        b, _ = unpack(load_words(address, start, offs + 128, nbytes, UNIT), DTYPE)
        c, _ = unpack(load_words(address, start, offs + 256, nbytes, UNIT), DTYPE)
        d, _ = unpack(load_words(address, start, offs + 384, nbytes, UNIT), DTYPE)
    else:
        offs = tile_offsets(rows, 128, DTYPE)
        first = load_words(address, start, offs, nbytes, UNIT)
        second = load_words(address, start, offs + 64, nbytes, UNIT)
        a, b = unpack(first, DTYPE)
        c, d = unpack(second, DTYPE)
    return a, b, c, d


@triton.jit
def store_group(address, start, rows, values, nbytes, live, DTYPE: tl.constexpr, UNIT: tl.constexpr):
    """Store the tiles of :func:`load_group`, rounded to DTYPE; NaN if the call was stopped."""
    a, b, c, d = values
    if DTYPE == tl.float32:
        offs = tile_offsets(rows, 512, DTYPE)
        store_words(address, start, offs, nan_unless(live, pack(a, a, DTYPE), DTYPE), nbytes, UNIT)
        store_words(address, start, offs + 128, nan_unless(live, pack(b, b, DTYPE), DTYPE), nbytes, UNIT)
        store_words(address, start, offs + 256, nan_unless(live, pack(c, c, DTYPE), DTYPE), nbytes, UNIT)
        store_words(address, start, offs + 384, nan_unless(live, pack(d, d, DTYPE), DTYPE), nbytes, UNIT)
    else:
        offs = tile_offsets(rows, 128, DTYPE)
        store_words(address, start, offs, nan_unless(live, pack(a, b, DTYPE), DTYPE), nbytes, UNIT)
        store_words(address, start, offs + 64, nan_unless(live, pack(c, d, DTYPE), DTYPE), nbytes, UNIT)


@triton.jit
def magnitude(value):
    """Return the bits of a float without its sign.

    As integers, these compare like the absolute values, with infinity above all numbers and NaN above infinity.
    """
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(magnitudes):
    """Return the bits of each block's scale, and the factor for its values, repeated for each quad.

    A row of ``magnitudes`` is a block. If the block contains an infinity, the scale is infinite and the values become
    0 or NaN. If it contains a NaN, both are NaN. In either case the block is dequantized to NaN.
    """
    largest = tl.max(tl.max(magnitudes, axis=2), axis=1 if ROWS_FIRST else 0)
    amax = tl.maximum(largest, AMAX_FLOOR).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, FP8_MAX).to(tl.int32, bitcast=True)
    inverse = tl.div_rn(FP8_MAX, amax)
    QUADS: tl.constexpr = [magnitudes.shape[0], magnitudes.shape[1]]
    return tl.broadcast_to(to_rows(scale), QUADS), tl.broadcast_to(to_rows(inverse), QUADS)


@triton.jit
def quantize(values, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Quantize the tiles of :func:`load_group`. Returns a tile of slot words, and the bits of its scales.

    The scales are a tuple of matrices.
    """
    a, b, c, d = values
    if DTYPE == tl.float32:
        scale_a, inverse_a = scale_of(magnitude(a))
        scale_b, inverse_b = scale_of(magnitude(b))
        scale_c, inverse_c = scale_of(magnitude(c))
        scale_d, inverse_d = scale_of(magnitude(d))
        scales = (scale_a, scale_b, scale_c, scale_d)
    else:
        scale_a, inverse_a = scale_of(tl.maximum(magnitude(a), magnitude(b)))
        scale_c, inverse_c = scale_of(tl.maximum(magnitude(c), magnitude(d)))
        inverse_b = inverse_a
        inverse_d = inverse_c
        scales = (scale_a, scale_c)
    words = to_words(
        a * inverse_a[:, :, None],
        b * inverse_b[:, :, None],
        c * inverse_c[:, :, None],
        d * inverse_d[:, :, None],
        NATIVE,
    )
    return escape_sentinel(words), scales


@triton.jit
def dequantize(words, scales, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Recover the four tiles that :func:`quantize` was given, up to its rounding."""
    a, b, c, d = from_words(words, NATIVE)
    if DTYPE == tl.float32:
        scale_a, scale_b, scale_c, scale_d = scales
    else:
        scale_a, scale_c = scales
        scale_b = scale_a
        scale_d = scale_c
    a = a * scale_a.to(tl.float32, bitcast=True)[:, :, None]
    b = b * scale_b.to(tl.float32, bitcast=True)[:, :, None]
    c = c * scale_c.to(tl.float32, bitcast=True)[:, :, None]
    d = d * scale_d.to(tl.float32, bitcast=True)[:, :, None]
    return a, b, c, d
