"""Compiled products with matrices in the blocks of GGUF files, which stay as they are in the file.

    Q4_0, Q8_0   value = scale * code             32 values: the scale, float16, and the codes
    Q4_1         value = scale * code + least     32 values: both, float16, and the codes
    Q4_K         value = scale * code - least     256 values, of which each 32 have a scale and a least value of 6 bits
    Q6_K         value = scale * code             256 values, of which each 16 have a scale of 8 bits

Values are made with the arithmetic of the ``gguf`` package. A product with few rows makes none: it sums code * x over
the values that share a scale, and multiplies that sum by the scale; the least value is multiplied by the sum of x. The
bits of a row do not depend on how many rows there are.

Format: github.com/ggml-org/ggml, src/ggml-common.h.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from shotcast.device.cpu.compilation import keep_on_disk
from shotcast.device.cpu.floats import F32, FORMATS, form_of, splat
from shotcast.device.cpu.threads import in_parallel
from shotcast.device.cpu.vectors import broadcast_lanes, fused_multiply_add, load_at, number, reduce_lanes, store_at
from shotcast.kernels.block_formats import BLOCKS

MAX_ROWS = 32
"""The number of rows of x, float32, up to which products are made with the codes."""
_THREADS_FROM = 1 << 19
"""The number of values from which a second thread saves more time than waking it costs."""
_AT_ONCE = 1 << 20
"""The number of values that are held at once for many rows of x."""

_scratch = threading.local()
"""Memory for these values, kept between products: new memory would cost a page fault for each 4 KiB."""

_LANES = 16
_I8, _CODES, _FLOATS = ir.IntType(8), ir.VectorType(ir.IntType(8), _LANES), ir.VectorType(F32, _LANES)


class _Part(NamedTuple):
    """Values that share a scale: float32 ``scale`` and ``least`` (None for none), and codes, 16 in a vector."""

    scale: Any
    least: Any
    codes: list[Any]


def _half(builder: Any, at: Any, offset: int) -> Any:
    half = FORMATS[form_of("float16")]
    return half.widen(builder, load_at(builder, half.stored, builder.add(at, number(offset))), 1)


def _bytes(builder: Any, at: Any, offset: int, shift: int = 0, mask: int = 255) -> Any:
    """Return ``byte >> shift & mask`` of 16 bytes."""
    found = load_at(builder, _CODES, builder.add(at, number(offset)))
    shifted = builder.lshr(found, splat(_I8, _LANES, shift)) if shift else found
    return builder.and_(shifted, splat(_I8, _LANES, mask)) if mask < 255 else shifted


def _less(builder: Any, codes: Any, amount: int) -> Any:
    return builder.sub(codes, splat(_I8, _LANES, amount))


def _q4_0(builder: Any, at: Any) -> Iterator[_Part]:
    codes = [_less(builder, _bytes(builder, at, 2, shift, 15), 8) for shift in (0, 4)]
    yield _Part(_half(builder, at, 0), None, codes)


def _q4_1(builder: Any, at: Any) -> Iterator[_Part]:
    codes = [_bytes(builder, at, 4, shift, 15) for shift in (0, 4)]
    yield _Part(_half(builder, at, 0), _half(builder, at, 2), codes)


def _q8_0(builder: Any, at: Any) -> Iterator[_Part]:
    yield _Part(_half(builder, at, 0), None, [_bytes(builder, at, 2), _bytes(builder, at, 18)])


def _q4_k(builder: Any, at: Any) -> Iterator[_Part]:
    def bits(offset: int, shift: int, mask: int, left: int = 0) -> Any:
        byte = load_at(builder, _I8, builder.add(at, number(offset)))
        kept = builder.and_(builder.lshr(byte, ir.Constant(_I8, shift)), ir.Constant(_I8, mask))
        return builder.shl(kept, ir.Constant(_I8, left))

    of_scales, of_leasts = _half(builder, at, 0), _half(builder, at, 2)
    for part in range(8):
        scales = 4 + part
        if part < 4:
            factor, offset = bits(scales, 0, 63), bits(scales + 4, 0, 63)
        else:
            factor = builder.or_(bits(scales + 4, 0, 15), bits(scales - 4, 6, 3, 4))
            offset = builder.or_(bits(scales + 4, 4, 15), bits(scales, 6, 3, 4))
        scale = builder.fmul(of_scales, builder.uitofp(factor, F32))
        least = builder.fneg(builder.fmul(of_leasts, builder.uitofp(offset, F32)))
        place = 16 + 32 * (part // 2)
        yield _Part(scale, least, [_bytes(builder, at, place + half, 4 * (part % 2), 15) for half in (0, 16)])


def _q6_k(builder: Any, at: Any) -> Iterator[_Part]:
    whole = _half(builder, at, 208)
    for part in range(16):  # of two halves, of which each has four quarters of two parts
        half, quarter, place = part // 8, part // 2 % 4, part % 2
        low = _bytes(builder, at, 64 * half + 32 * (quarter % 2) + 16 * place, 4 * (quarter // 2), 15)
        high = _bytes(builder, at, 128 + 32 * half + 16 * place, 2 * quarter, 3)  # 2 bits, apart from the others
        codes = builder.or_(low, builder.shl(high, splat(_I8, _LANES, 4)))
        scale = builder.sitofp(load_at(builder, _I8, builder.add(at, number(192 + part))), F32)
        yield _Part(builder.fmul(whole, scale), None, [_less(builder, codes, 32)])


_READERS: dict[str, Callable[[Any, Any], Iterator[_Part]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
_KINDS = list(_READERS)
_SUMMED = 32
"""The values of a part, in the formats that have a least value."""
_TILE = 4
"""The rows of x that are multiplied at once, so that codes are converted once for all."""


def _in_blocks(builder: Any, kind: str, stored: Any, count: Any, use: Callable[[Any, int, int, _Part], None]) -> None:
    """Call ``use(block, first value, place, part)`` for the parts of ``count`` blocks."""
    with cgutils.for_range(builder, count) as loop:
        at = builder.add(stored, builder.mul(loop.index, number(BLOCKS[kind][1])))
        value = 0
        for place, part in enumerate(_READERS[kind](builder, at)):
            use(loop.index, value, place, part)
            value += _LANES * len(part.codes)


def _values_of(kind: str) -> Any:
    """Return a function that writes the values of blocks: (stored, blocks, address of float32)."""

    @intrinsic
    def write(_context: Any, stored: Any, count: Any, out: Any) -> Any:
        def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            stored, count, out = arguments

            def use(block: Any, value: int, _place: int, part: _Part) -> None:
                scale = broadcast_lanes(builder, part.scale, _LANES)
                least = ir.Constant(F32, -0.0) if part.least is None else part.least
                to = builder.add(out, builder.mul(block, number(4 * BLOCKS[kind][0])))
                for index, codes in enumerate(part.codes):
                    scaled = builder.fmul(scale, builder.sitofp(codes, _FLOATS))
                    values = builder.fadd(scaled, broadcast_lanes(builder, least, _LANES))
                    store_at(builder, values, builder.add(to, number(4 * (value + _LANES * index))))

            _in_blocks(builder, kind, stored, count, use)
            return target.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), generate

    return write


def _dots_of(kind: str, rows: int) -> Any:
    """Return a function that multiplies blocks with ``rows`` rows of x, and writes the sums.

    Its arguments are (stored, blocks, x, bytes of a row of x, sums of x over each 32 values, bytes of a row of these,
    out, bytes to the next row of out).
    """

    @intrinsic
    def multiply(
        _context: Any, stored: Any, count: Any, x: Any, x_bytes: Any, sums: Any, sums_bytes: Any, out: Any, stride: Any
    ) -> Any:
        def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            stored, count, x, x_bytes, sums, sums_bytes, out, stride = arguments
            totals = [cgutils.alloca_once(builder, _FLOATS) for _ in range(rows)]
            leasts = [cgutils.alloca_once(builder, F32) for _ in range(rows)]
            for total, least in zip(totals, leasts, strict=True):
                builder.store(splat(F32, _LANES, 0.0), total)
                builder.store(ir.Constant(F32, 0.0), least)
            parts = BLOCKS[kind][0] // _SUMMED

            def use(block: Any, value: int, place: int, part: _Part) -> None:
                scale = broadcast_lanes(builder, part.scale, _LANES)
                codes = [builder.sitofp(each, _FLOATS) for each in part.codes]
                first = builder.add(builder.mul(block, number(4 * BLOCKS[kind][0])), number(4 * value))
                for row in range(rows):
                    at = builder.add(builder.add(x, first), builder.mul(x_bytes, number(row)))
                    xs = [load_at(builder, _FLOATS, builder.add(at, number(64 * index))) for index in range(len(codes))]
                    product = builder.fmul(codes[0], xs[0])
                    for code, each in zip(codes[1:], xs[1:], strict=True):
                        product = fused_multiply_add(builder, code, each, product)
                    builder.store(fused_multiply_add(builder, scale, product, builder.load(totals[row])), totals[row])
                    if part.least is not None:
                        index = builder.add(builder.mul(block, number(4 * parts)), number(4 * place))
                        at = builder.add(builder.add(sums, index), builder.mul(sums_bytes, number(row)))
                        sum_of_x, before = load_at(builder, F32, at), builder.load(leasts[row])
                        builder.store(fused_multiply_add(builder, part.least, sum_of_x, before), leasts[row])

            _in_blocks(builder, kind, stored, count, use)
            for row in range(rows):
                total = reduce_lanes(builder, builder.load(totals[row]), builder.fadd)
                result = builder.fadd(total, builder.load(leasts[row]))
                store_at(builder, result, builder.add(out, builder.mul(stride, number(row))))
            return target.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return multiply


# numba finds functions by name, and chooses among them when it compiles, so they cannot be in a list
_write_q4_0, _write_q4_1, _write_q8_0, _write_q4_k, _write_q6_k = (_values_of(kind) for kind in _KINDS)
_dot_q4_0, _dot_q4_1, _dot_q8_0, _dot_q4_k, _dot_q6_k = (_dots_of(kind, 1) for kind in _KINDS)
_dots_q4_0, _dots_q4_1, _dots_q8_0, _dots_q4_k, _dots_q6_k = (_dots_of(kind, _TILE) for kind in _KINDS)


@intrinsic
def _sum(_context: Any, address: Any) -> Any:
    """Return the sum of the values of a part."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return reduce_lanes(builder, load_at(builder, ir.VectorType(F32, _SUMMED), arguments[0]), builder.fadd)

    return types.float32(types.int64), generate


def _dequantize(
    kind: int, stored: int, row_bytes: int, count: int, out: int, out_bytes: int, first: int, stop: int
) -> None:
    for row in range(first, stop):
        at, to = stored + row * row_bytes, out + row * out_bytes
        if kind == 0:
            _write_q4_0(at, count, to)
        elif kind == 1:
            _write_q4_1(at, count, to)
        elif kind == 2:
            _write_q8_0(at, count, to)
        elif kind == 3:
            _write_q4_k(at, count, to)
        else:
            _write_q6_k(at, count, to)


def _multiply(
    kind: int,
    stored: int,
    row_bytes: int,
    count: int,
    x: int,
    x_bytes: int,
    out: int,
    rows: int,
    outputs: int,
    first: int,
    stop: int,
) -> None:
    stride, parts = 4 * outputs, 0
    if kind == 1 or kind == 3:  # which have least values
        parts = x_bytes // (4 * _SUMMED)
    summed = np.empty(rows * parts, np.float32)
    for part in range(rows * parts):
        summed[part] = _sum(x + part * 4 * _SUMMED)
    sums, sums_bytes = summed.ctypes.data, 4 * parts
    for output in range(first, stop):
        at, row = stored + output * row_bytes, 0
        while row < rows:
            xs, ss, to = x + row * x_bytes, sums + row * sums_bytes, out + row * stride + 4 * output
            if row + _TILE <= rows:
                if kind == 0:
                    _dots_q4_0(at, count, xs, x_bytes, ss, sums_bytes, to, stride)
                elif kind == 1:
                    _dots_q4_1(at, count, xs, x_bytes, ss, sums_bytes, to, stride)
                elif kind == 2:
                    _dots_q8_0(at, count, xs, x_bytes, ss, sums_bytes, to, stride)
                elif kind == 3:
                    _dots_q4_k(at, count, xs, x_bytes, ss, sums_bytes, to, stride)
                else:
                    _dots_q6_k(at, count, xs, x_bytes, ss, sums_bytes, to, stride)
                row += _TILE
            else:
                if kind == 0:
                    _dot_q4_0(at, count, xs, x_bytes, ss, sums_bytes, to, stride)
                elif kind == 1:
                    _dot_q4_1(at, count, xs, x_bytes, ss, sums_bytes, to, stride)
                elif kind == 2:
                    _dot_q8_0(at, count, xs, x_bytes, ss, sums_bytes, to, stride)
                elif kind == 3:
                    _dot_q4_k(at, count, xs, x_bytes, ss, sums_bytes, to, stride)
                else:
                    _dot_q6_k(at, count, xs, x_bytes, ss, sums_bytes, to, stride)
                row += 1


@functools.cache
def _compiled(function: Callable[..., None]) -> Any:
    dispatcher = njit(nogil=True, error_model="numpy")(function)
    keep_on_disk(dispatcher)
    dispatcher.compile(types.void(*[types.int64] * function.__code__.co_argcount))
    dispatcher.disable_compile()
    return dispatcher


def dequantize(stored: torch.Tensor, kind: str, columns: int) -> torch.Tensor:
    """Return the values of rows as float32.

    Args:
        stored: uint8 [rows, bytes of the blocks of a row].
        kind: the format.
        columns: the number of values of a row.
    """
    return _into(torch.empty(stored.shape[0], columns, device="cpu"), stored, kind)


def _into(out: torch.Tensor, stored: torch.Tensor, kind: str) -> torch.Tensor:
    run, parts = _compiled(_dequantize), None if out.numel() >= _THREADS_FROM else 1
    count = out.shape[1] // BLOCKS[kind][0]
    arguments = _KINDS.index(kind), stored.data_ptr(), stored.stride(0), count, out.data_ptr(), 4 * out.shape[1]
    in_parallel(lambda first, stop: run(*arguments, first, stop), out.shape[0], parts)
    return out


def _multiply_many(x: torch.Tensor, stored: torch.Tensor, kind: str, bias: torch.Tensor | None) -> torch.Tensor:
    (rows, inputs), outputs = x.shape, stored.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device="cpu")
    step = max(1, _AT_ONCE // inputs)
    if getattr(_scratch, "values", torch.empty(0, device="cpu")).numel() < step * inputs:
        _scratch.values = torch.empty(step * inputs, device="cpu")
    for first in range(0, outputs, step):
        part = stored[first : first + step]
        values = _into(_scratch.values[: len(part) * inputs].view(-1, inputs), part, kind)
        weight, part_out = values.to(x.dtype).t(), out[:, first : first + step]
        if bias is None:
            torch.mm(x, weight, out=part_out)
        else:
            torch.addmm(bias[first : first + step], x, weight, out=part_out)
    return out


def linear(x: torch.Tensor, stored: torch.Tensor, kind: str, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, where the weights are values in blocks.

    Args:
        x: [rows, inputs].
        stored: contiguous uint8 [outputs, bytes of the blocks of a row].
        kind: the format.
        bias: [outputs].

    Returns:
        [rows, outputs], of the dtype of x.
    """
    (rows, inputs), outputs = x.shape, stored.shape[0]
    if rows > MAX_ROWS or x.dtype != torch.float32:
        return _multiply_many(x, stored, kind, bias)
    x, out = x.contiguous(), x.new_empty(rows, outputs)
    run, block = _compiled(_multiply), BLOCKS[kind][0]
    arguments = (
        *(_KINDS.index(kind), stored.data_ptr(), stored.shape[1], inputs // block, x.data_ptr(), 4 * inputs),
        *(out.data_ptr(), rows, outputs),
    )
    in_parallel(
        lambda first, stop: run(*arguments, first, stop), outputs, None if inputs * outputs >= _THREADS_FROM else 1
    )
    return out if bias is None else out + bias
