"""Reductions of tiles of words, one tile from each rank, according to the numerics contract.

A word holds one number of 32 bits, two of 16 or four of 8, the first in the lowest bits; a number of 64 bits takes two
words, the lower half first. Narrower numbers are widened to int32, computed modulo 2^32 and truncated. Maxima and
minima of floats compare their *keys*, as :mod:`shotcast.device.cpu.reductions` does.

DTYPE is the dtype of the numbers: the dtype of the parts for complex tensors, and int1 for bool, which takes a byte a
number. REDUCTION is a code of :data:`shotcast.wire.REDUCTIONS`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shotcast import wire
from shotcast.device.triton.words import nan_unless, pack, sum_words, unpack

SUM = tl.constexpr(wire.REDUCTIONS.index("sum"))
MAX = tl.constexpr(wire.REDUCTIONS.index("max"))
MIN = tl.constexpr(wire.REDUCTIONS.index("min"))
PROD = tl.constexpr(wire.REDUCTIONS.index("prod"))
AVG = tl.constexpr(wire.REDUCTIONS.index("avg"))
BAND = tl.constexpr(wire.REDUCTIONS.index("band"))
BOR = tl.constexpr(wire.REDUCTIONS.index("bor"))
BXOR = tl.constexpr(wire.REDUCTIONS.index("bxor"))


@triton.jit
def pairs_of(words):
    """Join the words of a tile into half as many 64-bit numbers."""
    low, high = tl.split(tl.reshape(words, (words.shape[0] // 2, 2)))
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def words_of(pairs):
    """Split 64-bit numbers into words: the inverse of :func:`pairs_of`."""
    return tl.interleave(pairs.to(tl.int32), (pairs >> 32).to(tl.int32))


@triton.jit
def numbers_of(words, DTYPE: tl.constexpr):
    """Split a tile of words into its numbers, by position in the word, as integers of 32 or 64 bits."""
    if DTYPE == tl.float64 or DTYPE == tl.int64 or DTYPE == tl.uint64:
        numbers = (pairs_of(words),)
    elif DTYPE == tl.float32 or DTYPE == tl.int32 or DTYPE == tl.uint32:
        numbers = (words,)
    elif DTYPE == tl.uint16:
        numbers = (words & 0xFFFF, (words >> 16) & 0xFFFF)
    elif DTYPE == tl.uint8:
        numbers = (words & 0xFF, (words >> 8) & 0xFF, (words >> 16) & 0xFF, (words >> 24) & 0xFF)
    elif DTYPE == tl.int8:
        numbers = ((words << 24) >> 24, (words << 16) >> 24, (words << 8) >> 24, words >> 24)
    else:
        numbers = ((words << 16) >> 16, words >> 16)
    return numbers


@triton.jit
def of_numbers(numbers, DTYPE: tl.constexpr):
    """Join the lowest bits of numbers into words: the inverse of :func:`numbers_of`."""
    if DTYPE == tl.float64 or DTYPE == tl.int64 or DTYPE == tl.uint64:
        words = words_of(numbers[0])
    elif DTYPE == tl.float32 or DTYPE == tl.int32 or DTYPE == tl.uint32:
        words = numbers[0]
    elif DTYPE == tl.uint8 or DTYPE == tl.int8:
        words = (numbers[0] & 0xFF) | ((numbers[1] & 0xFF) << 8) | ((numbers[2] & 0xFF) << 16) | (numbers[3] << 24)
    else:
        words = (numbers[0] & 0xFFFF) | (numbers[1] << 16)
    return words


@triton.jit
def magnitude_mask(DTYPE: tl.constexpr):
    """Return the mask of all bits of a float except its sign, as a number."""
    if DTYPE == tl.float64:
        mask = 0x7FFFFFFFFFFFFFFF
    elif DTYPE == tl.float32:
        mask = 0x7FFFFFFF
    else:
        mask = 0x7FFF
    return mask


@triton.jit
def infinity_of(DTYPE: tl.constexpr):
    """Return the bits of infinity."""
    if DTYPE == tl.float64:
        bits = 0x7FF0000000000000
    elif DTYPE == tl.float32:
        bits = 0x7F800000
    elif DTYPE == tl.bfloat16:
        bits = 0x7F80
    else:
        bits = 0x7C00
    return bits


@triton.jit
def turned(bits, DTYPE: tl.constexpr):
    """Return the key of a float, or the float of a key: negative ones have all bits except the sign inverted."""
    sign = bits >> (63 if DTYPE == tl.float64 else 31)
    return bits ^ (sign & magnitude_mask(DTYPE))


@triton.jit
def key_of(bits, DTYPE: tl.constexpr, REDUCTION: tl.constexpr):
    """Return the key of a float. A NaN has the largest key in a maximum, and the smallest in a minimum."""
    mask = magnitude_mask(DTYPE)
    beyond = mask if REDUCTION == MAX else -mask - 1
    return tl.where((bits & mask) > infinity_of(DTYPE), beyond, turned(bits, DTYPE))


@triton.jit
def of_key(key, DTYPE: tl.constexpr, REDUCTION: tl.constexpr):
    """Return the float of a key. A NaN has all magnitude bits set."""
    mask = magnitude_mask(DTYPE)
    beyond = mask if REDUCTION == MAX else -mask - 1
    return tl.where(key == beyond, mask, turned(key, DTYPE))


@triton.jit
def combined(total, number, DTYPE: tl.constexpr, REDUCTION: tl.constexpr):
    """Combine an integer, or a key, with the next one."""
    if REDUCTION == SUM:
        total = total + number
    elif REDUCTION == PROD:
        total = total * number
    else:
        if DTYPE == tl.uint32 or DTYPE == tl.uint64:
            larger = total.to(DTYPE, bitcast=True) > number.to(DTYPE, bitcast=True)
        else:
            larger = total > number
        if REDUCTION == MAX:
            total = tl.where(larger, total, number)
        else:
            total = tl.where(larger, number, total)
    return total


@triton.jit
def bits_of(words, DTYPE: tl.constexpr):
    """Return ``words``; for bool, set each nonzero byte to 1, since tensors from elsewhere may hold other values."""
    if DTYPE == tl.int1:
        words = words | ((words >> 4) & 0x0F0F0F0F)
        words = words | ((words >> 2) & 0x03030303)
        words = (words | (words >> 1)) & 0x01010101
    return words


@triton.jit
def reduce_bits(parts, COUNT: tl.constexpr, DTYPE: tl.constexpr, REDUCTION: tl.constexpr):
    """Reduce tiles by BAND, BOR or BXOR."""
    words = bits_of(parts[0], DTYPE)
    for r in tl.static_range(1, COUNT):
        part = bits_of(parts[r], DTYPE)
        if REDUCTION == BAND:
            words = words & part
        elif REDUCTION == BOR:
            words = words | part
        else:
            words = words ^ part
    return words


@triton.jit
def reduce_integers(parts, COUNT: tl.constexpr, DTYPE: tl.constexpr, REDUCTION: tl.constexpr):
    """Reduce tiles of integers by SUM, PROD, MAX or MIN, or tiles of floats by MAX or MIN."""
    FLOATS: tl.constexpr = DTYPE == tl.float64 or DTYPE == tl.float32 or DTYPE == tl.bfloat16 or DTYPE == tl.float16
    first = numbers_of(parts[0], DTYPE)
    results = ()
    for i in tl.static_range(len(first)):
        total = first[i]
        if FLOATS:
            total = key_of(total, DTYPE, REDUCTION)
        for r in tl.static_range(1, COUNT):
            number = numbers_of(parts[r], DTYPE)[i]
            if FLOATS:
                number = key_of(number, DTYPE, REDUCTION)
            total = combined(total, number, DTYPE, REDUCTION)
        if FLOATS:
            total = of_key(total, DTYPE, REDUCTION)
        results = results + (total,)
    return of_numbers(results, DTYPE)


@triton.jit
def accumulated(total, value, REDUCTION: tl.constexpr):
    """Add the next value to a sum, or multiply a product by it."""
    if REDUCTION == PROD:
        total = total * value
    else:
        total = total + value
    return total


@triton.jit
def reduce_floats(parts, COUNT: tl.constexpr, DTYPE: tl.constexpr, REDUCTION: tl.constexpr):
    """Reduce tiles of floats of up to 32 bits by AVG or PROD in float32, rounding once."""
    low, high = unpack(parts[0], DTYPE)
    if REDUCTION == AVG:
        low = low + 0.0
        high = high + 0.0
    for r in tl.static_range(1, COUNT):
        next_low, next_high = unpack(parts[r], DTYPE)
        low = accumulated(low, next_low, REDUCTION)
        high = accumulated(high, next_high, REDUCTION)
    if REDUCTION == AVG:
        low = tl.div_rn(low, tl.full(low.shape, COUNT, tl.float32))
        high = tl.div_rn(high, tl.full(high.shape, COUNT, tl.float32))
    return pack(low, high, DTYPE)


@triton.jit
def reduce_float64(parts, COUNT: tl.constexpr, REDUCTION: tl.constexpr):
    """Reduce tiles of float64 by SUM, AVG or PROD."""
    total = pairs_of(parts[0]).to(tl.float64, bitcast=True)
    if REDUCTION != PROD:
        total = total + 0.0
    for r in tl.static_range(1, COUNT):
        total = accumulated(total, pairs_of(parts[r]).to(tl.float64, bitcast=True), REDUCTION)
    if REDUCTION == AVG:
        total = total / tl.full(total.shape, COUNT, tl.float64)
    return words_of(total.to(tl.int64, bitcast=True))


@triton.jit
def reduce_words(parts, COUNT: tl.constexpr, DTYPE: tl.constexpr, REDUCTION: tl.constexpr):
    """Reduce COUNT tiles in their order. (Sums and averages begin at +0.0, products at 1.)"""
    if REDUCTION >= BAND:  # the bitwise reductions come last
        words = reduce_bits(parts, COUNT, DTYPE, REDUCTION)
    elif REDUCTION == MAX or REDUCTION == MIN:  # noqa: SIM109 (Triton has no "in")
        words = reduce_integers(parts, COUNT, DTYPE, REDUCTION)
    elif DTYPE == tl.float64:
        words = reduce_float64(parts, COUNT, REDUCTION)
    elif DTYPE == tl.float32 or DTYPE == tl.bfloat16 or DTYPE == tl.float16:
        if REDUCTION == SUM:
            words = sum_words(parts, COUNT, DTYPE)
        else:
            words = reduce_floats(parts, COUNT, DTYPE, REDUCTION)
    else:
        words = reduce_integers(parts, COUNT, DTYPE, REDUCTION)
    return words


@triton.jit
def reduced_unless_stopped(live, words, DTYPE: tl.constexpr):
    """Return ``words``, or NaN in every float if the call was stopped."""
    if DTYPE == tl.float64:
        words = tl.where(live != 0, words, 0x7FFFFFFF)
    else:
        words = nan_unless(live, words, DTYPE)
    return words
