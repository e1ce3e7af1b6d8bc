"""FP8 (e4m3, finite): 4 bits of exponent (bias 7) and 3 of mantissa in a byte; largest 448, no infinity, NaN 0x7F.

The conversions use integer arithmetic on every architecture and in the interpreter. With NATIVE (compute capability 8.9
and above) they are the GPU's instructions, which give the same bits for numbers. Source: OCP 8-bit Floating Point
Specification.
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
    """Convert float32 to the nearest e4m3 byte (ties to even), held in an int32.

    Values beyond 448 become 448; NaN stays NaN.
    """
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    clamped = tl.minimum(size, _LARGEST)
    normal = ((clamped + 0x7FFFF + ((clamped >> 20) & 1)) >> 20) - _BIAS
    # at 2^14, float32 has the spacing of subnormal e4m3, so this addition rounds to it
    low = tl.minimum(size, _SMALLEST_NORMAL).to(tl.float32, bitcast=True) + 16384.0
    subnormal = low.to(tl.int32, bitcast=True) - 0x46800000
    byte = tl.where(size < _SMALLEST_NORMAL, subnormal, normal)
    byte = tl.where(size > 0x7F800000, 0x7F, byte)
    return byte | ((bits >> 24) & 0x80)


@triton.jit
def from_e4m3(byte):
    """Convert an e4m3 byte (an int32 in 0..255) to float32."""
    size = byte & 0x7F
    # subnormal e4m3 maps to subnormal float16, whose exponent bias is 15 instead of 7: scale the value by 2^8
    value = (size << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    value = tl.where(size == 0x7F, float("nan"), value)
    # set the sign bit: minus is "0 - value" here, which would lose the sign of zero
    return (value.to(tl.int32, bitcast=True) | ((byte & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def pack_bytes(a, b, c, d):
    """Pack four bytes (int32 in 0..255) into one word, the first in the lowest bits."""
    return a | (b << 8) | (c << 16) | (d << 24)


@triton.jit
def to_words(a, b, c, d, NATIVE: tl.constexpr):
    """Convert four float32 values to the e4m3 bytes of one word, the first in the lowest bits."""
    if NATIVE:
        words = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,r,r,r,r",
            [a, b, c, d],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        words = pack_bytes(to_e4m3(a), to_e4m3(b), to_e4m3(c), to_e4m3(d))
    return words


@triton.jit
def from_words(words, NATIVE: tl.constexpr):
    """Convert the e4m3 bytes of words to four float32 values: the inverse of :func:`to_words`."""
    if NATIVE:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high, a, b, c, d;
            .reg .b32 pair;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 pair, low;
            mov.b32 {a, b}, pair;
            cvt.rn.f16x2.e4m3x2 pair, high;
            mov.b32 {c, d}, pair;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            cvt.f32.f16 $2, c;
            cvt.f32.f16 $3, d;
            }""",
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        a = from_e4m3(words & 0xFF)
        b = from_e4m3((words >> 8) & 0xFF)
        c = from_e4m3((words >> 16) & 0xFF)
        d = from_e4m3((words >> 24) & 0xFF)
    return a, b, c, d
