"""Prompt attention for GPUs of compute capability 9.0, whose tensor cores work beside the other units.

It computes what :mod:`shotcast.kernels.triton.prompt_attention` does, on the same tiles. Two consumers, of four warps
each, take half of a tile's rows. They multiply queries with the next keys while they turn the scores of the last ones
into weights, and drift apart, so that one computes weights while the tensor cores work for the other. One more warp,
the producer, lets the copy unit (TMA) bring keys and values to shared memory, block by block (FlashAttention-3, Shah et
al., 2024). Written in Gluon, which has no interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from shotcast.device.triton.intrinsics import await_prior_kernel, launch_options, release_next_kernel
from shotcast.kernels.step_fields import TILE_FIELDS
from shotcast.kernels.triton.paged_attention import Scoring, squashed

ROWS = 128
"""(token, head) pairs of a program."""
WARPS = 4
"""Warps of each consumer."""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(232), gl.constexpr(40)
"""Registers of a thread of the second consumer and of the producer. The first consumer has the rest of the SM's."""
_KEYS, _WIDE_KEYS, _NARROW = 128, 64, 128
"""Keys multiplied at a time: by default; for heads wider than _NARROW."""
STAGES = 2
"""Tiles of keys and of values in shared memory."""
COLUMNS = 64
"""Columns of a block that are copied at once, 128 bytes of each row: the width of a piece of a tile."""
HEAD_DIMS = (128, 256)
"""The head dimensions served. The other kernel is as fast for 64, whose weights take as long as their products."""


@dataclass(frozen=True, slots=True)
class HopperPromptShape:
    """The SHAPE argument of :func:`hopper_prompt_kernel`.

    GROUP: query heads of a key-value head. KEYS: keys at a time. WINDOWED: queries do not see all keys.
    """

    HEADS: int
    KV_HEADS: int
    HEAD_DIM: int
    GROUP: int
    BLOCK_SIZE: int
    KEYS: int
    WINDOWED: bool
    PDL: bool
    ROWS: int = ROWS
    STAGES: int = STAGES
    TILE_FIELDS: int = TILE_FIELDS
    COLUMNS: int = COLUMNS


@gluon.constexpr_function
def _rows_by_threads(SHAPE):
    """Return the layout of [rows, HEAD_DIM] in which a warp reads whole rows, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [32 * 8 // SHAPE.HEAD_DIM, SHAPE.HEAD_DIM // 8], [4, 1], [1, 0])


@gluon.jit
def _copy(ring, number, barrier, cached, kv, blocks, exist, SHAPE: gl.constexpr):
    """Begin to copy the blocks of a tile, the ``number``-th, to its place, and let ``barrier`` count their bytes.

    ``blocks`` points to the block numbers of the tile, of which the first ``exist`` are blocks of the sequence. The
    others are filled with zeros.
    """
    at = number % SHAPE.STAGES
    BLOCKS: gl.constexpr = SHAPE.KEYS // SHAPE.BLOCK_SIZE
    COLUMNS: gl.constexpr = SHAPE.HEAD_DIM // SHAPE.COLUMNS
    mbarrier.expect(barrier, SHAPE.KEYS * SHAPE.HEAD_DIM * 2)
    for i in gl.static_range(BLOCKS):
        block = gl.load(blocks + i, mask=i < exist, other=-1)  # rows before the first one are zeros
        for part in gl.static_range(COLUMNS):
            place = ring[1].index((at * COLUMNS + part) * BLOCKS + i)
            column = kv * SHAPE.HEAD_DIM + part * SHAPE.COLUMNS
            tma.async_copy_global_to_shared(cached, [block * SHAPE.BLOCK_SIZE, column], barrier, place)


@gluon.jit
def _fill(ring, number, cached, kv, blocks, exist, SHAPE: gl.constexpr):
    """Copy a tile, the ``number``-th, once its place is empty."""
    _, _, full, empty = ring
    at = number % SHAPE.STAGES
    mbarrier.wait(empty.index(at), ((number // SHAPE.STAGES) & 1) ^ 1)
    _copy(ring, number, full.index(at), cached, kv, blocks, exist, SHAPE)


@gluon.jit
def _clear_rows(ring, block, first, SHAPE: gl.constexpr):
    """Replace rows of a block of the first tile, from row ``first`` on, with zeros."""
    BLOCKS: gl.constexpr = SHAPE.KEYS // SHAPE.BLOCK_SIZE
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // SHAPE.COLUMNS, SHAPE.COLUMNS // 8], [1, 1], [1, 0])
    row = gl.arange(0, SHAPE.BLOCK_SIZE, layout=gl.SliceLayout(1, LAYOUT))
    for part in gl.static_range(SHAPE.HEAD_DIM // SHAPE.COLUMNS):
        place = ring[1].index(part * BLOCKS + block)
        values = place.load(LAYOUT)
        place.store(gl.where((row < first)[:, None], values, 0.0))


@gluon.jit
def _produce(key_ring, value_ring, arrived, keys, values, table, kv, begin, stop, SHAPE: gl.constexpr):
    """Copy keys and values from the last tile, which holds the key before ``stop``, to the one at ``begin``."""
    KEYS: gl.constexpr = SHAPE.KEYS
    BLOCK_SIZE: gl.constexpr = SHAPE.BLOCK_SIZE
    last = (stop - 1) // KEYS * KEYS
    count = (last - begin) // KEYS
    table += last // BLOCK_SIZE
    exist = (stop - last + BLOCK_SIZE - 1) // BLOCK_SIZE
    all_exist: gl.constexpr = KEYS // BLOCK_SIZE
    _fill(key_ring, 0, keys, kv, table, exist, SHAPE)
    if count > 0:
        _fill(key_ring, 1, keys, kv, table - all_exist, all_exist, SHAPE)
    # Rows that no sequence holds may be NaN. Keys are masked; values must be zero, as products with weights of 0 are.
    _copy(value_ring, 0, arrived, values, kv, table, exist, SHAPE)
    mbarrier.wait(arrived, 0)
    if stop % BLOCK_SIZE > 0:
        _clear_rows(value_ring, exist - 1, stop % BLOCK_SIZE, SHAPE)
        fence_async_shared()
    mbarrier.arrive(value_ring[2].index(0))
    for i in range(1, count + 1):
        if i < count:
            _fill(key_ring, i + 1, keys, kv, table - (i + 1) * all_exist, all_exist, SHAPE)
        _fill(value_ring, i, values, kv, table - i * all_exist, all_exist, SHAPE)


@gluon.jit
def _await_tile(ring, number, SHAPE: gl.constexpr):
    """Return the shared memory of a tile once the producer has filled it."""
    memory, _, full, _ = ring
    at = number % SHAPE.STAGES
    mbarrier.wait(full.index(at), (number // SHAPE.STAGES) & 1)
    return memory.index(at)


@gluon.jit
def _empty_tile(ring, number, SHAPE: gl.constexpr):
    """Let the producer fill the place of a tile again."""
    _, _, _, empty = ring
    mbarrier.arrive(empty.index(number % SHAPE.STAGES))


@gluon.jit
def _scores(query, keys, SHAPE: gl.constexpr, SCORES: gl.constexpr):
    """Begin to multiply queries with the keys of a tile."""
    zero = gl.full([64, SHAPE.KEYS], 0.0, gl.float32, SCORES)
    return warpgroup_mma(query, keys.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _weights(scores, softmax, position, tile, scoring, SHAPE: gl.constexpr, SCORES: gl.constexpr, MASKED: gl.constexpr):
    """Return weights, the new (largest scores, sums of weights), and the factor of earlier sums.

    The keys begin at ``tile``. MASKED: not every row sees all of them.
    """
    largest, total = softmax
    scores = squashed(scores, scoring.squash)
    if MASKED:
        key = (tile + gl.arange(0, SHAPE.KEYS, layout=gl.SliceLayout(0, SCORES)))[None, :]
        seen = key <= position[:, None]
        if SHAPE.WINDOWED:
            seen = seen & (key > position[:, None] - scoring.window)
        scores = gl.where(seen, scores, float("-inf"))
    new = gl.maximum(largest, gl.max(scores, axis=1) * scoring.scale)
    weights = gl.exp2(scores * scoring.scale - new[:, None])
    rescale = gl.exp2(largest - new)
    return weights, (new, total * rescale + gl.sum(weights, axis=1)), rescale


@gluon.jit
def _attend_tiles(
    state, rings, rows, last, bounds, scoring, SHAPE: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Continue with the tiles whose numbers are in ``bounds``; number 0, the first processed, begins at ``last``.

    ``state`` is (weights of the previous tile, softmax, weighted values of the tiles before it), and ``rows`` is
    (queries in shared memory, positions).
    """
    weights, softmax, out = state
    key_ring, value_ring = rings
    query, position = rows
    begin, end = bounds
    operand: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    for number in range(begin, end):
        # Both tiles are awaited before the first product. With the wait for values between the products, the consumers
        # got in step with each other, and computed weights at the same time: 533 instead of 615 TFLOP/s.
        keys, values = _await_tile(key_ring, number, SHAPE), _await_tile(value_ring, number - 1, SHAPE)
        scores = _scores(query, keys, SHAPE, SCORES)
        pending = warpgroup_mma(weights, values, out, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        _empty_tile(key_ring, number, SHAPE)
        tile = last - number * SHAPE.KEYS
        new, softmax, rescale = _weights(scores, softmax, position, tile, scoring, SHAPE, SCORES, MASKED)
        out, weights = warpgroup_mma_wait(0, deps=[pending, weights])
        _empty_tile(value_ring, number - 1, SHAPE)
        out = out * gl.convert_layout(rescale, gl.SliceLayout(1, OUT))[:, None]
        weights = gl.convert_layout(new.to(weights.dtype), operand)
    return weights, softmax, out


@gluon.jit
def _addresses(tile, row, d, SHAPE: gl.constexpr):
    """Return the offsets [rows, HEAD_DIM] of rows of a tile in queries and results, and which rows exist."""
    tokens, heads = tile
    token = row // SHAPE.GROUP
    head = heads[0] + row % SHAPE.GROUP
    own = (token < tokens[1]) & (head < heads[1])
    return ((tokens[0] + token) * SHAPE.HEADS + head)[:, None] * SHAPE.HEAD_DIM + d[None, :], own


@gluon.jit
def _consume(
    key_ring, value_ring, query_memory, queries, result, tile, begin, scoring, PART: gl.constexpr, SHAPE: gl.constexpr
):
    """Attend with 64 rows of a tile."""
    KEYS: gl.constexpr = SHAPE.KEYS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.HEAD_DIM, 16])
    LAYOUT: gl.constexpr = _rows_by_threads(SHAPE)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    operand: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    _, count, start = tile[0]
    row = PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, SHAPE.HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT))
    offsets, own = _addresses(tile, row, d, SHAPE)
    query = query_memory.index(PART)
    query.store(gl.load(queries + offsets, mask=own[:, None] & (d < SHAPE.HEAD_DIM)[None, :], other=0.0))
    fence_async_shared()

    stop = start + count
    last = (stop - 1) // KEYS * KEYS
    position = start + (PART * 64 + gl.arange(0, 64, layout=ROW)) // SHAPE.GROUP
    keys = _await_tile(key_ring, 0, SHAPE)
    scores = warpgroup_mma_wait(0, deps=[_scores(query, keys, SHAPE, SCORES)])
    _empty_tile(key_ring, 0, SHAPE)
    # Finite, so that differences stay finite for a row that has seen no key yet.
    softmax = gl.full([64], -1e38, gl.float32, ROW), gl.full([64], 0.0, gl.float32, ROW)
    weights, softmax, _ = _weights(scores, softmax, position, last, scoring, SHAPE, SCORES, True)
    weights = gl.convert_layout(weights.to(queries.dtype.element_ty), operand)
    state = weights, softmax, gl.full([64, SHAPE.HEAD_DIM], 0.0, gl.float32, OUT)
    rings, rows = (key_ring, value_ring), (query, position)
    tiles = 1 + (last - begin) // KEYS
    causal = 1 + gl.maximum(last - (start + 1) // KEYS * KEYS, 0) // KEYS  # all rows see the earlier keys
    windowed = tiles
    if SHAPE.WINDOWED:
        causal = gl.minimum(causal, tiles)
        seen_by_all = (gl.maximum(stop - scoring.window, begin) + KEYS - 1) // KEYS * KEYS
        windowed = gl.maximum(causal, 1 + (last - seen_by_all) // KEYS)
    state = _attend_tiles(state, rings, rows, last, (1, causal), scoring, SHAPE, SCORES, OUT, True)
    state = _attend_tiles(state, rings, rows, last, (causal, windowed), scoring, SHAPE, SCORES, OUT, False)
    if SHAPE.WINDOWED:
        state = _attend_tiles(state, rings, rows, last, (windowed, tiles), scoring, SHAPE, SCORES, OUT, True)
    weights, softmax, out = state
    last_values = _await_tile(value_ring, tiles - 1, SHAPE)
    pending = warpgroup_mma(weights, last_values, out, is_async=True)
    out, weights = warpgroup_mma_wait(0, deps=[pending, weights])
    out = out / gl.convert_layout(softmax[1], gl.SliceLayout(1, OUT))[:, None]
    row = PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    d = gl.arange(0, SHAPE.HEAD_DIM, layout=gl.SliceLayout(0, OUT))
    offsets, own = _addresses(tile, row, d, SHAPE)
    gl.store(result + offsets, out.to(result.dtype.element_ty), mask=own[:, None])


@gluon.jit
def _clear(result, tile, SHAPE: gl.constexpr):
    """Store zeros: a tile of queries that belong to no sequence."""
    ROWS: gl.constexpr = SHAPE.ROWS
    LAYOUT: gl.constexpr = _rows_by_threads(SHAPE)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, SHAPE.HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT))
    offsets, own = _addresses(tile, row, d, SHAPE)
    zero = gl.full([ROWS, SHAPE.HEAD_DIM], 0.0, result.dtype.element_ty, LAYOUT)
    gl.store(result + offsets, zero, mask=own[:, None])


@gluon.jit
def _ring(SHAPE: gl.constexpr, DTYPE: gl.constexpr):
    """Allocate memory and barriers for tiles of keys or values."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SHAPE.KEYS, SHAPE.HEAD_DIM], DTYPE)
    memory = gl.allocate_shared_memory(DTYPE, [SHAPE.STAGES, SHAPE.KEYS, SHAPE.HEAD_DIM], LAYOUT)
    COUNT: gl.constexpr = SHAPE.STAGES * (SHAPE.HEAD_DIM // SHAPE.COLUMNS) * (SHAPE.KEYS // SHAPE.BLOCK_SIZE)
    PIECE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SHAPE.BLOCK_SIZE, SHAPE.COLUMNS], DTYPE)
    pieces = memory._reinterpret(DTYPE, [COUNT, SHAPE.BLOCK_SIZE, SHAPE.COLUMNS], PIECE)
    full = gl.allocate_shared_memory(gl.int64, [SHAPE.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SHAPE.STAGES, 1], mbarrier.MBarrierLayout())
    STAGES: gl.constexpr = SHAPE.STAGES
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)  # the producer
        mbarrier.init(empty.index(i), count=2)  # the consumers
    return memory, pieces, full, empty


@gluon.jit
def hopper_prompt_kernel(
    queries, keys, values, tables, tiles, first_heads, result, scoring, blocks, SHAPE: gl.constexpr
):
    """Program (tile, key-value head), in reverse order of tiles: the last tile of a sequence has the most keys."""
    release_next_kernel(SHAPE.PDL)
    await_prior_kernel(SHAPE.PDL)
    DTYPE: gl.constexpr = queries.dtype.element_ty
    kv = gl.program_id(1)
    tile = tiles + (gl.num_programs(0) - 1 - gl.program_id(0)) * SHAPE.TILE_FIELDS
    table = tables + gl.load(tile).to(gl.int64) * blocks
    start = gl.load(tile + 3)
    tokens = gl.load(tile + 1).to(gl.int64), gl.load(tile + 2), start
    tile = tokens, (gl.load(first_heads + kv), gl.load(first_heads + kv + 1))
    if start < 0:
        _clear(result, tile, SHAPE)
        return
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, SHAPE.HEAD_DIM], DTYPE)
    query_memory = gl.allocate_shared_memory(DTYPE, [2, 64, SHAPE.HEAD_DIM], LAYOUT)
    key_ring, value_ring = _ring(SHAPE, DTYPE), _ring(SHAPE, DTYPE)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    begin = 0
    if SHAPE.WINDOWED:
        begin = gl.maximum(start + 1 - scoring.window, 0) // SHAPE.KEYS * SHAPE.KEYS
    stop = start + tokens[1]
    gl.warp_specialize(
        [
            (_consume, (key_ring, value_ring, query_memory, queries, result, tile, begin, scoring, 0, SHAPE)),
            (_consume, (key_ring, value_ring, query_memory, queries, result, tile, begin, scoring, 1, SHAPE)),
            (_produce, (key_ring, value_ring, arrived, keys, values, table, kv, begin, stop, SHAPE)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def keys_at_once(head_dim: int) -> int:
    """Choose the keys that a program multiplies at a time."""
    return _WIDE_KEYS if head_dim > _NARROW else _KEYS


def serves(rows: int, head_dim: int, block_size: int, dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Return whether the kernel computes attention with tiles of ``rows`` rows over caches of dtype ``stored``."""
    return (
        rows == ROWS
        and dtype == stored
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim in HEAD_DIMS
        and block_size >= 8  # rows of a copy that fill whole pieces of swizzled memory
        and keys_at_once(head_dim) % block_size == 0
    )


def piece_layout(block_size: int) -> gl.NVMMASharedLayout:
    """Return the layout in shared memory of COLUMNS columns of a block; float16 has that of bfloat16."""
    return gl.NVMMASharedLayout.get_default_for([block_size, COLUMNS], gl.bfloat16)


def _pieces(cached: torch.Tensor, block_size: int) -> TensorDescriptor:
    """Describe keys or values [slots, key-value heads, head_dim] to the copy unit, as rows of all heads."""
    return TensorDescriptor.from_tensor(cached.flatten(1), [block_size, COLUMNS], piece_layout(block_size))


def attend(
    queries: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tiles: torch.Tensor,
    first_heads: torch.Tensor,
    group: int,
    block_size: int,
    scoring: Scoring,
    out: torch.Tensor,
) -> None:
    """Attend as :func:`shotcast.kernels.triton.prompt_attention.attend` does, with tiles of ROWS rows.

    ``cache`` is (keys, values, block tables), and the scale of ``scoring`` includes a factor of log2(e).
    """
    keys, values, tables = cache
    heads, head_dim = queries.shape[1:]
    kv_heads = keys.shape[1]
    options = launch_options(queries.device, WARPS)
    windowed, pdl = scoring.window > 0, options["launch_pdl"]
    hopper_prompt_kernel[(tiles.shape[0], kv_heads)](
        queries,
        _pieces(keys, block_size),
        _pieces(values, block_size),
        tables,
        tiles,
        first_heads,
        out,
        scoring,
        tables.shape[1],
        HopperPromptShape(heads, kv_heads, head_dim, group, block_size, keys_at_once(head_dim), windowed, pdl),
        **options,
    )
