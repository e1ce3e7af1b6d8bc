"""Residual add, RMSNorm or LayerNorm, and FP8 quantization of rows whose sums arrive piece by piece.

    new_residual = round(round(x_0 + ... + x_{N-1}) + residual)
    normed       = round(new_residual * factor * weight),   factor = 1 / sqrt(sum(new_residual^2) / hidden + eps)
    quantized    = e4m3(normed * (1 / scale)),              scale = the caller's, or max |normed| / 448

and for a LayerNorm

    mean         = sum(new_residual) / hidden,              as a sum of two numbers: see :func:`_centre`
    normed       = round((new_residual - mean) * factor * weight + bias),      factor = 1 / sqrt(variance + eps)

Weight and bias may have a different dtype from the rest. All arithmetic is in float32, with the sum, ``new_residual``
and ``normed`` rounded to the dtype, and with correctly rounded divisions and square root. A row's dynamic scale ignores
NaN and is at least 2^-126, the smallest value whose inverse is finite.

The square of column c (for a LayerNorm: the value, the difference from the mean, and the square of that difference)
goes to partial sum c % 32, in column order. The partial sums are added pairwise, halves onto halves. This order depends
only on ``hidden``, not on how a row was divided.

The code is written as LLVM vectors, as in :mod:`shotcast.device.cpu.floats`. An output may alias the input of the same
element.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir

from shotcast.device.cpu.atomics import call_arithmetic, load, store
from shotcast.device.cpu.compilation import Arithmetic
from shotcast.device.cpu.float8 import to_e4m3
from shotcast.device.cpu.floats import F32, FORMATS, I32, INFINITY, LANES, WORD, form_of, splat, vector
from shotcast.device.cpu.lazy_numba import cgutils, intrinsic, njit
from shotcast.device.cpu.vectors import (
    broadcast_lanes,
    combine_ranks,
    for_each_vector,
    largest,
    load_at,
    number,
    reduce_lanes,
    store_at,
)
from shotcast.transport.cpu import layout
from shotcast.wire import FP8_LARGEST, LAYER, LAYER_WITH_BIAS, RMS, Norm

assert layout.SQUARES_LANES == LANES
_SMALLEST_SCALE = 2.0**-126

START_AT_ZERO = 0
START_AT_MINUS_ZERO = -(1 << 31)
"""The start of a sum, as float32 bits: +0.0 by the contract, or -0.0, which leaves an existing sum unchanged."""


class _Fields:
    """Accessors for the words of a row record and for the elements at the addresses it holds."""

    def __init__(self, builder: Any, row: Any, stored: Any):
        self._builder, self._row, self._stored = builder, row, stored
        self._itemsize = 4 if stored is F32 else 2

    def word(self, offset: int) -> Any:
        return load_at(self._builder, WORD, self._builder.add(self._row, number(offset)))

    def float32(self, offset: int) -> Any:
        return load_at(self._builder, F32, self._builder.add(self._row, number(offset)))

    def squares(self, index: Any) -> Any:
        address = self._builder.add(self._row, number(layout.SQUARES))
        return self._builder.add(address, self._builder.mul(index, number(4)))

    def item(self, address: Any, index: Any) -> Any:
        return self._builder.add(address, self._builder.mul(index, number(self._itemsize)))

    def read(self, address: Any, index: Any, lanes: int) -> Any:
        return load_at(self._builder, vector(self._stored, lanes), self.item(address, index))


@intrinsic(literals=2)
def _add(builder: Any, dtype: str, kind: str, row: Any, sources: Any, world_size: Any, count: Any) -> None:
    form = FORMATS[dtype]
    fields = _Fields(builder, row, form.stored)
    residual, new_residual = fields.word(layout.RESIDUAL), fields.word(layout.NEW_RESIDUAL)
    column, start = fields.word(layout.COLUMN), fields.float32(layout.START)

    def terms_of(index: Any, lanes: int) -> Any:
        def combine(total: Any, source: Any) -> Any:
            return builder.fadd(total, form.widen(builder, fields.read(source, index, lanes), lanes))

        total = combine_ranks(builder, sources, world_size, broadcast_lanes(builder, start, lanes), combine)
        rounded = form.widen(builder, form.narrow(builder, total, lanes), lanes)
        added = builder.fadd(rounded, form.widen(builder, fields.read(residual, index, lanes), lanes))
        result = form.narrow(builder, added, lanes)
        store_at(builder, result, fields.item(new_residual, index))
        value = form.widen(builder, result, lanes)
        return builder.fmul(value, value) if kind == RMS else value

    def add_singles(first: Any, count: Any) -> None:
        with cgutils.for_range(builder, count) as item:
            index = builder.add(first, item.index)
            address = fields.squares(builder.urem(builder.add(column, index), number(LANES)))
            store_at(builder, builder.fadd(load_at(builder, F32, address), terms_of(index, 1)), address)

    # Single elements up to a multiple of LANES columns, so that vector lanes match the partial sums.
    head = builder.urem(builder.sub(number(0), column), number(LANES))
    head = builder.select(builder.icmp_unsigned("<", head, count), head, count)
    add_singles(number(0), head)
    blocks = builder.udiv(builder.sub(count, head), number(LANES))
    wide = vector(F32, LANES)
    lanes = cgutils.alloca_once(builder, wide)
    builder.store(load_at(builder, wide, fields.squares(number(0))), lanes)
    with cgutils.for_range(builder, blocks) as block:
        index = builder.add(head, builder.mul(block.index, number(LANES)))
        builder.store(builder.fadd(builder.load(lanes), terms_of(index, LANES)), lanes)
    store_at(builder, builder.load(lanes), fields.squares(number(0)))
    tail = builder.add(head, builder.mul(blocks, number(LANES)))
    add_singles(tail, builder.sub(count, tail))


def _centre(builder: Any, form: Any, fields: _Fields, values: Any, hidden: Any, mean: Any) -> tuple[Any, Any]:
    """Compute the variance of a row, and build a function that subtracts the mean from ``lanes`` of its values.

    ``mean`` was rounded more than once. The differences from it are therefore summed too: the mean is ``mean + rest``,
    the mean of the differences, and the variance is that of the differences.
    """
    wide = vector(F32, LANES)
    sums = [cgutils.alloca_once(builder, wide) for _ in range(2)]
    last = cgutils.alloca_once(builder, wide)
    for lanes in (*sums, last):
        builder.store(splat(F32, LANES, 0.0), lanes)

    def difference(index: Any, lanes: int) -> Any:
        value = form.widen(builder, fields.read(values, index, lanes), lanes)
        return builder.fsub(value, broadcast_lanes(builder, mean, lanes))

    def add(differences: Any) -> None:
        for total, term in zip(sums, (differences, builder.fmul(differences, differences)), strict=True):
            builder.store(builder.fadd(builder.load(total), term), total)

    blocks = builder.udiv(hidden, number(LANES))
    with cgutils.for_range(builder, blocks) as block:
        add(difference(builder.mul(block.index, number(LANES)), LANES))
    done = builder.mul(blocks, number(LANES))
    with cgutils.for_range(builder, builder.sub(hidden, done)) as item:
        place = builder.gep(builder.bitcast(last, F32.as_pointer()), [item.index])
        builder.store(difference(builder.add(done, item.index), 1), place)
    add(builder.load(last))
    count = builder.sitofp(hidden, F32)
    rest, square = (builder.fdiv(reduce_lanes(builder, builder.load(one), builder.fadd), count) for one in sums)
    variance = builder.fsub(square, builder.fmul(rest, rest))
    negative = builder.fcmp_ordered("<", variance, ir.Constant(F32, 0.0))
    variance = builder.select(negative, ir.Constant(F32, 0.0), variance)  # negative from rounding; NaN stays

    def centred(value: Any, lanes: int) -> Any:
        value = builder.fsub(value, broadcast_lanes(builder, mean, lanes))
        return builder.fsub(value, broadcast_lanes(builder, rest, lanes))

    return variance, centred


@intrinsic(literals=3)
def _norm(builder: Any, dtype: str, weight_dtype: str, kind: str, row: Any, values: Any, hidden: Any) -> None:
    form, weight_form = FORMATS[dtype], FORMATS[weight_dtype]
    fields, weights = _Fields(builder, row, form.stored), _Fields(builder, row, weight_form.stored)
    weight, normed, quantized = fields.word(layout.WEIGHT), fields.word(layout.NORMED), fields.word(layout.QUANTIZED)
    none = number(0)
    keep_normed = builder.icmp_unsigned("!=", normed, none)
    do_quantize = builder.icmp_unsigned("!=", quantized, none)
    dynamic = builder.icmp_unsigned("!=", fields.word(layout.DYNAMIC), none)

    wide = vector(F32, LANES)
    total = reduce_lanes(builder, load_at(builder, wide, fields.squares(none)), builder.fadd)
    store_at(builder, splat(F32, LANES, 0.0), fields.squares(none))
    mean = builder.fdiv(total, builder.sitofp(hidden, F32))  # of the squares, or of the values
    if kind == RMS:
        spread, centred = mean, lambda value, lanes: value
    else:
        spread, centred = _centre(builder, form, fields, values, hidden, mean)
    root = builder.module.declare_intrinsic("llvm.sqrt", [F32])
    root = builder.call(root, [builder.fadd(spread, fields.float32(layout.EPS))])
    one = ir.Constant(F32, 1.0)
    factor = builder.fdiv(one, root)

    def normed_at(index: Any, lanes: int) -> Any:
        value = centred(form.widen(builder, fields.read(values, index, lanes), lanes), lanes)
        value = builder.fmul(value, broadcast_lanes(builder, factor, lanes))
        value = builder.fmul(value, weight_form.widen(builder, weights.read(weight, index, lanes), lanes))
        if kind == LAYER_WITH_BIAS:
            bias = weight_form.widen(builder, weights.read(fields.word(layout.BIAS), index, lanes), lanes)
            value = builder.fadd(value, bias)
        return form.narrow(builder, value, lanes)

    def keep(index: Any, lanes: int) -> Any:
        result = normed_at(index, lanes)
        with builder.if_then(keep_normed):
            store_at(builder, result, fields.item(normed, index))
        return result

    def quantize(result: Any, index: Any, lanes: int, inverse: Any) -> None:
        value = builder.fmul(form.widen(builder, result, lanes), broadcast_lanes(builder, inverse, lanes))
        store_at(builder, to_e4m3(builder, value, lanes), builder.add(quantized, index))

    with builder.if_else(builder.and_(do_quantize, dynamic)) as (own_scale, no_own_scale):
        with own_scale:

            def bits_at(index: Any, lanes: int) -> Any:
                bits = builder.bitcast(form.widen(builder, keep(index, lanes), lanes), vector(I32, lanes))
                bits = builder.and_(bits, splat(I32, lanes, 0x7FFFFFFF))
                is_number = builder.icmp_unsigned("<=", bits, splat(I32, lanes, INFINITY))
                return builder.select(is_number, bits, splat(I32, lanes, 0))

            bits = largest(builder, hidden, bits_at, 0)
            scale = builder.fdiv(builder.bitcast(bits, F32), ir.Constant(F32, FP8_LARGEST))
            smallest = ir.Constant(F32, _SMALLEST_SCALE)
            scale = builder.select(builder.fcmp_ordered("<", scale, smallest), smallest, scale)
            store_at(builder, scale, fields.word(layout.SCALE))
            inverse = builder.fdiv(one, scale)
            # The norm is recomputed from cache, so its bits do not depend on whether it is stored.
            for_each_vector(builder, hidden, lambda i, lanes: quantize(normed_at(i, lanes), i, lanes, inverse))
        with no_own_scale:
            given_inverse = cgutils.alloca_once_value(builder, one)
            with builder.if_then(do_quantize):
                builder.store(builder.fdiv(one, load_at(builder, F32, fields.word(layout.SCALE))), given_inverse)

            def write(index: Any, lanes: int) -> None:
                result = keep(index, lanes)
                with builder.if_then(do_quantize):
                    quantize(result, index, lanes, builder.load(given_inverse))

            for_each_vector(builder, hidden, write)


@functools.cache
def adding(form: str, kind: str) -> Arithmetic:
    """Return the arithmetic ``(row, sources, world_size, count)`` that sums the next ``count`` elements of a row, adds
    the residual, and adds the squares (for a LayerNorm, the results themselves) to the partial sums of the row.
    """

    def add(row: int, sources: int, world_size: int, count: int) -> None:
        _add(form, kind, row, sources, world_size, count)

    add.__name__ = f"add_{form}_{kind}".replace(" ", "_")
    return Arithmetic(add)


@functools.cache
def norming(form: str, weight: str, kind: str) -> Arithmetic:
    """Return the arithmetic ``(row, values, hidden, 0)`` that normalizes a row, given its new residual, after
    :func:`adding`.
    """

    def norm(row: int, values: int, hidden: int, _unused: int) -> None:
        _norm(form, weight, kind, row, values, hidden)

    norm.__name__ = f"norm_{form}_{weight}_{kind}".replace(" ", "_")
    return Arithmetic(norm)


def arithmetic_of(dtype: str, norm: Norm) -> tuple[Arithmetic, Arithmetic]:
    """Return the arithmetic that sums rows of ``dtype``, and the arithmetic that normalizes them."""
    form = form_of(dtype)
    added = LAYER if norm.kind == LAYER_WITH_BIAS else norm.kind
    return adding(form, added), norming(form, form_of(norm.weight or dtype), norm.kind)


@njit(error_model="numpy")
def begin_rows(context: int) -> None:
    """Reset the row record before the first row of a call: a stopped call may have left values in it."""
    row = context + layout.ROW
    store(row + layout.COLUMN, 0)
    for pair in range(layout.SQUARES_LANES // 2):
        store(row + layout.SQUARES + 8 * pair, 0)


@njit(error_model="numpy")
def add_and_norm(context: int, plan: int, start: int, world_size: int, count: int) -> None:
    """Sum the next ``count`` elements of this rank's rows over ``world_size`` sources; normalize complete rows.

    ``start`` is START_AT_ZERO or START_AT_MINUS_ZERO. The elements may end anywhere in a row; the sources are advanced.
    """
    row, hidden, itemsize = context + layout.ROW, load(plan + layout.HIDDEN), load(plan + layout.ITEMSIZE)
    store(row + layout.START, start)
    while count > 0:
        column = load(row + layout.COLUMN)
        length = min(count, hidden - column)
        nbytes = length * itemsize
        call_arithmetic(load(plan + layout.ADD), row, context + layout.SOURCES, world_size, length)
        for rank in range(world_size):
            store(context + layout.SOURCES + 8 * rank, load(context + layout.SOURCES + 8 * rank) + nbytes)
        store(row + layout.RESIDUAL, load(row + layout.RESIDUAL) + nbytes)
        store(row + layout.NEW_RESIDUAL, load(row + layout.NEW_RESIDUAL) + nbytes)
        count -= length
        column += length
        if column == hidden:
            call_arithmetic(
                load(plan + layout.NORM), row, load(row + layout.NEW_RESIDUAL) - hidden * itemsize, hidden, 0
            )
            if load(row + layout.NORMED) != 0:
                store(row + layout.NORMED, load(row + layout.NORMED) + hidden * itemsize)
            if load(row + layout.QUANTIZED) != 0:
                store(row + layout.QUANTIZED, load(row + layout.QUANTIZED) + hidden)
            store(row + layout.SCALE, load(row + layout.SCALE) + 4 * load(row + layout.DYNAMIC))
            column = 0
        store(row + layout.COLUMN, column)
