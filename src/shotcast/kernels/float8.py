"""FP8 (e4m3, finite): bytes with 4 bits of exponent (bias 7) and 3 of mantissa; largest 448, no infinity, NaN 0x7F.

In integer arithmetic: one source for every architecture and the interpreter. OCP 8-bit Floating Point Specification.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
_SMALLEST_NORMAL = tl.constexpr(0x3C800000)  # 2^-6 as float32
_LARGEST = tl.constexpr(0x43E00000)  # 448 as float32
_BIAS = tl.constexpr(120 << 3)  # float32 has exponent bias 127, e4m3 has 7


@triton.jit
def to_e4m3(value):
    """float32 to the byte of the nearest e4m3 (ties to even), in an int32; beyond 448 it is 448, NaN stays NaN."""
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    clamped = tl.minimum(size, _LARGEST)
    normal = ((clamped + 0x7FFFF + ((clamped >> 20) & 1)) >> 20) - _BIAS
    # the spacing of float32 at 2^14 is that of subnormal e4m3: an addition there rounds to it
    low = tl.minimum(size, _SMALLEST_NORMAL).to(tl.float32, bitcast=True) + 16384.0
    subnormal = low.to(tl.int32, bitcast=True) - 0x46800000
    byte = tl.where(size < _SMALLEST_NORMAL, subnormal, normal)
    byte = tl.where(size > 0x7F800000, 0x7F, byte)
    return byte | ((bits >> 24) & 0x80)


@triton.jit
def from_e4m3(byte):
    """The float32 of an e4m3 byte (an int32 in 0..255)."""
    size = byte & 0x7F
    # e4m3's subnormals as float16's, whose exponent has one bit more: half of what has the same bits and bias 15
    value = (size << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    value = tl.where(size == 0x7F, float("nan"), value)
    return tl.where((byte & 0x80) != 0, -value, value)


@triton.jit
def pack_bytes(a, b, c, d):
    """Four bytes (int32 in 0..255) as one word, the first lowest."""
    return a | (b << 8) | (c << 16) | (d << 24)
