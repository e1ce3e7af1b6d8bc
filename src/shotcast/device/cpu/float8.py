"""FP8 (e4m3, finite) in CPU kernels, with the same bits as :mod:`shotcast.device.triton.float8`."""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir

from shotcast.device.cpu.floats import F32, I32, splat, vector

BYTE = ir.IntType(8)

_SMALLEST_NORMAL = 0x3C800000  # 2^-6 as float32
_LARGEST = 0x43E00000  # 448 as float32
_REBIAS = 120  # float32 has exponent bias 127, e4m3 has 7


def to_e4m3(builder: Any, value: Any, lanes: int) -> Any:
    """Convert float32 to the byte of the nearest e4m3 (ties to even).

    Values beyond 448 saturate to 448; NaN becomes 0x7F regardless of its sign.
    """
    wide, single = vector(I32, lanes), vector(F32, lanes)
    constant = functools.partial(splat, I32, lanes)
    bits = builder.bitcast(value, wide)
    size = builder.and_(bits, constant(0x7FFFFFFF))
    # Normal: rebias the exponent, round to nearest even; a carry out of the mantissa goes into the exponent.
    clamped = builder.select(builder.icmp_unsigned("<", size, constant(_LARGEST)), size, constant(_LARGEST))
    odd = builder.and_(builder.lshr(clamped, constant(20)), constant(1))
    normal = builder.lshr(builder.add(builder.add(clamped, constant(0x7FFFF)), odd), constant(20))
    normal = builder.sub(normal, constant(_REBIAS << 3))
    # Subnormal: the spacing of float32 at 2^14 equals the spacing of subnormal e4m3, so an addition there rounds to it.
    tiny = builder.icmp_unsigned("<", size, constant(_SMALLEST_NORMAL))
    low = builder.bitcast(builder.select(tiny, size, constant(0)), single)
    low = builder.bitcast(builder.fadd(low, splat(F32, lanes, 16384.0)), wide)
    byte = builder.select(tiny, builder.sub(low, constant(0x46800000)), normal)
    byte = builder.or_(byte, builder.and_(builder.lshr(bits, constant(24)), constant(0x80)))
    nan = builder.icmp_unsigned(">", size, constant(0x7F800000))
    return builder.trunc(builder.select(nan, constant(0x7F), byte), vector(BYTE, lanes))
