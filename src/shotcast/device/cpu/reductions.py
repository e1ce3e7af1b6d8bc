"""Reductions of the ranks' contributions, elementwise and in rank order.

    sum, avg, prod of floats   accumulated in float32 (float64: in float64) from +0.0 or 1.0, and rounded once; avg
                               divides before it rounds
    max, min of floats         a NaN wins in both, and -0.0 is below +0.0
    of integers                modulo 2^bits
    of bool                    sum, max and bor are "or"; prod, min and band are "and"; a byte that is not 0 is true

Extrema compare floats as integers, the *keys* of the floats: bits that ascend with the value. The result has the bits
of one of its operands, or of the dtype's positive quiet NaN.

The code is written as LLVM vectors rather than left to the vectorizer: the destination may be one of the sources
(in-place calls), and the vectorizer's alias check would select scalar code.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from shotcast.device.cpu.compilation import Arithmetic
from shotcast.device.cpu.floats import F32, FORMATS, form_of, splat, vector
from shotcast.device.cpu.lazy_numba import intrinsic
from shotcast.device.cpu.vectors import broadcast_lanes, combine_ranks, for_each_vector, load_at, number, store_at
from shotcast.wire import INTEGERS, OF_BOOL, REDUCED, REDUCIBLE, SIXTEEN_BITS

F64 = ir.DoubleType()
_QUIET_NAN = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0, "float64": 0x7FF8000000000000}
_INFINITY = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80, "float64": 0x7FF0000000000000}
_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "float64": 64}


@dataclass(frozen=True, slots=True)
class Reducer:
    """A reduction of one dtype in LLVM code; ``lanes`` is 1 for a scalar."""

    stored: Any  # the type of an element in memory
    nbytes: int  # bytes of an element
    wide: Any  # the type used for the reduction
    start: float  # the neutral element of `combine`
    widen: Callable[[Any, Any, int], Any]  # `(builder, value, lanes)`: from `stored` to `wide`
    narrow: Callable[[Any, Any, int], Any]  # and back
    combine: Callable[[Any, Any, Any, int], Any]  # `(builder, total, value, lanes)`
    divided: bool = False  # the total is divided by the number of ranks
    numbers: int = 1  # components per element: 2 for complex dtypes


def _unchanged(_builder: Any, value: Any, _lanes: int) -> Any:
    return value


def _quiet(builder: Any, value: Any, lanes: int) -> Any:
    """Replace every float64 NaN with the positive quiet NaN."""
    nan = splat(F64, lanes, float("nan"))
    return builder.select(builder.fcmp_unordered("uno", value, value), nan, value)


_ARITHMETIC: dict[str, Callable[[Any, Any, Any, int], Any]] = {
    "sum": lambda builder, total, value, lanes: builder.fadd(total, value),
    "avg": lambda builder, total, value, lanes: builder.fadd(total, value),
    "prod": lambda builder, total, value, lanes: builder.fmul(total, value),
}


def _of_floats(dtype: str, form: str, reduction: str) -> Reducer:
    start, divided = float(reduction == "prod"), reduction == "avg"
    if dtype == "float64":
        return Reducer(F64, 8, F64, start, _unchanged, _quiet, _ARITHMETIC[reduction], divided)
    of = FORMATS[form]
    nbytes = _BITS[dtype] // 8
    return Reducer(of.stored, nbytes, F32, start, of.widen, of.narrow, _ARITHMETIC[reduction], divided)


def _larger(comparison: str, signed: bool) -> Callable[[Any, Any, Any, int], Any]:
    def combine(builder: Any, total: Any, value: Any, _lanes: int) -> Any:
        compare = builder.icmp_signed if signed else builder.icmp_unsigned
        return builder.select(compare(comparison, value, total), value, total)

    return combine


def _of_extremum(dtype: str, reduction: str) -> Reducer:
    """Build the extremum of floats by their keys: for negative numbers, all bits but the sign are inverted."""
    bits, nan, infinity = _BITS[dtype], _QUIET_NAN[dtype], _INFINITY[dtype]
    kind = ir.IntType(bits)
    most = (1 << (bits - 1)) - 1
    nan_key = nan if reduction == "max" else ~nan  # beyond the key of any number

    def turned(builder: Any, value: Any, lanes: int) -> Any:
        sign = builder.ashr(value, splat(kind, lanes, bits - 1))
        return builder.xor(value, builder.and_(sign, splat(kind, lanes, most)))

    def widen(builder: Any, value: Any, lanes: int) -> Any:
        magnitude = builder.and_(value, splat(kind, lanes, most))
        is_nan = builder.icmp_unsigned(">", magnitude, splat(kind, lanes, infinity))
        return builder.select(is_nan, splat(kind, lanes, nan_key), turned(builder, value, lanes))

    def narrow(builder: Any, key: Any, lanes: int) -> Any:
        is_nan = builder.icmp_signed("==", key, splat(kind, lanes, nan_key))
        return builder.select(is_nan, splat(kind, lanes, nan), turned(builder, key, lanes))

    start = -most - 1 if reduction == "max" else most
    combine = _larger(">" if reduction == "max" else "<", True)
    return Reducer(kind, bits // 8, kind, start, widen, narrow, combine)


def _of_integers(dtype: str, reduction: str) -> Reducer:
    signed, bits = not dtype.startswith("u"), int(dtype.removeprefix("u").removeprefix("int"))
    lowest = -(1 << (bits - 1)) if signed else 0
    operations: dict[str, tuple[int, Callable[[Any, Any, Any, int], Any]]] = {
        "sum": (0, lambda builder, total, value, lanes: builder.add(total, value)),
        "prod": (1, lambda builder, total, value, lanes: builder.mul(total, value)),
        "band": (-1, lambda builder, total, value, lanes: builder.and_(total, value)),
        "bor": (0, lambda builder, total, value, lanes: builder.or_(total, value)),
        "bxor": (0, lambda builder, total, value, lanes: builder.xor(total, value)),
        "max": (lowest, _larger(">", signed)),
        "min": (~lowest, _larger("<", signed)),
    }
    kind = ir.IntType(bits)
    start, combine = operations[reduction]
    return Reducer(kind, bits // 8, kind, start, _unchanged, _unchanged, combine)


def _of_bool(reduction: str) -> Reducer:
    """Build a bitwise reduction of bytes that are first made 0 or 1, since others may hold other values."""
    of = _of_integers("uint8", reduction)

    def widen(builder: Any, value: Any, lanes: int) -> Any:
        true = builder.icmp_unsigned("!=", value, splat(of.stored, lanes, 0))
        return builder.zext(true, vector(of.wide, lanes))

    return dataclasses.replace(of, widen=widen)


@functools.cache
def reducer(form: str, reduction: str) -> Reducer:
    """Build the reduction of a dtype; ``form`` is the dtype, or ``float16 by bits``."""
    dtype = form.partition(" ")[0]
    if dtype.startswith("complex"):
        of = reducer({"complex64": "float32", "complex128": "float64"}[dtype], reduction)
        return Reducer(of.stored, of.nbytes, of.wide, of.start, of.widen, of.narrow, of.combine, of.divided, numbers=2)
    if dtype == "bool":
        return _of_bool(reduction)
    if dtype not in _BITS:
        return _of_integers(dtype, reduction)
    return _of_extremum(dtype, reduction) if reduction in ("max", "min") else _of_floats(dtype, form, reduction)


@intrinsic(literals=3)
def _reduce(
    builder: Any, form: str, reduction: str, result: str, destination: Any, sources: Any, world_size: Any, count: Any
) -> None:
    by, given = reducer(form, reduction), reducer(result, reduction)
    ranks = builder.uitofp(world_size, by.wide) if by.divided else None

    def reduce(first: Any, lanes: int) -> None:
        offset = builder.mul(first, number(by.nbytes))

        def combine(total: Any, source: Any) -> Any:
            item = load_at(builder, vector(by.stored, lanes), builder.add(source, offset))
            return by.combine(builder, total, by.widen(builder, item, lanes), lanes)

        outcome = combine_ranks(builder, sources, world_size, splat(by.wide, lanes, by.start), combine)
        if ranks is not None:
            outcome = builder.fdiv(outcome, broadcast_lanes(builder, ranks, lanes))
        outcome = given.narrow(builder, outcome, lanes)
        store_at(builder, outcome, builder.add(destination, builder.mul(first, number(given.nbytes))))

    for_each_vector(builder, builder.mul(count, number(by.numbers)), reduce)


@functools.cache
def arithmetic(form: str, reduction: str, result: str = "") -> Arithmetic:
    """Return ``function(destination, sources, world_size, count)`` that reduces ``count`` elements of all ranks.

    ``sources`` is the address of ``world_size`` addresses; ``form`` is the dtype, or ``float16 by bits``, and
    ``result`` is the dtype of the result, unless it is the same.
    """
    given = result or form

    def function(destination: int, sources: int, world_size: int, count: int) -> None:
        _reduce(form, reduction, given, destination, sources, world_size, count)

    name = f"{reduction}_{form}_{result}".rstrip("_").replace(" ", "_")
    function.__name__ = function.__qualname__ = name  # the name used in the disk cache
    return Arithmetic(function)


def _same(dtype: str, reduction: str) -> tuple[str, str]:
    """Return the form and the reduction that have the same machine code, so that it is compiled once."""
    if dtype == "bool":
        return "bool", OF_BOOL.get(reduction, reduction)
    if dtype in INTEGERS and reduction not in ("max", "min"):
        return f"u{dtype.removeprefix('u')}", reduction
    return (dtype if reduction in ("max", "min") else form_of(dtype)), reduction


REDUCTIONS = {
    (dtype, reduction): arithmetic(*_same(dtype, reduction)) for dtype, names in REDUCED.items() for reduction in names
}
"""The reductions over ranks by dtype and name, compiled on first use."""
SUMS = {dtype: REDUCTIONS[dtype, "sum"] for dtype in REDUCIBLE}
PARTIAL_SUMS = {"float32": SUMS["float32"]} | {
    dtype: arithmetic(form_of(dtype), "sum", "float32") for dtype in SIXTEEN_BITS
}
"""The sums over ranks by input dtype, with float32 results."""
ROUNDED_SUMS = {"float32": SUMS["float32"]} | {
    dtype: arithmetic("float32", "sum", form_of(dtype)) for dtype in SIXTEEN_BITS
}
"""The sums of float32 values, by result dtype."""
