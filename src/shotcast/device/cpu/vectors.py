"""LLVM code builders for vectorized arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from shotcast.device.cpu.floats import I32, LANES, WORD, splat, vector
from shotcast.device.cpu.lazy_numba import cgutils


def number(value: int) -> Any:
    """Build a 64-bit constant."""
    return ir.Constant(WORD, value)


def load_at(builder: Any, kind: Any, address: Any) -> Any:
    """Load a value of type ``kind`` from an address of any alignment."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def store_at(builder: Any, value: Any, address: Any) -> None:
    """Store a value to an address of any alignment."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def call_function(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call a C or LLVM function by its name."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def broadcast_lanes(builder: Any, value: Any, lanes: int) -> Any:
    """Broadcast a scalar to every lane."""
    if lanes == 1:
        return value
    none = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    one = builder.insert_element(none, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, none, splat(I32, lanes, 0))


def reduce_lanes(builder: Any, lanes: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine all lanes into one: the upper half with the lower half, until one lane is left."""
    width = lanes.type.count
    while width > 1:
        width //= 2
        halves = [
            builder.shuffle_vector(lanes, lanes, ir.Constant(ir.VectorType(I32, width), list(range(low, low + width))))
            for low in (0, width)
        ]
        lanes = combine(*halves)
    return builder.extract_element(lanes, ir.Constant(I32, 0))


def combine_ranks(builder: Any, sources: Any, world_size: Any, start: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Fold ``combine(total, address)`` from ``start`` over the ``world_size`` addresses at ``sources``."""
    total = cgutils.alloca_once(builder, start.type)
    builder.store(start, total)
    with cgutils.for_range(builder, world_size) as rank:
        address = load_at(builder, WORD, builder.add(sources, builder.mul(rank.index, number(8))))
        builder.store(combine(builder.load(total), address), total)
    return builder.load(total)


def fused_multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """Compute ``x * y + z`` of floats or float vectors, rounded once if the machine supports it."""
    kind = x.type
    name = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
    return call_function(builder, f"llvm.fmuladd.{name}", kind, x, y, z)


def for_each_vector(builder: Any, count: Any, body: Callable[[Any, int], None]) -> None:
    """Call ``body(index, lanes)`` for ``count`` elements: first for whole vectors, then for single elements."""
    blocks = builder.udiv(count, number(LANES))
    with cgutils.for_range(builder, blocks) as block:
        body(builder.mul(block.index, number(LANES)), LANES)
    done = builder.mul(blocks, number(LANES))
    with cgutils.for_range(builder, builder.sub(count, done)) as item:
        body(builder.add(done, item.index), 1)


def largest(builder: Any, count: Any, bits_at: Callable[[Any, int], Any], start: int) -> Any:
    """Return the largest of ``start`` and of ``count`` unsigned integers of 32 bits, ``bits_at(index, lanes)``.

    The bits of magnitudes of float32 are such integers: infinity is above all numbers, and NaN above infinity.
    """
    maxima = {lanes: cgutils.alloca_once(builder, vector(I32, lanes)) for lanes in (1, LANES)}
    for lanes, place in maxima.items():
        builder.store(splat(I32, lanes, start), place)

    def larger(left: Any, right: Any) -> Any:
        return builder.select(builder.icmp_unsigned(">", left, right), left, right)

    def scan(index: Any, lanes: int) -> None:
        builder.store(larger(builder.load(maxima[lanes]), bits_at(index, lanes)), maxima[lanes])

    for_each_vector(builder, count, scan)
    return larger(reduce_lanes(builder, builder.load(maxima[LANES]), larger), builder.load(maxima[1]))
