"""Compiled matmuls with weights in the block formats of GGUF files, stored exactly as in the file.

    Q4_0, Q8_0   value = scale * code             32 values: the scale, float16, and the codes
    Q4_1         value = scale * code + least     32 values: both, float16, and the codes
    Q4_K         value = scale * code - least     256 values; every 32 share a 6-bit scale and a 6-bit least value
    Q6_K         value = scale * code             256 values; every 16 share an 8-bit scale

Values are dequantized with the arithmetic of the ``gguf`` package. A matmul of few rows does not dequantize: it sums
code * x over the values that share a scale, and multiplies that sum by the scale; the least value is multiplied by the
sum of x. The bits of a row do not depend on the number of rows.

Codes are extracted from 32-bit words with shifts, because a processor executes more of them at once than instructions
that widen bytes. The codes therefore come out in a different order than in the file, and x is permuted to match first.

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
from shotcast.device.cpu.floats import F32, FORMATS, I32, form_of, splat
from shotcast.device.cpu.threads import in_parallel
from shotcast.device.cpu.vectors import broadcast_lanes, fused_multiply_add, load_at, number, reduce_lanes, store_at
from shotcast.kernels.block_formats import BLOCKS

MAX_ROWS = 32
"""The largest number of rows of float32 x that are multiplied with the codes directly."""
_THREADS_FROM = 1 << 19
"""The smallest number of values for which a second thread saves more time than waking it costs."""
_AT_ONCE = 1 << 20
"""The number of dequantized values held at a time for many rows of x."""

_scratch = threading.local()
"""Memory for these values, kept between matmuls: fresh memory would cost a page fault per 4 KiB."""

_LANES = 8
_I8, _WORDS, _FLOATS = ir.IntType(8), ir.VectorType(I32, _LANES), ir.VectorType(F32, _LANES)
_PART = 32
"""Values per part: four vectors of codes."""
_OF_BYTES = [4 * lane + code for code in range(4) for lane in range(_LANES)]
_OF_NIBBLES = [16 * (code % 2) + 4 * (lane % 4) + 2 * (lane // 4) + code // 2 for code in range(4) for lane in range(8)]
"""The values whose codes are in the lanes of the four vectors: one in each byte of eight words, or two in each of four
words, whose upper halves are in the upper lanes."""


class _Part(NamedTuple):
    """Codes with their float32 ``scale``, one for all lanes or one per lane, and ``least`` (None if the format has
    none)."""

    scale: Any
    least: Any
    codes: list[Any]


def _half(builder: Any, at: Any, offset: int, lanes: int = 1) -> Any:
    """Load a float16 as float32 into ``lanes`` lanes."""
    half = FORMATS[form_of("float16")]
    found = load_at(builder, half.stored, builder.add(at, number(offset)))
    return half.widen(builder, broadcast_lanes(builder, found, lanes), lanes)


def _two_halves(builder: Any, at: Any) -> list[Any]:
    half = FORMATS[form_of("float16")]
    both = half.widen(builder, load_at(builder, ir.VectorType(half.stored, 2), at), 2)
    return [builder.extract_element(both, ir.Constant(I32, lane)) for lane in range(2)]


def _words(builder: Any, at: Any, offset: int) -> Any:
    return load_at(builder, _WORDS, builder.add(at, number(offset)))


def _words_twice(builder: Any, at: Any, offset: int) -> Any:
    """Load four words, followed by their upper halves."""
    four = load_at(builder, ir.VectorType(I32, 4), builder.add(at, number(offset)))
    both = builder.shuffle_vector(four, four, ir.Constant(_WORDS, [0, 1, 2, 3] * 2))
    return builder.lshr(both, ir.Constant(_WORDS, [0] * 4 + [16] * 4))


def _bits(builder: Any, words: Any, shift: int, mask: int) -> Any:
    """Compute ``words >> shift & mask``; a negative shift is a left shift."""
    shifted = builder.lshr(words, splat(I32, _LANES, shift)) if shift > 0 else words
    shifted = builder.shl(words, splat(I32, _LANES, -shift)) if shift < 0 else shifted
    return builder.and_(shifted, splat(I32, _LANES, mask))


def _signed(builder: Any, words: Any, first: int, bits: int) -> Any:
    """Extract the signed numbers in ``bits`` bits, starting at bit ``first``."""
    left = builder.shl(words, splat(I32, _LANES, 32 - bits - first)) if first + bits < 32 else words
    return builder.ashr(left, splat(I32, _LANES, 32 - bits))


def _q4_0(builder: Any, at: Any) -> Iterator[_Part]:
    words = builder.xor(_words_twice(builder, at, 2), splat(I32, _LANES, 0x88888888))  # minus 8, as signed numbers
    yield _Part(_half(builder, at, 0, _LANES), None, [_signed(builder, words, 4 * code, 4) for code in range(4)])


def _q4_1(builder: Any, at: Any) -> Iterator[_Part]:
    words = _words_twice(builder, at, 4)
    scale, least = _two_halves(builder, at)
    yield _Part(scale, least, [_bits(builder, words, 4 * code, 15) for code in range(4)])


def _q8_0(builder: Any, at: Any) -> Iterator[_Part]:
    places = [builder.add(at, number(2 + _LANES * code)) for code in range(4)]
    codes = [builder.sext(load_at(builder, ir.VectorType(_I8, _LANES), place), _WORDS) for place in places]
    yield _Part(_half(builder, at, 0, _LANES), None, codes)


def _q4_k(builder: Any, at: Any) -> Iterator[_Part]:
    def bits(offset: int, shift: int, mask: int, left: int = 0) -> Any:
        byte = load_at(builder, _I8, builder.add(at, number(offset)))
        kept = builder.and_(builder.lshr(byte, ir.Constant(_I8, shift)), ir.Constant(_I8, mask))
        return builder.shl(kept, ir.Constant(_I8, left))

    of_scales, of_leasts = _two_halves(builder, at)
    for part in range(8):
        scales = 4 + part
        if part < 4:
            factor, offset = bits(scales, 0, 63), bits(scales + 4, 0, 63)
        else:
            factor = builder.or_(bits(scales + 4, 0, 15), bits(scales - 4, 6, 3, 4))
            offset = builder.or_(bits(scales + 4, 4, 15), bits(scales, 6, 3, 4))
        scale = builder.fmul(of_scales, builder.uitofp(factor, F32))
        least = builder.fneg(builder.fmul(of_leasts, builder.uitofp(offset, F32)))
        words = _words(builder, at, 16 + 32 * (part // 2))
        yield _Part(scale, least, [_bits(builder, words, 8 * code + 4 * (part % 2), 15) for code in range(4)])


def _q6_k(builder: Any, at: Any) -> Iterator[_Part]:
    whole = _half(builder, at, 208)
    for part in range(8):
        half, quarter = part // 4, part % 4
        low = _words(builder, at, 64 * half + 32 * (quarter % 2))
        high = _words(builder, at, 128 + 32 * half)  # 2 bits, stored apart from the others
        codes = []
        for code in range(4):
            lower = _bits(builder, low, 8 * code + 4 * (quarter // 2), 15)
            upper = _bits(builder, high, 8 * code + 2 * quarter - 4, 48)
            codes.append(builder.sub(builder.or_(lower, upper), splat(I32, _LANES, 32)))
        two = [
            builder.fmul(whole, builder.sitofp(load_at(builder, _I8, builder.add(at, number(place))), F32))
            for place in (192 + 2 * part, 193 + 2 * part)
        ]
        lower, upper = (broadcast_lanes(builder, one, _LANES) for one in two)
        scale = builder.shuffle_vector(lower, upper, ir.Constant(_WORDS, [0] * 4 + [8] * 4))
        yield _Part(scale, None, codes)


_READERS: dict[str, Callable[[Any, Any], Iterator[_Part]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
_KINDS = list(_READERS)
_TILE = 4
"""Rows of x multiplied at a time, so that codes are converted once for all of them."""


def _order(kind: str) -> list[int]:
    return {"Q4_0": _OF_NIBBLES, "Q4_1": _OF_NIBBLES, "Q8_0": list(range(_PART))}.get(kind, _OF_BYTES)


def _in_blocks(builder: Any, kind: Any, stored: Any, count: Any, use: Callable[[str, Any, _Part], None]) -> None:
    """Emit ``use(kind, part number, part)`` for every part of ``count`` blocks, for the format with number ``kind``."""
    for kind_number, (name, read) in enumerate(_READERS.items()):
        values, nbytes = BLOCKS[name]
        chosen = builder.icmp_signed("==", kind, number(kind_number))
        with builder.if_then(chosen), cgutils.for_range(builder, count) as loop:
            at = builder.add(stored, builder.mul(loop.index, number(nbytes)))
            first = builder.mul(loop.index, number(values // _PART))
            for place, part in enumerate(read(builder, at)):
                scale = part.scale if part.scale.type == _FLOATS else broadcast_lanes(builder, part.scale, _LANES)
                use(name, builder.add(first, number(place)), part._replace(scale=scale))


@intrinsic
def _write(_context: Any, kind: Any, stored: Any, count: Any, out: Any) -> Any:
    """Write the values of blocks to an address, as float32."""

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind, stored, count, out = arguments

        def joined(low: Any, high: Any) -> Any:
            lanes = low.type.count + high.type.count
            return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, lanes), list(range(lanes))))

        def use(name: str, part_number: Any, part: _Part) -> None:
            least = ir.Constant(F32, -0.0) if part.least is None else part.least
            offset = broadcast_lanes(builder, least, _LANES)
            a, b, c, d = (
                builder.fadd(builder.fmul(part.scale, builder.sitofp(each, _FLOATS)), offset) for each in part.codes
            )
            order = _order(name)
            mask = ir.Constant(ir.VectorType(I32, _PART), [order.index(value) for value in range(_PART)])
            values = builder.shuffle_vector(joined(a, b), joined(c, d), mask)
            store_at(builder, values, builder.add(out, builder.mul(part_number, number(4 * _PART))))

        _in_blocks(builder, kind, stored, count, use)
        return target.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


def _dots_of(rows: int) -> Any:
    """Build a function that multiplies blocks by ``rows`` rows of x and writes the sums.

    Its arguments are (kind, stored, blocks, x in code order, bytes per row of x, sums of x over each part, bytes per
    row of these sums, out, bytes between rows of out).
    """

    @intrinsic
    def multiply(
        _context: Any,
        kind: Any,
        stored: Any,
        count: Any,
        x: Any,
        x_bytes: Any,
        sums: Any,
        sums_bytes: Any,
        out: Any,
        stride: Any,
    ) -> Any:
        def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            kind, stored, count, x, x_bytes, sums, sums_bytes, out, stride = arguments
            totals = [cgutils.alloca_once(builder, _FLOATS) for _ in range(rows)]
            leasts = [cgutils.alloca_once(builder, F32) for _ in range(rows)]
            for total, least in zip(totals, leasts, strict=True):
                builder.store(splat(F32, _LANES, 0.0), total)
                builder.store(ir.Constant(F32, 0.0), least)

            def use(_name: str, part_number: Any, part: _Part) -> None:
                codes = [builder.sitofp(each, _FLOATS) for each in part.codes]
                for row in range(rows):
                    at = builder.add(builder.mul(part_number, number(4 * _PART)), builder.mul(x_bytes, number(row)))
                    at = builder.add(x, at)
                    xs = [load_at(builder, _FLOATS, builder.add(at, number(32 * index))) for index in range(len(codes))]
                    product = builder.fmul(codes[0], xs[0])
                    for code, each in zip(codes[1:], xs[1:], strict=True):
                        product = fused_multiply_add(builder, code, each, product)
                    total = fused_multiply_add(builder, part.scale, product, builder.load(totals[row]))
                    builder.store(total, totals[row])
                    if part.least is not None:
                        at = builder.add(builder.mul(part_number, number(4)), builder.mul(sums_bytes, number(row)))
                        sum_of_x, before = load_at(builder, F32, builder.add(sums, at)), builder.load(leasts[row])
                        builder.store(fused_multiply_add(builder, part.least, sum_of_x, before), leasts[row])

            _in_blocks(builder, kind, stored, count, use)
            for row in range(rows):
                total = reduce_lanes(builder, builder.load(totals[row]), builder.fadd)
                result = builder.fadd(total, builder.load(leasts[row]))
                store_at(builder, result, builder.add(out, builder.mul(stride, number(row))))
            return target.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return multiply


# numba looks functions up by name
_dot, _dots = _dots_of(1), _dots_of(_TILE)


@intrinsic
def _move(_context: Any, kind: Any, source: Any, out: Any) -> Any:
    """Write the values of a part in code order and return their sum."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind, source, out = arguments
        values = load_at(builder, ir.VectorType(F32, _PART), source)
        for kind_number, name in enumerate(_KINDS):
            mask = ir.Constant(ir.VectorType(I32, _PART), _order(name))
            with builder.if_then(builder.icmp_signed("==", kind, number(kind_number))):
                store_at(builder, builder.shuffle_vector(values, values, mask), out)
        return reduce_lanes(builder, values, builder.fadd)

    return types.float32(types.int64, types.int64, types.int64), generate


def _dequantize(
    kind: int, stored: int, row_bytes: int, count: int, out: int, out_bytes: int, first: int, stop: int
) -> None:
    for row in range(first, stop):
        _write(kind, stored + row * row_bytes, count, out + row * out_bytes)


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
    stride, parts = 4 * outputs, x_bytes // (4 * _PART)
    summed, moved = np.empty(rows * parts, np.float32), np.empty(rows * parts * _PART, np.float32)
    sums, sums_bytes, ordered = summed.ctypes.data, 4 * parts, moved.ctypes.data
    for part in range(rows * parts):
        at = part * 4 * _PART
        summed[part] = _move(kind, x + at, ordered + at)
    for output in range(first, stop):
        at, row = stored + output * row_bytes, 0
        while row < rows:
            xs, ss, to = ordered + row * x_bytes, sums + row * sums_bytes, out + row * stride + 4 * output
            if row + _TILE <= rows:
                _dots(kind, at, count, xs, x_bytes, ss, sums_bytes, to, stride)
                row += _TILE
            else:
                _dot(kind, at, count, xs, x_bytes, ss, sums_bytes, to, stride)
                row += 1


@functools.cache
def _compiled(function: Callable[..., None]) -> Any:
    dispatcher = njit(nogil=True, error_model="numpy")(function)
    keep_on_disk(dispatcher)
    dispatcher.compile(types.void(*[types.int64] * function.__code__.co_argcount))
    dispatcher.disable_compile()
    return dispatcher


def dequantize(stored: torch.Tensor, kind: str, columns: int) -> torch.Tensor:
    """Dequantize rows to float32.

    Args:
        stored: uint8 [rows, bytes of a row's blocks].
        kind: the format.
        columns: the number of values per row.
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
    """Compute ``x @ weight.T + bias`` with a weight stored in blocks.

    Args:
        x: [rows, inputs].
        stored: contiguous uint8 [outputs, bytes of a row's blocks].
        kind: the format.
        bias: [outputs].

    Returns:
        [rows, outputs], in the dtype of x.
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
