"""Compiled attention of CPU ranks over a paged cache: rotation into the cache, and decoding with one query a sequence.

Caches are float32 [slots, key-value heads, head_dim]; a slot is ``block * block_size + offset in the block``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit, types

from shotcast.device.cpu.compilation import keep_on_disk
from shotcast.device.cpu.threads import in_parallel

_THREADS_FROM = 4 << 20
"""The number of products of queries with keys from which a second thread saves more time than waking it costs."""

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
    head_dim = queries.shape[2]
    longest = 0
    for sequence in range(first, stop):
        longest = max(longest, lengths[sequence])
    scores = np.empty(longest, np.float32)
    for sequence in range(first, stop):
        length, table = lengths[sequence], tables[rows[sequence]]
        begin = max(0, length - window) if window > 0 else 0
        for head in range(queries.shape[1]):
            query, kv = queries[sequence, head], kv_head_of[head]
            largest = np.float32(-np.inf)
            for position in range(begin, length):
                slot = table[position // block_size] * block_size + position % block_size
                key = keys[slot, kv]
                score = np.float32(0.0)
                for i in range(head_dim):
                    score += query[i] * key[i]
                score *= scale
                if cap > 0:
                    score = np.float32(cap * math.tanh(score / cap))
                scores[position] = score
                largest = max(largest, score)
            total = np.float32(0.0)
            for position in range(begin, length):
                weight = np.float32(math.exp(scores[position] - largest))
                scores[position] = weight
                total += weight
            target = out[sequence, head]
            for i in range(head_dim):
                target[i] = np.float32(0.0)
            for position in range(begin, length):
                slot = table[position // block_size] * block_size + position % block_size
                weight = scores[position] / total
                value = values[slot, kv]
                for i in range(head_dim):
                    target[i] += weight * value[i]


_SIGNATURES: dict[Callable[..., None], Any] = {
    _rotate: types.void(_MATRIX, _MATRIX, _MATRIX, _LONGS, _LONGS, types.int64, _CUBE, _CUBE, _CUBE),
    _decode: types.void(
        _CUBE,
        _CUBE,
        _CUBE,
        _TABLES,
        _LONGS,
        _INTS,
        _LONGS,
        types.int64,
        types.float32,
        types.float32,
        types.int64,
        types.int64,
        types.int64,
        _CUBE,
    ),
}


@functools.cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    # "contract" and "reassoc" allow dot products to be vectorised; NaN and infinity keep their meaning
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
    _compiled(_rotate)(
        x.numpy(),
        cosines.numpy(),
        sines.numpy(),
        positions.numpy(),
        slots.numpy(),
        queries.shape[1],
        keys.numpy(),
        values.numpy(),
        queries.numpy(),
    )


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
    """Attend with one query a sequence to the sequence's blocks.

    Sequences are divided among as many threads as PyTorch has.

    Args:
        queries, out: float32 [sequences, heads, head_dim].
        tables: int32 [rows, blocks].
        rows: int64 [sequences], the row of the tables of each sequence.
        lengths: int32 [sequences], the number of tokens of each in the cache.
        kv_head_of: int64 [heads], the key-value head of each query head.
        window: the number of tokens that a query sees, its own included; 0 for all.
        scale: the factor of scores; None for ``head_dim ** -0.5``.
        cap: scores x become ``cap * tanh(x / cap)``; 0 for as they are.
    """
    arrays = [argument.numpy() for argument in (queries, keys, values, tables, rows, lengths, kv_head_of)]
    scale = queries.shape[2] ** -0.5 if scale is None else scale
    run, result = _compiled(_decode), out.numpy()
    parts = None if queries[0].numel() * int(lengths.sum()) >= _THREADS_FROM else 1

    def attend(first: int, stop: int) -> None:
        run(*arrays, block_size, scale, cap, window, first, stop, result)

    in_parallel(attend, queries.shape[0], parts)
