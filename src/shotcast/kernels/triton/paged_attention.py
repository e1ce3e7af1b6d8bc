"""Attention with one query per sequence over a paged cache, for decoding.

The run time is the time to read keys and values once. The kernel also normalizes and rotates queries and keys. The
context of every (sequence, key-value head) is divided into ``splits`` parts. A program reads one part in tiles, for all
query heads of the group, so even a single long sequence uses the whole GPU. If there are several parts, a second kernel
merges them (Flash-Decoding, Dao et al., 2023). Lengths and tables are read on the device, so a captured graph works for
any contents; parts without tokens give zeros.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from shotcast.device.triton.float8 import from_e4m3
from shotcast.device.triton.intrinsics import (
    await_prior_kernel,
    dot,
    is_hopper,
    launch_options,
    release_next_kernel,
    shared_memory_per_sm,
)
from shotcast.device.triton.words import round_float
from shotcast.kernels.triton import gemv
from shotcast.kernels.triton.activations import tanh
from shotcast.kernels.triton.rope import (
    CacheScales,
    Rotation,
    as_stored,
    from_cache,
    load_halves,
    norm_and_rotate,
    quantize_halves,
    stored,
)

WIDE_TILE, TILE, SMALL_TILE = 128, 64, 32
"""Keys that a program multiplies at a time; :meth:`PagedDecoding.tiles` chooses between them."""
_FEW_SPLITS, _MANY_SPLITS = 2, 16
LEAST_TILE = 16
_LEAST_GROUP = 16
"""The smallest number of rows that ``tl.dot`` accepts."""
_RESERVED_BYTES = 1 << 10
"""Shared memory per program that the driver reserves."""
WARPS = 4
WIDE_STAGES, STAGES, FEW_STAGES = 4, 5, 2
"""Pipeline stages. Of five, two load the block table entries that locate keys and values, the next two load keys and
values, and the last multiplies. With wide tiles, one of four loads as many."""


def tile_and_stages(head_dim: int, itemsize: int, memory: int) -> tuple[int, int]:
    """Choose the keys per tile and the stages that fit in ``memory`` bytes of shared memory.

    Two tiles of keys and values must fit, and must also fit in the layout that tensor cores require.
    """
    each = _tile_bytes(head_dim, itemsize)
    tile = TILE
    while tile > LEAST_TILE and tile * each > memory:
        tile //= 2
    return tile, STAGES if tile * each <= memory else FEW_STAGES


def _tile_bytes(head_dim: int, itemsize: int) -> int:
    """Compute the shared memory of one key and one value of each of two tiles."""
    return 2 * triton.next_power_of_2(head_dim) * itemsize * (4 if itemsize == 4 else 3)


class Sequences(NamedTuple):
    """The block tables, int32 [rows, blocks], and the table row and length in tokens of each sequence."""

    tables: Any
    rows: Any
    lengths: Any
    blocks: Any


class Scoring(NamedTuple):
    """Parameters of scores: ``scale`` times query-key products, or times ``tanh(squash * product)`` if ``squash`` is
    given.

    A query sees the last ``window`` keys, including its own; 0 for all.
    """

    scale: Any
    window: Any
    squash: Any


class Parts(NamedTuple):
    """The results of parts of contexts.

    ``sums`` is float32 [sequences, heads, splits, head_dim]: sums of values weighted relative to the largest score.
    ``stats`` is [..., 2]: that score and the sum of the weights.
    """

    sums: Any
    stats: Any


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The SHAPE argument of :func:`decode_kernel`.

    HALF_TILE: HALF rounded up to a power of two. GROUP: rows for the query heads of a key-value head. FIRST_TILE, TILE,
    STAGES: see :meth:`PagedDecoding.tiles`.
    """

    HEADS: int
    KV_HEADS: int
    HALF: int
    HALF_TILE: int
    GROUP: int
    BLOCK_SIZE: int
    SPLITS: int
    FIRST_TILE: int
    TILE: int
    STAGES: int
    PDL: bool


@triton.jit
def cache_slots(table, positions, valid, BLOCK_SIZE: tl.constexpr):
    """Look up the cache slots of positions of a sequence."""
    block = tl.load(table + positions // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
    return block * BLOCK_SIZE + positions % BLOCK_SIZE


@triton.jit
def load_kv(cache, table, kv, tile, stop, SHAPE: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr):
    """Load the halves of keys and of values at positions ``tile`` to ``tile + TILE``, without scales; 0 from ``stop``
    on."""
    position = tile + tl.arange(0, TILE)
    valid = position < stop
    row = (cache_slots(table, position, valid, SHAPE.BLOCK_SIZE) * SHAPE.KV_HEADS + kv)[:, None]
    i = tl.arange(0, SHAPE.HALF_TILE)[None, :]
    mask = valid[:, None] & (i < SHAPE.HALF)
    keys, values, _, _ = cache
    first, second = load_halves(keys, row, i, mask, SHAPE.HALF)
    low, high = load_halves(values, row, i, mask, SHAPE.HALF)
    return from_cache(first, DTYPE), from_cache(second, DTYPE), from_cache(low, DTYPE), from_cache(high, DTYPE)


@triton.jit
def load_scales(cache, table, kv, tile, stop, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Load the scales of keys and of values at positions ``tile`` to ``tile + TILE``, 0 from ``stop`` on; None without
    scales."""
    scales = None
    if cache.key_scales is not None:
        position = tile + tl.arange(0, TILE)
        valid = position < stop
        row = cache_slots(table, position, valid, SHAPE.BLOCK_SIZE) * SHAPE.KV_HEADS + kv
        of_keys = tl.load(cache.key_scales + row, mask=valid, other=0.0)
        scales = of_keys, tl.load(cache.value_scales + row, mask=valid, other=0.0)
    return scales


@triton.jit
def squashed(products, squash):
    """Compute ``tanh(squash * products)``, or return the products unchanged if ``squash`` is None."""
    if squash is not None:
        products = tanh(products * squash)
    return products


@triton.jit
def attend(query, kv_tile, scales, tile, stop, scoring, softmax, TILE: tl.constexpr, DTYPE: tl.constexpr):
    """Add TILE keys and values to a running softmax: largest scores, sums of weights and halves of weighted values.

    ``query`` holds the halves of the queries. ``scales`` are the scales of keys and values, or None.
    """
    q1, q2 = query
    k1, k2, v1, v2 = kv_tile
    largest, total, low, high = softmax
    products = dot(q1, tl.trans(k1)) + dot(q2, tl.trans(k2))
    if scales is not None:
        products = products * scales[0][None, :]
    scores = squashed(products, scoring.squash) * scoring.scale
    scores = tl.where((tile + tl.arange(0, TILE) < stop)[None, :], scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    weight = tl.exp(scores - new_largest[:, None])
    rescale = tl.exp(largest - new_largest)
    total = total * rescale + tl.sum(weight, axis=1)
    if scales is not None:
        weight = weight * scales[1][None, :]
    weight = weight.to(DTYPE)
    low = low * rescale[:, None] + dot(weight, v1)
    high = high * rescale[:, None] + dot(weight, v2)
    return new_largest, total, low, high


@triton.jit
def store_quantized(cache, scales, offset, index, a, b, mask, HALF: tl.constexpr):
    """Quantize one head, given by its halves [1, HALF_TILE], and store it; return the stored values in float32."""
    low_byte, high_byte, scale = quantize_halves(a, b)
    tl.store(cache + offset, as_stored(low_byte, cache), mask=mask)
    tl.store(cache + offset + HALF, as_stored(high_byte, cache), mask=mask)
    tl.store(scales + index, scale)
    return from_e4m3(low_byte) * scale, from_e4m3(high_byte) * scale


@triton.jit
def decode_kernel(x, rotation, cache, sequences, first_heads, parts, result, scoring, SHAPE: tl.constexpr):
    """Program (sequence, key-value head, split): attend to one part of the context.

    The arguments are :class:`~shotcast.kernels.triton.rope.Rotation`, :class:`~shotcast.kernels.triton.rope.Cache`,
    :class:`Sequences`, :class:`Parts`, :class:`Scoring` and :class:`DecodeShape`. With a single split, the output goes
    to ``result``, [sequences, heads, head_dim].

    Everything but ``x`` is complete before the previous kernel ends, so the first keys and values are loaded before
    waiting for it. The new key and value come from ``x``; the first split writes them to the cache and attends to them.
    """
    HEADS: tl.constexpr = SHAPE.HEADS
    KV_HEADS: tl.constexpr = SHAPE.KV_HEADS
    HALF: tl.constexpr = SHAPE.HALF
    HALF_TILE: tl.constexpr = SHAPE.HALF_TILE
    GROUP: tl.constexpr = SHAPE.GROUP
    SPLITS: tl.constexpr = SHAPE.SPLITS
    FIRST_TILE: tl.constexpr = SHAPE.FIRST_TILE
    TILE: tl.constexpr = SHAPE.TILE
    norms, cosines, sines, eps = rotation
    keys, values, key_scales, value_scales = cache
    release_next_kernel(SHAPE.PDL)
    DTYPE: tl.constexpr = x.dtype.element_ty
    sequence = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    i = tl.arange(0, HALF_TILE)[None, :]
    in_half = i < HALF
    first_head = tl.load(first_heads + kv)
    head = first_head + tl.arange(0, GROUP)[:, None]
    own = head < tl.load(first_heads + kv + 1)
    last = tl.load(sequences.lengths + sequence) - 1
    table = sequences.tables + tl.load(sequences.rows + sequence).to(tl.int64) * sequences.blocks
    begin = tl.maximum(last + 1 - scoring.window, 0) if scoring.window > 0 else 0
    each = ((last - begin + SPLITS - 1) // SPLITS + FIRST_TILE - 1) // FIRST_TILE * FIRST_TILE
    start = begin + split * each
    stop = tl.minimum(start + each, last)
    first_kv = load_kv(cache, table, kv, start, stop, SHAPE, FIRST_TILE, DTYPE)
    first_scales = load_scales(cache, table, kv, start, stop, SHAPE, FIRST_TILE)
    cosine = tl.load(cosines + last * HALF + i, mask=in_half)
    sine = tl.load(sines + last * HALF + i, mask=in_half)
    await_prior_kernel(SHAPE.PDL)
    token = x + sequence * ((HEADS + 2 * KV_HEADS) * 2 * HALF)
    q1, q2 = load_halves(token, head, i, own & in_half, HALF)
    gains = None if norms is None else load_halves(norms, head, i, own & in_half, HALF)
    q1, q2 = norm_and_rotate(q1, q2, gains, cosine, sine, eps, GROUP, HALF, DTYPE)
    largest = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    low = tl.zeros([GROUP, HALF_TILE], tl.float32)
    high = tl.zeros([GROUP, HALF_TILE], tl.float32)
    if split == 0:
        index = tl.zeros([1, 1], tl.int32) + HEADS + kv
        new1, new2 = load_halves(token, index, i, in_half, HALF)
        new_gains = None if norms is None else load_halves(norms, index, i, in_half, HALF)
        new1, new2 = norm_and_rotate(new1, new2, new_gains, cosine, sine, eps, 1, HALF, DTYPE)
        new_low, new_high = load_halves(token, index + KV_HEADS, i, in_half, HALF)
        of_head = cache_slots(table, last, last >= 0, SHAPE.BLOCK_SIZE) * KV_HEADS + kv
        offset = of_head * (2 * HALF) + i
        if key_scales is None:
            tl.store(keys + offset, new1, mask=in_half)
            tl.store(keys + offset + HALF, new2, mask=in_half)
            tl.store(values + offset, new_low, mask=in_half)
            tl.store(values + offset + HALF, new_high, mask=in_half)
        else:  # attend to the values that later tokens read
            index = of_head + tl.zeros([1, 1], tl.int32)
            new1, new2 = store_quantized(keys, key_scales, offset, index, new1, new2, in_half, HALF)
            new_low, new_high = store_quantized(values, value_scales, offset, index, new_low, new_high, in_half, HALF)
        products = q1.to(tl.float32) * new1.to(tl.float32) + q2.to(tl.float32) * new2.to(tl.float32)
        largest = squashed(tl.sum(products, axis=1), scoring.squash) * scoring.scale
        total = total + 1.0
        low = low + new_low.to(tl.float32)
        high = high + new_high.to(tl.float32)
    if start + FIRST_TILE < stop:  # otherwise skip even the loop's first loads, which would wait for nothing
        for tile in tl.range(start + FIRST_TILE, stop, TILE, num_stages=SHAPE.STAGES):
            kv_tile = load_kv(cache, table, kv, tile, stop, SHAPE, TILE, DTYPE)
            scales = load_scales(cache, table, kv, tile, stop, SHAPE, TILE)
            largest, total, low, high = attend(
                (q1, q2), kv_tile, scales, tile, stop, scoring, (largest, total, low, high), TILE, DTYPE
            )
    if start < stop:
        largest, total, low, high = attend(
            (q1, q2), first_kv, first_scales, start, stop, scoring, (largest, total, low, high), FIRST_TILE, DTYPE
        )
    index = (sequence * HEADS + head) * SPLITS + split
    address = index * (2 * HALF) + i
    if SPLITS == 1:
        rescale = 1.0 / total[:, None]
        tl.store(result + address, round_float(low * rescale, DTYPE), mask=own & in_half)
        tl.store(result + address + HALF, round_float(high * rescale, DTYPE), mask=own & in_half)
    else:  # zeros for a part without tokens, which is also merged
        tl.store(parts.sums + address, low, mask=own & in_half)
        tl.store(parts.sums + address + HALF, high, mask=own & in_half)
        tl.store(parts.stats + index * 2, largest[:, None], mask=own)
        tl.store(parts.stats + index * 2 + 1, total[:, None], mask=own)


@triton.jit
def merge_kernel(
    partial_out,
    partial_stats,
    out,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (sequence * heads): merge the parts of one head."""
    release_next_kernel(PDL)
    await_prior_kernel(PDL)
    index = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, WIDTH)
    address = (index * SPLITS + s[:, None]) * HEAD_DIM + d[None, :]
    part = tl.load(partial_out + address, mask=(d < HEAD_DIM)[None, :], other=0.0)
    largest = tl.load(partial_stats + (index * SPLITS + s) * 2)
    total = tl.load(partial_stats + (index * SPLITS + s) * 2 + 1)
    rescale = tl.where(total > 0, tl.exp(largest - tl.max(largest, axis=0)), 0.0)
    merged = tl.sum(part * rescale[:, None], axis=0) / tl.sum(total * rescale, axis=0)
    tl.store(out + index * HEAD_DIM + d, round_float(merged, out.dtype.element_ty), mask=d < HEAD_DIM)


class PagedDecoding:
    """Attention with one query per sequence, for one layer shape. It owns the scratch memory that connects its kernels.

    ``kv_head_of`` maps each query head to its key-value head, in ascending order.
    """

    def __init__(
        self, heads: int, head_dim: int, kv_head_of: tuple[int, ...], sequences: int, num_sms: int, device: torch.device
    ):
        self._heads, self._head_dim, self._kv_heads = heads, head_dim, max(kv_head_of) + 1
        starts = [kv_head_of.index(kv) for kv in range(self._kv_heads)] + [heads]
        self._first_heads = torch.tensor(starts, dtype=torch.int32, device=device)
        largest = max(stop - start for start, stop in itertools.pairwise(starts))
        self._group = max(_LEAST_GROUP, triton.next_power_of_2(largest))
        self._num_sms = num_sms
        room = max(count * self.splits(count) for count in range(1, sequences + 1)) * heads
        self._parts = Parts(torch.empty(room * head_dim, device=device), torch.empty(room * 2, device=device))

    def splits(self, sequences: int) -> int:
        """Choose the number of parts per context, a power of two, for about two programs per SM."""
        wanted = max(1, 2 * self._num_sms // (sequences * self._kv_heads))
        return min(64, 1 << (wanted.bit_length() - 1))

    def tiles(self, sequences: int, dtype: torch.dtype, memory_bytes: int, allow_wide: bool) -> tuple[int, int, int]:
        """Choose the keys that a program loads first, the keys per tile after them, and the stages.

        If a context has many parts, the first keys are few, so that a short context is divided among more programs. The
        other tiles are then small too, and also for as many sequences as ``gemv.py`` serves. Weights of ``gemv.py`` are
        loaded through the L1 cache, which gets the memory that shared memory leaves. When attention took all the shared
        memory it could use, steps slowed down by more than small tiles slow down long contexts
        (docs/design/decode_step.md). Wide tiles are for contexts in few parts, if an SM has room for two programs: they
        load as many keys ahead in fewer, larger steps. With larger groups of heads, registers cannot hold them.
        """
        tile, stages = tile_and_stages(self._head_dim, dtype.itemsize, memory_bytes)
        splits = self.splits(sequences)
        many = splits > _MANY_SPLITS
        if dtype in gemv.DTYPES and (many or sequences <= gemv.MAX_ROWS):
            tile = min(tile, SMALL_TILE)
        elif (
            allow_wide
            and splits <= _FEW_SPLITS
            and self._group <= _LEAST_GROUP
            and WIDE_TILE * _tile_bytes(self._head_dim, dtype.itemsize) <= memory_bytes
        ):
            return TILE, WIDE_TILE, WIDE_STAGES
        return min(tile, SMALL_TILE if many else TILE), tile, stages

    def __call__(
        self,
        x: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        block_size: int,
        window: int,
        out: torch.Tensor,
        norms: torch.Tensor | None = None,
        eps: float = 0.0,
        scale: float | None = None,
        cap: float = 0.0,
        scales: CacheScales = None,
    ) -> None:
        """Rotate these tokens with :func:`~shotcast.kernels.triton.rope.rotate_into_cache`, then attend as
        :func:`shotcast.kernels.cpu.attention.decode` does.

        Everything but ``x`` must be complete before kernels that may still be running when this one starts.

        Args:
            x: [sequences, (heads + 2 kv heads) * head_dim]; caches and ``out`` have its dtype.
            scales: float32 [slots, kv heads], of keys and of values, if the caches are float8_e4m3fn.
        """
        sequences = x.shape[0]
        splits, half = self.splits(sequences), self._head_dim // 2
        scale = self._head_dim**-0.5 if scale is None else scale
        options = launch_options(x.device, WARPS)
        pdl = options["launch_pdl"]
        first, tile, stages = self.tiles(
            sequences, x.dtype, shared_memory_per_sm(x.device) - _RESERVED_BYTES, is_hopper(x.device)
        )
        half_tile = max(16, triton.next_power_of_2(half))
        sides = self._heads, self._kv_heads, half, half_tile, self._group, block_size
        decode_kernel[(sequences, self._kv_heads, splits)](
            x,
            Rotation(norms, cosines, sines, eps),
            stored(keys, values, scales),
            Sequences(tables, rows, lengths, tables.shape[1]),
            self._first_heads,
            self._parts,
            out,
            Scoring(cap or scale, window, scale / cap if cap else None),
            DecodeShape(*sides, splits, first, tile, stages, pdl),
            **options,
        )
        if splits > 1:
            width = triton.next_power_of_2(self._head_dim)
            merge_kernel[(sequences * self._heads,)](*self._parts, out, self._head_dim, width, splits, pdl, **options)
