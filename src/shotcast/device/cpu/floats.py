"""Conversions of floats to float32 and back, in LLVM vectors.

Rounding is to nearest even. Every NaN becomes the dtype's positive quiet NaN, so the bits do not depend on which
operand of an addition the compiler puts first.
"""

from __future__ import annotations

import functools
import platform
from typing import Any, Protocol

import llvmlite.binding
from llvmlite import ir

WORD = ir.IntType(64)
I16, I32 = ir.IntType(16), ir.IntType(32)
F16, F32 = ir.HalfType(), ir.FloatType()
INFINITY = 0x7F800000
"""The bits of infinity in float32."""

LANES = 32
"""Elements processed at once: 2 registers of AVX-512, 4 of AVX, 8 of NEON."""


def vector(element: Any, lanes: int) -> Any:
    """Build the LLVM type of ``lanes`` elements; a scalar type if ``lanes`` is 1."""
    return element if lanes == 1 else ir.VectorType(element, lanes)


def splat(element: Any, lanes: int, value: float) -> Any:
    """Build a constant with ``value`` in every lane."""
    return ir.Constant(element, value) if lanes == 1 else ir.Constant(ir.VectorType(element, lanes), [value] * lanes)


class Format(Protocol):
    """The conversion of a dtype to float32 and back; ``lanes`` is 1 for a scalar."""

    stored: Any

    def widen(self, builder: Any, value: Any, lanes: int) -> Any: ...

    def narrow(self, builder: Any, value: Any, lanes: int) -> Any: ...


class Float32(Format):
    """float32; every NaN becomes the positive quiet NaN."""

    stored = F32

    def widen(self, builder: Any, value: Any, lanes: int) -> Any:
        return value

    def narrow(self, builder: Any, value: Any, lanes: int) -> Any:
        nan = splat(F32, lanes, float("nan"))
        return builder.select(builder.fcmp_unordered("uno", value, value), nan, value)


class Half(Format):
    """float16 with the machine's native conversions."""

    stored = F16

    def widen(self, builder: Any, value: Any, lanes: int) -> Any:
        return builder.fpext(value, vector(F32, lanes))

    def narrow(self, builder: Any, value: Any, lanes: int) -> Any:
        rounded = builder.fptrunc(value, vector(F16, lanes))
        nan = splat(F16, lanes, float("nan"))
        return builder.select(builder.fcmp_unordered("uno", value, value), nan, rounded)


class HalfBits(Format):
    """float16 by integer operations, for x86 without F16C, where LLVM would call a library that may be absent."""

    stored = I16

    def widen(self, builder: Any, value: Any, lanes: int) -> Any:
        wide, single = vector(I32, lanes), vector(F32, lanes)
        constant = functools.partial(splat, I32, lanes)
        bits = builder.zext(value, wide)
        magnitude = builder.shl(builder.and_(bits, constant(0x7FFF)), constant(13))
        exponent = builder.and_(magnitude, constant(31 << 23))
        normal = builder.add(magnitude, constant(112 << 23))
        infinite = builder.add(magnitude, constant(224 << 23))
        # A subnormal is its mantissa in units of 2**-24: put it below an implicit one of 2**-14, then subtract that.
        offset = splat(F32, lanes, 2.0**-14)
        below = builder.bitcast(builder.add(magnitude, constant(113 << 23)), single)
        subnormal = builder.bitcast(builder.fsub(below, offset), wide)
        result = builder.select(builder.icmp_unsigned("==", exponent, constant(31 << 23)), infinite, normal)
        result = builder.select(builder.icmp_unsigned("==", exponent, constant(0)), subnormal, result)
        sign = builder.shl(builder.and_(bits, constant(0x8000)), constant(16))
        return builder.bitcast(builder.or_(result, sign), single)

    def narrow(self, builder: Any, value: Any, lanes: int) -> Any:
        wide, single = vector(I32, lanes), vector(F32, lanes)
        constant = functools.partial(splat, I32, lanes)
        bits = builder.bitcast(value, wide)
        magnitude = builder.and_(bits, constant(0x7FFFFFFF))
        # Normal: rebias the exponent, round to nearest even; a carry out of the mantissa ends in infinity without
        # further code.
        odd = builder.and_(builder.lshr(magnitude, constant(13)), constant(1))
        normal = builder.add(builder.add(magnitude, constant((0xFFF - (112 << 23)) & 0xFFFFFFFF)), odd)
        normal = builder.lshr(normal, constant(13))
        # Subnormal: adding 0.5 leaves the value in units of 2**-24, already rounded by the addition.
        half = builder.bitcast(builder.fadd(builder.bitcast(magnitude, single), splat(F32, lanes, 0.5)), wide)
        subnormal = builder.sub(half, constant(126 << 23))
        result = builder.select(builder.icmp_unsigned("<", magnitude, constant(113 << 23)), subnormal, normal)
        result = builder.select(builder.icmp_unsigned(">=", magnitude, constant(143 << 23)), constant(0x7C00), result)
        result = builder.or_(result, builder.and_(builder.lshr(bits, constant(16)), constant(0x8000)))
        nan = builder.icmp_unsigned(">", magnitude, constant(255 << 23))
        return builder.trunc(builder.select(nan, constant(0x7E00), result), vector(I16, lanes))


class Bfloat16(Format):
    """bfloat16: the upper half of a float32."""

    stored = I16

    def widen(self, builder: Any, value: Any, lanes: int) -> Any:
        bits = builder.shl(builder.zext(value, vector(I32, lanes)), splat(I32, lanes, 16))
        return builder.bitcast(bits, vector(F32, lanes))

    def narrow(self, builder: Any, value: Any, lanes: int) -> Any:
        constant = functools.partial(splat, I32, lanes)
        bits = builder.bitcast(value, vector(I32, lanes))
        odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, constant(0x7FFF))), constant(16))
        # Without the select, rounding would carry some NaN payloads into infinity or minus zero.
        rounded = builder.select(builder.fcmp_unordered("uno", value, value), constant(0x7FC0), rounded)
        return builder.trunc(rounded, vector(I16, lanes))


def machine_has_half() -> bool:
    """Check whether this machine converts float16 in hardware."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return True
    return bool(llvmlite.binding.get_host_cpu_features().get("f16c", False))


FORMATS: dict[str, Format] = {
    "float32": Float32(),
    "float16": Half(),
    "float16 by bits": HalfBits(),
    "bfloat16": Bfloat16(),
}
"""The formats by dtype; float16 in both variants."""


def form_of(dtype: str) -> str:
    """Choose the key in ``FORMATS`` for a dtype, according to the conversions that this machine supports."""
    return "float16 by bits" if dtype == "float16" and not machine_has_half() else dtype
