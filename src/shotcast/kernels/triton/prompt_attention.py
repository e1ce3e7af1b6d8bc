"""Attention with several queries per sequence over a paged cache, for steps with prompts.

Queries are concatenated sequence by sequence. The queries of a sequence are at its last positions, and their keys and
values are already in the cache. They are divided into tiles, and a program processes one tile and one key-value head:
its rows are the (token, head) pairs of the query heads of this key-value head, so that one read of the cache serves
them all. Softmax is computed online, key tile by key tile (FlashAttention-2, Dao, 2023). The start of each tile and the
keys it attends to are read on the device, so a captured graph works for any sequences, as long as there is room for
their tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import (
    INTERPRETED,
    await_prior_kernel,
    dot,
    is_hopper,
    launch_options,
    release_next_kernel,
)
from shotcast.device.triton.words import round_float
from shotcast.kernels.step_fields import TILE_FIELDS
from shotcast.kernels.triton import hopper_prompt_attention
from shotcast.kernels.triton.paged_attention import Scoring, squashed
from shotcast.kernels.triton.rope import CacheScales, from_cache, stored

ROWS, FEW_ROWS, FLOAT32_ROWS = 128, 64, 16
"""Rows per program: by default; if the default would leave SMs idle or wide heads would not fit into registers; and in
float32, whose products use registers only."""
KEYS, NARROW_KEYS, WIDE_KEYS, FLOAT32_KEYS = 64, 128, 32, 16
"""Keys that a program multiplies at a time: by default; for few rows of heads up to _NARROW; for heads wider than
_WIDE; in float32."""
_NARROW, _WIDE = 64, 128
STAGES, FEW_STAGES = 3, 2
"""Tiles of keys and values in shared memory: by default; for narrow and wide heads."""
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class PromptShape:
    """The SHAPE argument of :func:`prompt_kernel`.

    GROUP: query heads of a key-value head. ROWS, SHORT_ROWS: (token, head) pairs of a program, for tiles of many and of
    few tokens. WIDTH: HEAD_DIM rounded up to a power of two. KEYS: keys at a time. WINDOWED: queries do not see all
    keys.
    """

    HEADS: int
    KV_HEADS: int
    HEAD_DIM: int
    GROUP: int
    ROWS: int
    SHORT_ROWS: int
    WIDTH: int
    BLOCK_SIZE: int
    KEYS: int
    STAGES: int
    WINDOWED: bool
    TILE_FIELDS: int
    PDL: bool


@triton.jit
def _attend_keys(
    query, position, softmax, cache, table, kv, bounds, scoring, SHAPE: tl.constexpr, CAUSAL: tl.constexpr
):
    """Continue softmax and sums over the keys from ``begin`` to ``end``; keys from ``stop`` on do not exist.

    ``softmax`` is (largest scores, sums of weights, weighted values), and ``bounds`` is (begin, end, stop). CAUSAL: not
    every row sees all of these keys.
    """
    KEYS: tl.constexpr = SHAPE.KEYS
    largest, total, out = softmax
    keys, values, key_scales, value_scales = cache
    begin, end, stop = bounds
    BLOCK: tl.constexpr = SHAPE.BLOCK_SIZE * SHAPE.KV_HEADS
    d = tl.arange(0, SHAPE.WIDTH)
    within = tl.arange(0, KEYS) % SHAPE.BLOCK_SIZE * SHAPE.KV_HEADS + kv  # keys and values of its block
    # Block numbers are read one tile before they are needed. Otherwise keys and values, which the compiler loads ahead
    # of their use, would wait for them.
    ahead = begin + tl.arange(0, KEYS)
    blocks = tl.load(table + ahead // SHAPE.BLOCK_SIZE, mask=ahead < stop, other=0)
    for tile in tl.range(begin, end, KEYS, num_stages=SHAPE.STAGES):
        key_position = tile + tl.arange(0, KEYS)
        valid = key_position < stop
        block = blocks.to(tl.int64)
        ahead = key_position + KEYS
        blocks = tl.load(table + ahead // SHAPE.BLOCK_SIZE, mask=ahead < stop, other=0)
        if KEYS % SHAPE.BLOCK_SIZE:
            within = key_position % SHAPE.BLOCK_SIZE * SHAPE.KV_HEADS + kv
        # Pointers into the first block do not change, so a tile takes one multiplication and addition per row.
        of_block = (block * (BLOCK * SHAPE.HEAD_DIM))[:, None]
        of_key = (within * SHAPE.HEAD_DIM)[:, None] + d[None, :]
        inside = valid[:, None]
        if SHAPE.WIDTH > SHAPE.HEAD_DIM:
            inside = inside & (d < SHAPE.HEAD_DIM)[None, :]
        if CAUSAL or SHAPE.WIDTH > SHAPE.HEAD_DIM:
            key = tl.load(keys + of_key + of_block, mask=inside, other=0.0)
            value = tl.load(values + of_key + of_block, mask=inside, other=0.0)
        else:
            key = tl.load(keys + of_key + of_block)
            value = tl.load(values + of_key + of_block)
        key, value = from_cache(key, query.dtype), from_cache(value, query.dtype)
        scores = dot(query, tl.trans(key))
        if key_scales is not None:
            scores = scores * tl.load(key_scales + block * BLOCK + within, mask=valid, other=0.0)[None, :]
        scores = squashed(scores, scoring.squash)
        if CAUSAL:
            seen = key_position[None, :] <= position[:, None]
            if SHAPE.WINDOWED:
                seen = seen & (key_position[None, :] > position[:, None] - scoring.window)
            scores = tl.where(seen, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1) * scoring.scale)
        weight = tl.exp2(scores * scoring.scale - new_largest[:, None])
        rescale = tl.exp2(largest - new_largest)
        total = total * rescale + tl.sum(weight, axis=1)
        if value_scales is not None:
            weight = weight * tl.load(value_scales + block * BLOCK + within, mask=valid, other=0.0)[None, :]
        out = out * rescale[:, None] + dot(weight.to(value.dtype), value)
        largest = new_largest
    return largest, total, out


@triton.jit
def _attend_tile(
    queries, cache, table, first_heads, result, kv, tokens, scoring, SHAPE: tl.constexpr, ROWS: tl.constexpr
):
    """Attend with the queries of a tile: ``tokens`` is (the first, their count, the position of the first).

    The tile has at most ROWS rows.
    """
    KEYS: tl.constexpr = SHAPE.KEYS
    WIDTH: tl.constexpr = SHAPE.WIDTH
    first, count, start = tokens
    row = tl.arange(0, ROWS)
    token = row // SHAPE.GROUP
    head = tl.load(first_heads + kv) + row % SHAPE.GROUP
    own = (token < count) & (head < tl.load(first_heads + kv + 1))
    d = tl.arange(0, WIDTH)
    address = ((first + token) * SHAPE.HEADS + head)[:, None] * SHAPE.HEAD_DIM + d[None, :]
    inside = own[:, None] & (d < SHAPE.HEAD_DIM)[None, :]
    query = tl.load(queries + address, mask=inside, other=0.0)
    position = start + token

    # Finite, so that differences stay finite for a row that has seen no key yet.
    largest = tl.full([ROWS], -1e38, tl.float32)
    softmax = largest, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    stop = tl.where(start < 0, 0, start + count)
    # All rows see all keys between these bounds.
    all_from = 0
    all_to = (start + 1) // KEYS * KEYS
    if SHAPE.WINDOWED:
        begin = tl.maximum(start + 1 - scoring.window, 0) // KEYS * KEYS
        all_from = tl.maximum(tl.cdiv(stop - scoring.window, KEYS) * KEYS, begin)
        seen_by_some = begin, all_from, stop
        softmax = _attend_keys(query, position, softmax, cache, table, kv, seen_by_some, scoring, SHAPE, True)
    seen_by_all = all_from, all_to, stop
    softmax = _attend_keys(query, position, softmax, cache, table, kv, seen_by_all, scoring, SHAPE, False)
    last = tl.maximum(all_from, all_to), stop, stop
    largest, total, out = _attend_keys(query, position, softmax, cache, table, kv, last, scoring, SHAPE, True)
    out = out / tl.where(start < 0, 1.0, total)[:, None]
    tl.store(result + address, round_float(out, result.dtype.element_ty), mask=inside)


@triton.jit
def prompt_kernel(queries, cache, tables, tiles, first_heads, result, scoring, blocks, SHAPE: tl.constexpr):
    """Program (tile, key-value head), in reverse order of tiles: the last tile of a sequence has the most keys.

    ``cache`` is a :class:`~shotcast.kernels.triton.rope.Cache`, and ``scoring`` a
    :class:`~shotcast.kernels.triton.paged_attention.Scoring` whose scale includes a factor of log2(e). A tile of few
    tokens, or of one token as in decoding, takes SHORT_ROWS rows.
    """
    release_next_kernel(SHAPE.PDL)
    await_prior_kernel(SHAPE.PDL)
    tile = tiles + (tl.num_programs(0) - 1 - tl.program_id(0)) * SHAPE.TILE_FIELDS
    kv = tl.program_id(1)
    table = tables + tl.load(tile).to(tl.int64) * blocks
    tokens = tl.load(tile + 1).to(tl.int64), tl.load(tile + 2), tl.load(tile + 3)
    if tokens[1] * SHAPE.GROUP <= SHAPE.SHORT_ROWS and SHAPE.SHORT_ROWS < SHAPE.ROWS:
        _attend_tile(queries, cache, table, first_heads, result, kv, tokens, scoring, SHAPE, SHAPE.SHORT_ROWS)
    else:
        _attend_tile(queries, cache, table, first_heads, result, kv, tokens, scoring, SHAPE, SHAPE.ROWS)


def tile_tokens(
    tokens: int, group: int, kv_heads: int, head_dim: int, dtype: torch.dtype, num_sms: int, hopper: bool
) -> int:
    """Choose the largest number of tokens of a sequence that a program processes.

    ``group`` is the largest number of query heads per key-value head, and ``hopper`` says whether the GPU has compute
    capability 9 and the caches have the dtype of the queries.
    """
    wide = head_dim > _WIDE and not (hopper and head_dim in hopper_prompt_attention.HEAD_DIMS)
    if dtype == torch.float32:
        rows = FLOAT32_ROWS
    elif wide or triton.cdiv(tokens * group, ROWS) * kv_heads < num_sms:
        rows = FEW_ROWS
    else:
        rows = ROWS
    return max(1, rows // group)


def tile_options(rows: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Choose the keys per tile, the stages and the warps of a program with ``rows`` rows."""
    warps = 8 if rows >= ROWS and head_dim > _NARROW else 4
    stages = FEW_STAGES if head_dim > _WIDE else STAGES
    if dtype == torch.float32:
        return FLOAT32_KEYS, stages, warps
    if head_dim > _WIDE:
        return WIDE_KEYS, stages, warps
    if head_dim <= _NARROW and rows < ROWS:
        return NARROW_KEYS, FEW_STAGES, warps
    return KEYS, stages, warps


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    max_tile_tokens: int,
    first_heads: torch.Tensor,
    group: int,
    block_size: int,
    window: int,
    out: torch.Tensor,
    scale: float | None = None,
    cap: float = 0.0,
    scales: CacheScales = None,
) -> None:
    """Attend causally within each sequence: ``out`` is softmax(queries . keys * scale) . values.

    Args:
        queries: [tokens, heads, head_dim], sequence by sequence.
        keys, values: [slots, key-value heads, head_dim], the caches, which include the queries' tokens.
        tables: int32 [rows, blocks], the blocks of each sequence in order.
        tiles: int32 [tiles, TILE_FIELDS]; queries in none of them get no output.
        max_tile_tokens: the largest number of tokens in a tile.
        first_heads: int32 [key-value heads + 1], the first query head of each key-value head; and their number.
        group: the largest number of query heads of a key-value head.
        out: the output, shaped like ``queries``. All tensors have the same dtype.
        window, scale, cap: as in :func:`shotcast.kernels.cpu.attention.decode`.
        scales: float32 [slots, key-value heads], of keys and of values, if the caches are float8_e4m3fn.
    """
    heads, head_dim = queries.shape[1:]
    scale = head_dim**-0.5 if scale is None else scale
    width = max(16, triton.next_power_of_2(head_dim))
    rows, short = (
        max(16, triton.next_power_of_2(tokens * group)) for tokens in (max_tile_tokens, 1)
    )  # tl.dot takes 16 or more
    scoring = Scoring((cap or scale) * _LOG2_E, window, scale / cap if cap else None)
    served = hopper_prompt_attention.serves(rows, head_dim, block_size, queries.dtype, keys.dtype)
    if served and not INTERPRETED and is_hopper(queries.device):
        cache = keys, values, tables
        hopper_prompt_attention.attend(queries, cache, tiles, first_heads, group, block_size, scoring, out)
        return
    keys_at_once, stages, warps = tile_options(rows, head_dim, queries.dtype)
    options = launch_options(queries.device, warps)
    sides = heads, keys.shape[1], head_dim, group, rows, short, width, block_size, keys_at_once, stages
    shape = PromptShape(*sides, window > 0, TILE_FIELDS, options["launch_pdl"])
    inputs = queries, stored(keys, values, scales), tables, tiles, first_heads
    prompt_kernel[(tiles.shape[0], keys.shape[1])](*inputs, out, scoring, tables.shape[1], shape, **options)
