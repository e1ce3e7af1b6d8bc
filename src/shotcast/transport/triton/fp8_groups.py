"""FP8 words of the transport, as a tile of them is held: from a message's values to slot words with scales, and back.

Several blocks of 128 elements make one of slot words, so that no value changes threads: four blocks of float32, or two
of 16-bit floats, are a *group*, and each word of it takes its bytes from all of them, from the same place in each. A
tile is [quads, rows, 4 words], or [rows, quads, 4 words] with ROWS_FIRST: a row is a block's words or a group's slot
words, as many either way, and a quad what a thread moves at once. (In this order a row stays in one warp, and so does
the search for its largest value.) ``docs/reference/numerics.md`` ("FP8 transport") has values and scales to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shotcast import wire
from shotcast.device.triton.float8 import from_words, to_words
from shotcast.device.triton.intrinsics import ROWS_FIRST
from shotcast.device.triton.words import load_words, nan_unless, pack, store_words, unpack
from shotcast.transport.triton.sync import escape_sentinel

LARGEST = tl.constexpr(wire.FP8_LARGEST)
FLOOR = tl.constexpr(wire.FP8_FLOOR)


@triton.jit
def to_rows(values):
    """A value for each row, as a matrix of one quad."""
    if ROWS_FIRST:
        matrix = values[:, None]
    else:
        matrix = values[None, :]
    return matrix


@triton.jit
def to_quads(values):
    """A value for each quad, as a matrix of one row."""
    if ROWS_FIRST:
        matrix = values[None, :]
    else:
        matrix = values[:, None]
    return matrix


@triton.jit
def places(rows, PITCH: tl.constexpr, DTYPE: tl.constexpr):
    """Where the words of a tile lie, rows being PITCH words apart."""
    QUADS: tl.constexpr = 32 if DTYPE == tl.float32 else 16
    starts = to_quads(tl.arange(0, QUADS) * 4) + to_rows(rows * PITCH)
    return starts[:, :, None] + tl.arange(0, 4)[None, None, :]


@triton.jit
def load_group(address, start, rows, left, DTYPE: tl.constexpr, UNIT: tl.constexpr):
    """The groups ``rows`` of a slice that begins at byte ``start`` and has ``left`` bytes: four tiles of float32.

    Of float32 they are four blocks; of 16-bit floats the even and the odd elements of one block, then of the other.
    """
    if DTYPE == tl.float32:
        offs = places(rows, 512, DTYPE)
        a, _ = unpack(load_words(address, start, offs, left, UNIT), DTYPE)
        b, _ = unpack(load_words(address, start, offs + 128, left, UNIT), DTYPE)
        c, _ = unpack(load_words(address, start, offs + 256, left, UNIT), DTYPE)
        d, _ = unpack(load_words(address, start, offs + 384, left, UNIT), DTYPE)
    else:
        offs = places(rows, 128, DTYPE)
        first = load_words(address, start, offs, left, UNIT)
        second = load_words(address, start, offs + 64, left, UNIT)
        a, b = unpack(first, DTYPE)
        c, d = unpack(second, DTYPE)
    return a, b, c, d


@triton.jit
def store_group(address, start, rows, values, left, live, DTYPE: tl.constexpr, UNIT: tl.constexpr):
    """Inverse of :func:`load_group`, rounding; NaN when the call was stopped."""
    a, b, c, d = values
    if DTYPE == tl.float32:
        offs = places(rows, 512, DTYPE)
        store_words(address, start, offs, nan_unless(live, pack(a, a, DTYPE), DTYPE), left, UNIT)
        store_words(address, start, offs + 128, nan_unless(live, pack(b, b, DTYPE), DTYPE), left, UNIT)
        store_words(address, start, offs + 256, nan_unless(live, pack(c, c, DTYPE), DTYPE), left, UNIT)
        store_words(address, start, offs + 384, nan_unless(live, pack(d, d, DTYPE), DTYPE), left, UNIT)
    else:
        offs = places(rows, 128, DTYPE)
        store_words(address, start, offs, nan_unless(live, pack(a, b, DTYPE), DTYPE), left, UNIT)
        store_words(address, start, offs + 64, nan_unless(live, pack(c, d, DTYPE), DTYPE), left, UNIT)


@triton.jit
def magnitude(value):
    """Bits without the sign: as integers they compare like the numbers, infinity above them, NaN above infinity."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(sizes):
    """From magnitudes, a block a row: bits of its scale, and what its values are multiplied by, for each quad.

    With an infinity in the block the scale is infinite and the values become 0 or NaN, with a NaN both are NaN: in
    either case the block comes back as NaN.
    """
    largest = tl.max(tl.max(sizes, axis=2), axis=1 if ROWS_FIRST else 0)
    number = tl.maximum(largest, FLOOR).to(tl.float32, bitcast=True)
    scale = tl.div_rn(number, LARGEST).to(tl.int32, bitcast=True)
    inverse = tl.div_rn(LARGEST, number)
    QUADS: tl.constexpr = [sizes.shape[0], sizes.shape[1]]
    return tl.broadcast_to(to_rows(scale), QUADS), tl.broadcast_to(to_rows(inverse), QUADS)


@triton.jit
def quantize(values, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """The tiles of :func:`load_group` as a tile of slot words, and the bits of its scales: a tuple of matrices."""
    a, b, c, d = values
    if DTYPE == tl.float32:
        scale_a, by_a = scale_of(magnitude(a))
        scale_b, by_b = scale_of(magnitude(b))
        scale_c, by_c = scale_of(magnitude(c))
        scale_d, by_d = scale_of(magnitude(d))
        scales = (scale_a, scale_b, scale_c, scale_d)
    else:
        scale_a, by_a = scale_of(tl.maximum(magnitude(a), magnitude(b)))
        scale_c, by_c = scale_of(tl.maximum(magnitude(c), magnitude(d)))
        by_b = by_a
        by_d = by_c
        scales = (scale_a, scale_c)
    words = to_words(a * by_a[:, :, None], b * by_b[:, :, None], c * by_c[:, :, None], d * by_d[:, :, None], NATIVE)
    return escape_sentinel(words), scales


@triton.jit
def dequantize(words, scales, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Inverse of :func:`quantize`: four tiles."""
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
