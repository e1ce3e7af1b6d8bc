"""Building blocks of matmuls with weights in groups of inputs that share a scale (:mod:`shotcast.layers.quantized`).

    weight = (code - zero) * scale       or       weight = e4m3 * scale

4-bit codes are multiplied as 16 + code, a float that has the code in its first mantissa bits, so no code is converted.
The sum of the inputs, times 16 + zero, is subtracted from the sum of the products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shotcast.device.triton.float8 import from_e4m3
from shotcast.device.triton.words import unpack

BLOCK = tl.constexpr(128)
"""Inputs whose codes are in the same 16 words: code j of word w belongs to input 16 * j + w."""
SLICE = tl.constexpr(16)
MOST_COLUMNS = 128
"""Maximum columns per step."""


def step_columns(group: int) -> int:
    """Compute the columns per step: the largest power of two that divides the group, at most MOST_COLUMNS."""
    return min(MOST_COLUMNS, group & -group)


@triton.jit
def codes_as_float32(words, PLACE: tl.constexpr):
    """Extract the codes at PLACE of int32 words, as float32 16 + code."""
    shifted = words << (19 - 4 * PLACE) if PLACE < 5 else words >> (4 * PLACE - 19)
    return ((shifted & 0x780000) | 0x41800000).to(tl.float32, bitcast=True)


@triton.jit
def load_scales(scales, zeros, rows, group, outputs, inputs, GROUP: tl.constexpr):
    """Load scales and 16 + zeros of ``group``, a number or of the rank of ``rows``; 0 past the last group."""
    inside = group < inputs // GROUP
    at = group * outputs + rows
    scale = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
    zero = 16.0
    if zeros is not None:
        zero += tl.load(zeros + at, mask=inside, other=0).to(tl.float32)
    return scale, zero


@triton.jit
def multiply_codes(
    x,
    words,
    scales,
    zeros,
    rows,
    start,
    outputs,
    inputs,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
):
    """Compute sums of x times weights over the codes of four words, which one thread holds: float32 [1, TILE, WORDS /
    4].

    ``words`` [1, TILE, WORDS] are the words of the rows from word ``start`` on. In each slice of 16 columns, four words
    have the codes of four neighbors, which are two words of x. STEP columns share a scale.
    """
    QUADS: tl.constexpr = WORDS // 4
    quad = start // 4 + tl.arange(0, QUADS)[None, None, :]
    i = tl.arange(0, 2 * QUADS)[None, None, :]
    source = start * 4 + i // 8 * (BLOCK // 2) + i % 8
    row = x.to(tl.pointer_type(tl.int32))
    even, odd = tl.split(tl.reshape(words, [1, TILE, QUADS, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    sums = tl.zeros([1, TILE, QUADS], tl.float32)
    for part in tl.static_range(BLOCK // STEP):
        group = (quad // 4 * BLOCK + part * STEP) // GROUP
        scale, zero = load_scales(scales, zeros, rows[None, :, None], group, outputs, inputs, GROUP)
        total = tl.zeros([1, TILE, QUADS], tl.float32)
        total_x = tl.zeros([1, 1, QUADS], tl.float32)
        for place in tl.static_range(part * (STEP // SLICE), (part + 1) * (STEP // SLICE)):
            at = source + place * (SLICE // 2)
            pairs = tl.reshape(tl.load(row + at, mask=at < inputs // 2, other=0), [1, 1, QUADS, 2])
            left, right = tl.split(pairs)
            a, b = unpack(left, x.dtype.element_ty)
            c, d = unpack(right, x.dtype.element_ty)
            total += a * codes_as_float32(first, place)
            total += b * codes_as_float32(second, place)
            total += c * codes_as_float32(third, place)
            total += d * codes_as_float32(fourth, place)
            total_x += (a + b) + (c + d)
        sums += scale * (total - zero * total_x)
    return sums


@triton.jit
def load_float8(values, rows, start, inputs, COLUMNS: tl.constexpr, NATIVE: tl.constexpr):
    """Load COLUMNS columns of FP8, starting at ``start``, as float32 without their scale."""
    address = rows[:, None] * inputs + (start + tl.arange(0, COLUMNS))[None, :]
    if NATIVE:
        found = tl.load(values + address, eviction_policy="evict_first").to(tl.float32)
    else:
        bytes_of = values.to(tl.pointer_type(tl.uint8))
        found = from_e4m3(tl.load(bytes_of + address, eviction_policy="evict_first").to(tl.int32))
    return found
