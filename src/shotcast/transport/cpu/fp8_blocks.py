"""Blocks of FP8 values with one scale each: the wire format of ``two_shot_fp8`` messages.

    a = max |x|, at least 2^-100,   scale = a / 448,   q = e4m3(x * (448 / a)),   and x is about q * scale

for each 128 consecutive elements (the last block holds the remainder), in float32 with exact divisions. The format and
the bits match ``transport/triton/two_shot_fp8.py``. An infinity or a NaN makes the scale NaN, and therefore the whole
block.

A block is its float32 scale followed by its bytes. The code is written as LLVM vectors, as in
:mod:`shotcast.device.cpu.floats`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from shotcast.device.cpu.compilation import Arithmetic
from shotcast.device.cpu.float8 import BYTE, from_e4m3, to_e4m3
from shotcast.device.cpu.floats import F32, FORMATS, I32, INFINITY, WORD, form_of, splat, vector
from shotcast.device.cpu.lazy_numba import cgutils, intrinsic, njit
from shotcast.device.cpu.vectors import (
    broadcast_lanes,
    combine_ranks,
    for_each_vector,
    largest,
    load_at,
    number,
    store_at,
)
from shotcast.wire import FP8_BLOCK, FP8_FLOOR, FP8_LARGEST, REDUCIBLE

SCALE_BYTES = 4
BLOCK_BYTES = SCALE_BYTES + FP8_BLOCK
_NAN = 0x7FC00000


@njit(error_model="numpy")
def encoded_bytes(count: int) -> int:
    """Compute the bytes that ``count`` elements take in blocks."""
    return (count + FP8_BLOCK - 1) // FP8_BLOCK * BLOCK_BYTES


def _for_blocks(builder: Any, count: Any, body: Callable[[Any, Any], None]) -> None:
    """Call ``body(index, length)`` for every block of ``count`` elements."""
    blocks = builder.udiv(builder.add(count, number(FP8_BLOCK - 1)), number(FP8_BLOCK))
    with cgutils.for_range(builder, blocks) as block:
        remaining = builder.sub(count, builder.mul(block.index, number(FP8_BLOCK)))
        is_last = builder.icmp_unsigned("<", remaining, number(FP8_BLOCK))
        body(block.index, builder.select(is_last, remaining, number(FP8_BLOCK)))


def _store_block(builder: Any, address: Any, length: Any, value_at: Callable[[Any, int], Any]) -> None:
    """Write the block of ``length`` float32 values ``value_at(index, lanes)`` to ``address``, reading them twice."""

    def bits_at(index: Any, lanes: int) -> Any:
        bits = builder.bitcast(value_at(index, lanes), vector(I32, lanes))
        return builder.and_(bits, splat(I32, lanes, 0x7FFFFFFF))

    bits = largest(builder, length, bits_at, FP8_FLOOR)
    finite = builder.icmp_unsigned("<", bits, ir.Constant(I32, INFINITY))
    amax, fp8_max = builder.bitcast(bits, F32), ir.Constant(F32, FP8_LARGEST)
    scale = builder.select(finite, builder.fdiv(amax, fp8_max), builder.bitcast(ir.Constant(I32, _NAN), F32))
    store_at(builder, scale, address)
    inverse = builder.fdiv(fp8_max, amax)

    def quantize(index: Any, lanes: int) -> None:
        byte = to_e4m3(builder, builder.fmul(value_at(index, lanes), broadcast_lanes(builder, inverse, lanes)), lanes)
        store_at(builder, byte, builder.add(address, builder.add(number(SCALE_BYTES), index)))

    for_each_vector(builder, length, quantize)


def _load_block(builder: Any, address: Any, index: Any, lanes: int) -> Any:
    """Load elements of the block at ``address``, as float32."""
    scale = broadcast_lanes(builder, load_at(builder, F32, address), lanes)
    byte = load_at(builder, vector(BYTE, lanes), builder.add(address, builder.add(number(SCALE_BYTES), index)))
    return builder.fmul(from_e4m3(builder, byte, lanes), scale)


def _block_at(builder: Any, address: Any, block: Any) -> Any:
    return builder.add(address, builder.mul(block, number(BLOCK_BYTES)))


@intrinsic(literals=1)
def _encode(builder: Any, dtype: str, destination: Any, source: Any, count: Any) -> None:
    form = FORMATS[dtype]
    itemsize = 4 if form.stored is F32 else 2

    def encode(block: Any, length: Any) -> None:
        first = builder.add(source, builder.mul(block, number(FP8_BLOCK * itemsize)))

        def value_at(index: Any, lanes: int) -> Any:
            item = builder.add(first, builder.mul(index, number(itemsize)))
            return form.widen(builder, load_at(builder, vector(form.stored, lanes), item), lanes)

        _store_block(builder, _block_at(builder, destination, block), length, value_at)

    _for_blocks(builder, count, encode)


@intrinsic(literals=1)
def _decode(builder: Any, dtype: str, destination: Any, source: Any, count: Any) -> None:
    form = FORMATS[dtype]
    itemsize = 4 if form.stored is F32 else 2

    def decode(block: Any, length: Any) -> None:
        first = builder.add(destination, builder.mul(block, number(FP8_BLOCK * itemsize)))
        address = _block_at(builder, source, block)

        def write(index: Any, lanes: int) -> None:
            value = form.narrow(builder, _load_block(builder, address, index, lanes), lanes)
            store_at(builder, value, builder.add(first, builder.mul(index, number(itemsize))))

        for_each_vector(builder, length, write)

    _for_blocks(builder, count, decode)


@intrinsic()
def _sum(builder: Any, destination: Any, sources: Any, world_size: Any, count: Any) -> None:
    totals = builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(F32, FP8_BLOCK)), WORD)

    def add(block: Any, length: Any) -> None:
        def total_of(index: Any, lanes: int) -> None:
            def combine(total: Any, source: Any) -> Any:
                return builder.fadd(total, _load_block(builder, _block_at(builder, source, block), index, lanes))

            total = combine_ranks(builder, sources, world_size, splat(F32, lanes, 0.0), combine)
            store_at(builder, total, builder.add(totals, builder.mul(index, number(4))))

        for_each_vector(builder, length, total_of)

        def value_at(index: Any, lanes: int) -> Any:
            return load_at(builder, vector(F32, lanes), builder.add(totals, builder.mul(index, number(4))))

        _store_block(builder, _block_at(builder, destination, block), length, value_at)

    _for_blocks(builder, count, add)


@functools.cache
def encoding(form: str) -> Arithmetic:
    """Return the arithmetic ``(destination, source, count, 0)`` that encodes ``count`` elements as blocks."""

    def encode(destination: int, source: int, count: int, _unused: int) -> None:
        _encode(form, destination, source, count)

    encode.__name__ = f"encode_{form}".replace(" ", "_")
    return Arithmetic(encode)


@functools.cache
def decoding(form: str) -> Arithmetic:
    """Return the arithmetic ``(destination, source, count, 0)`` that decodes ``count`` elements, rounded to the
    dtype."""

    def decode(destination: int, source: int, count: int, _unused: int) -> None:
        _decode(form, destination, source, count)

    decode.__name__ = f"decode_{form}".replace(" ", "_")
    return Arithmetic(decode)


def _sum_blocks(destination: int, sources: int, world_size: int, count: int) -> None:
    _sum(destination, sources, world_size, count)


ENCODE = {dtype: encoding(form_of(dtype)) for dtype in REDUCIBLE}
DECODE = {dtype: decoding(form_of(dtype)) for dtype in REDUCIBLE}
SUM = Arithmetic(_sum_blocks)
"""``(destination, sources, world_size, count)``: encode the sums of ``world_size`` ranks' blocks, in rank order."""
