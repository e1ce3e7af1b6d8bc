"""Compiled attention for CPU ranks over a paged cache: rotation into the cache, and decoding of one query per sequence.

Caches are float32 [slots, key-value heads, head_dim]; a slot is ``block * block_size + offset in the block``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from shotcast.device.cpu.compilation import keep_on_disk
from shotcast.device.cpu.floats import F32, splat
from shotcast.device.cpu.threads import in_parallel
from shotcast.device.cpu.vectors import broadcast_lanes, fused_multiply_add, load_at, number, reduce_lanes, store_at

_THREADS_FROM = 1 << 21
"""The smallest number of query-key products for which a second thread saves more time than waking it costs."""

_MATRIX = types.Array(types.float32, 2, "C")
_CUBE = types.Array(types.float32, 3, "C")
_LONGS = types.Array(types.int64, 1, "C")
_TABLES = types.Array(types.int32, 2, "C")
_INTS = types.Array(types.int32, 1, "C")


def _rotate(
    x: Any, cosines: Any, sines: Any, positions: Any, slots: Any, heads: int, keys: Any, values: Any, queries: Any
) -> None:
    tokens, kv_heads, head_dim = x.shape[0], keys.shape[1], keys.shape[2]
    half = head_dim // 2
    for token in range(tokens):
        cosine, sine = cosines[positions[token]], sines[positions[token]]
        slot = slots[token]
        row = x[token]
        for head in range(heads + kv_heads):
            source = row[head * head_dim : (head + 1) * head_dim]
            target = queries[token, head] if head < heads else keys[slot, head - heads]
            for i in range(half):
                target[i] = source[i] * cosine[i] - source[half + i] * sine[i]
            for i in range(half):
                target[half + i] = source[half + i] * cosine[i] + source[i] * sine[i]
        for head in range(kv_heads):
            begin = (heads + kv_heads + head) * head_dim
            for i in range(head_dim):
                values[slot, head, i] = row[begin + i]


def _dots_of(lanes: int) -> Any:
    """Build a function that multiplies a query by consecutive keys, ``lanes`` numbers at a time.

    Its arguments are the addresses of the query, the first key and the first score; the bytes between keys; the number
    of keys; and the head size, a multiple of ``lanes``.
    """
    vector = F32 if lanes == 1 else ir.VectorType(F32, lanes)

    @intrinsic
    def multiply(_context: Any, query: Any, key: Any, out: Any, stride: Any, count: Any, size: Any) -> Any:
        def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            query, key, out, stride, count, size = arguments
            total = cgutils.alloca_once(builder, vector)
            with cgutils.for_range(builder, count) as each:
                at = builder.add(key, builder.mul(each.index, stride))
                builder.store(splat(F32, lanes, 0.0), total)
                with cgutils.for_range(builder, builder.udiv(size, number(lanes))) as part:
                    offset = builder.mul(part.index, number(4 * lanes))
                    xs, ys = (load_at(builder, vector, builder.add(base, offset)) for base in (query, at))
                    builder.store(fused_multiply_add(builder, xs, ys, builder.load(total)), total)
                score = builder.load(total)
                if lanes > 1:
                    score = reduce_lanes(builder, score, builder.fadd)
                store_at(builder, score, builder.add(out, builder.mul(each.index, number(4))))
            return target.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return multiply


def _sums_of(lanes: int) -> Any:
    """Build a function that adds consecutive values, each times its weight, to ``out``.

    Its arguments are the addresses of the first weight, the first value and ``out``; the bytes between values; the
    number of values; and the head size, a multiple of ``lanes``.
    """
    vector = F32 if lanes == 1 else ir.VectorType(F32, lanes)

    @intrinsic
    def add(_context: Any, weight: Any, value: Any, out: Any, stride: Any, count: Any, size: Any) -> Any:
        def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            weight, value, out, stride, count, size = arguments
            total = cgutils.alloca_once(builder, vector)
            with cgutils.for_range(builder, builder.udiv(size, number(lanes))) as part:
                offset = builder.mul(part.index, number(4 * lanes))
                to = builder.add(out, offset)
                builder.store(load_at(builder, vector, to), total)
                with cgutils.for_range(builder, count) as each:
                    at = builder.add(builder.add(value, offset), builder.mul(each.index, stride))
                    factor = load_at(builder, F32, builder.add(weight, builder.mul(each.index, number(4))))
                    factors, values = broadcast_lanes(builder, factor, lanes), load_at(builder, vector, at)
                    builder.store(fused_multiply_add(builder, factors, values, builder.load(total)), total)
                store_at(builder, builder.load(total), to)
            return target.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return add


# numba looks functions up by name
_dots_64, _dots_16, _dots_1 = (_dots_of(lanes) for lanes in (64, 16, 1))
_sums_64, _sums_16, _sums_1 = (_sums_of(lanes) for lanes in (64, 16, 1))


@njit(inline="always")
def _softmax(scores: Any, scale: Any, cap: Any) -> None:
    """Replace scores with their softmax weights, which sum to 1.

    It is inlined. Otherwise a process that compiles would use a separately compiled copy of this function, and a
    process that loads machine code would use the copy compiled there, which may add in a different order.
    """
    largest = np.float32(-np.inf)
    for i in range(scores.shape[0]):
        scores[i] *= scale
        if cap > 0:
            scores[i] = np.float32(cap * math.tanh(scores[i] / cap))
        largest = max(largest, scores[i])
    total = np.float32(0.0)
    for i in range(scores.shape[0]):
        # exp(x) = 2^n exp(r), where |r| <= ln(2) / 2
        x = max(scores[i] - largest, np.float32(-87.0))
        n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
        r = x - n * np.float32(0.693147181)
        e = np.float32(1.3888889e-3) * r + np.float32(8.3333333e-3)
        e = e * r + np.float32(4.1666667e-2)
        e = e * r + np.float32(1.6666667e-1)
        e = e * r + np.float32(0.5)
        e = e * r + np.float32(1.0)
        e = e * r + np.float32(1.0)
        scores[i] = e * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
        total += scores[i]
    for i in range(scores.shape[0]):
        scores[i] /= total


def _decode(
    queries: Any,
    keys: Any,
    values: Any,
    tables: Any,
    rows: Any,
    lengths: Any,
    kv_head_of: Any,
    block_size: int,
    scale: float,
    cap: float,
    window: int,
    first: int,
    stop: int,
    out: Any,
) -> None:
    heads, size = queries.shape[1], queries.shape[2]
    stride = 4 * keys.shape[1] * size
    longest = 0
    for unit in range(first, stop):
        longest = max(longest, lengths[unit // heads])
    scores = np.empty((min(heads, stop - first), longest), np.float32)
    unit = first
    while unit < stop:
        sequence, head = unit // heads, unit % heads
        group = min(heads - head, stop - unit)  # heads of the sequence, which share one read of each block
        length, table = lengths[sequence], tables[rows[sequence]]
        begin = max(0, length - window) if window > 0 else 0
        query, target = queries[sequence, head].ctypes.data, out[sequence, head].ctypes.data
        position = begin
        while position < length:  # positions within a block are consecutive
            count = min(length - position, block_size - position % block_size)
            slot = table[position // block_size] * block_size + position % block_size
            for each in range(group):
                key = keys.ctypes.data + slot * stride + 4 * size * kv_head_of[head + each]
                to, x = scores[each].ctypes.data + 4 * position, query + 4 * size * each
                if size % 64 == 0:
                    _dots_64(x, key, to, stride, count, size)
                elif size % 16 == 0:
                    _dots_16(x, key, to, stride, count, size)
                else:
                    _dots_1(x, key, to, stride, count, size)
            position += count
        for each in range(group):
            _softmax(scores[each, begin:length], scale, cap)
            for i in range(size):
                out[sequence, head + each, i] = np.float32(0.0)
        position = begin
        while position < length:
            count = min(length - position, block_size - position % block_size)
            slot = table[position // block_size] * block_size + position % block_size
            for each in range(group):
                value = values.ctypes.data + slot * stride + 4 * size * kv_head_of[head + each]
                weight, to = scores[each].ctypes.data + 4 * position, target + 4 * size * each
                if size % 64 == 0:
                    _sums_64(weight, value, to, stride, count, size)
                elif size % 16 == 0:
                    _sums_16(weight, value, to, stride, count, size)
                else:
                    _sums_1(weight, value, to, stride, count, size)
            position += count
        unit += group


_SIGNATURES: dict[Callable[..., None], Any] = {
    _rotate: types.void(_MATRIX, _MATRIX, _MATRIX, _LONGS, _LONGS, types.int64, _CUBE, _CUBE, _CUBE),
    _decode: types.void(
        *(_CUBE, _CUBE, _CUBE, _TABLES, _LONGS, _INTS, _LONGS, types.int64, types.float32, types.float32),
        *(types.int64, types.int64, types.int64, _CUBE),
    ),
}


@functools.cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    # "contract" and "reassoc" let the compiler vectorize dot products; NaN and infinity keep their meaning
    dispatcher = njit(nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})(function)
    keep_on_disk(dispatcher)
    dispatcher.compile(_SIGNATURES[function])
    dispatcher.disable_compile()
    return dispatcher


def rotate_into_cache(
    x: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: torch.Tensor,
) -> None:
    """Rotate queries and keys by their positions, and write keys and values to the cache.

    Args:
        x: float32 [tokens, (heads + 2 * kv heads) * head_dim]: queries, keys, values.
        cosines, sines: float32 [positions, head_dim / 2].
        positions, slots: int64 [tokens].
        queries: float32 [tokens, heads, head_dim], the output.
    """
    given = [tensor.numpy() for tensor in (x, cosines, sines, positions, slots)]
    _compiled(_rotate)(*given, queries.shape[1], keys.numpy(), values.numpy(), queries.numpy())


def decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    kv_head_of: torch.Tensor,
    block_size: int,
    window: int,
    out: torch.Tensor,
    scale: float | None = None,
    cap: float = 0.0,
) -> None:
    """Attend with one query per sequence to the sequence's blocks.

    The heads of all sequences are divided among as many threads as PyTorch has.

    Args:
        queries, out: float32 [sequences, heads, head_dim].
        tables: int32 [rows, blocks].
        rows: int64 [sequences], the table row of each sequence.
        lengths: int32 [sequences], the number of cached tokens of each sequence.
        kv_head_of: int64 [heads], the key-value head of each query head.
        window: the number of tokens that a query sees, including its own; 0 for all.
        scale: the factor of scores; None for ``head_dim ** -0.5``.
        cap: the soft cap; scores x become ``cap * tanh(x / cap)``, or stay unchanged if it is 0.
    """
    arrays = [argument.numpy() for argument in (queries, keys, values, tables, rows, lengths, kv_head_of)]
    scale = queries.shape[2] ** -0.5 if scale is None else scale
    run, result = _compiled(_decode), out.numpy()
    parts = None if queries[0].numel() * int(lengths.sum()) >= _THREADS_FROM else 1

    def attend(first: int, stop: int) -> None:
        run(*arrays, block_size, scale, cap, window, first, stop, result)

    in_parallel(attend, queries.shape[0] * queries.shape[1], parts)
