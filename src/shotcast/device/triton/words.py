"""Tensors as 32-bit words, and arithmetic on them according to the numerics contract.

A word is one float32, or two 16-bit floats with the first in the low half. Sums start at +0.0, add float32 values in
the order the caller writes them, and round once, to nearest even.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import round_pair, round_to


@triton.jit
def load_words(address, start, offs, nbytes, UNIT: tl.constexpr):
    """Load words ``offs`` of the bytes that begin at ``address + start``; bytes from ``nbytes`` on read as zero.

    If UNIT is 16, address, start and nbytes are multiples of 16. Otherwise it is the widest access in bytes (4, 2 or 1)
    that divides all three. (The interpreter takes a small address for a 32-bit number.)
    """
    at = address.to(tl.int64) + start
    if UNIT == 16:
        pointer = tl.multiple_of(at.to(tl.pointer_type(tl.int32)), 16)
        words = tl.load(pointer + offs, mask=offs < (nbytes // 16) * 4, other=0)
    elif UNIT == 4:
        words = tl.load(at.to(tl.pointer_type(tl.int32)) + offs, mask=offs < nbytes // 4, other=0)
    elif UNIT == 2:
        pointer = at.to(tl.pointer_type(tl.int16))
        low = tl.load(pointer + 2 * offs, mask=2 * offs < nbytes // 2, other=0)
        high = tl.load(pointer + 2 * offs + 1, mask=2 * offs + 1 < nbytes // 2, other=0)
        words = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    else:
        pointer = at.to(tl.pointer_type(tl.uint8))
        words = tl.load(pointer + 4 * offs, mask=4 * offs < nbytes, other=0).to(tl.int32)
        for byte in tl.static_range(1, 4):
            part = tl.load(pointer + 4 * offs + byte, mask=4 * offs + byte < nbytes, other=0)
            words = words | (part.to(tl.int32) << (8 * byte))
    return words


@triton.jit
def store_words(address, start, offs, words, nbytes, UNIT: tl.constexpr):
    """Store words where :func:`load_words` would load them; bytes from ``nbytes`` on are not modified."""
    at = address.to(tl.int64) + start
    if UNIT == 16:
        pointer = tl.multiple_of(at.to(tl.pointer_type(tl.int32)), 16)
        tl.store(pointer + offs, words, mask=offs < (nbytes // 16) * 4)
    elif UNIT == 4:
        pointer = at.to(tl.pointer_type(tl.int32))
        tl.store(pointer + offs, words, mask=offs < nbytes // 4)
    elif UNIT == 2:
        pointer = at.to(tl.pointer_type(tl.int16))
        tl.store(pointer + 2 * offs, words.to(tl.int16), mask=2 * offs < nbytes // 2)
        tl.store(pointer + 2 * offs + 1, (words >> 16).to(tl.int16), mask=2 * offs + 1 < nbytes // 2)
    else:
        pointer = at.to(tl.pointer_type(tl.uint8))
        for byte in tl.static_range(4):
            tl.store(pointer + 4 * offs + byte, (words >> (8 * byte)).to(tl.uint8), mask=4 * offs + byte < nbytes)


@triton.jit
def unpack(words, DTYPE: tl.constexpr):
    """Split words into (float32 of the low half, float32 of the high half); for float32, both are the word."""
    if DTYPE == tl.float32:
        low = words.to(tl.float32, bitcast=True)
        high = low
    elif DTYPE == tl.bfloat16:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
    else:
        low = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = ((words >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def pack(low, high, DTYPE: tl.constexpr):
    """Round float32 halves into words, to nearest even: the inverse of :func:`unpack`."""
    if DTYPE == tl.float32:
        words = low.to(tl.int32, bitcast=True)
    else:
        words = round_pair(low, high, DTYPE)
    return words


@triton.jit
def round_float(value, DTYPE: tl.constexpr):
    """Convert float32 to DTYPE, rounding to nearest even."""
    if DTYPE != tl.float32:
        value = round_to(value, DTYPE).to(tl.int16).to(DTYPE, bitcast=True)
    return value


@triton.jit
def sum_words(parts, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    """Sum tiles as ((+0.0 + parts[0]) + parts[1]) + ... in float32, rounding once."""
    low, high = unpack(parts[0], DTYPE)
    low = low + 0.0
    high = high + 0.0
    for r in tl.static_range(1, COUNT):
        next_low, next_high = unpack(parts[r], DTYPE)
        low = low + next_low
        high = high + next_high
    return pack(low, high, DTYPE)


@triton.jit
def insert_own(parts, own, rank, COUNT: tl.constexpr):
    """Replace this rank's tile in ``parts``, which are by rank, with ``own``, which did not pass through memory."""
    complete = ()
    for r in tl.static_range(COUNT):
        complete = complete + (tl.where(rank == r, own, parts[r]),)
    return complete


@triton.jit
def accumulate(low, high, parts, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    """Add ``parts`` in order to a sum, given and returned as (float32 of the low halves, float32 of the high ones)."""
    for r in tl.static_range(COUNT):
        next_low, next_high = unpack(parts[r], DTYPE)
        low = low + next_low
        high = high + next_high
    return low, high


@triton.jit
def nan_unless(live, words, DTYPE: tl.constexpr):
    """Return ``words``, or NaN in every value if the call was stopped. Types without NaN keep their words."""
    if DTYPE == tl.float32 or DTYPE == tl.bfloat16 or DTYPE == tl.float16:
        words = tl.where(live != 0, words, 0x7FFFFFFF if DTYPE == tl.float32 else 0x7FFF7FFF)
    return words
