"""Products whose tiles are summed over the ranks as they are finished, in the kernel that multiplies.

    product_r = round(a_r @ b_r)                    [m, n] on rank r, summed in float32 and rounded once
    reduce_scatter:  out_i = product_0[rows of i] + product_1[rows of i] + ...              in rank order
    all_reduce:      the same of every block of rows, and then rank i sends its sums to all

A program computes a tile of the product and sends it to the rank that owns its rows. A rank begins with the rows of
the rank after it and ends with its own, so the tiles of the others arrive while it still multiplies. The program of an
own tile then adds up what all ranks have sent of it. In an all_reduce it sends the sum to all, and programs behind
those of the product copy the sums of the others into place.

Tiles lie in slots one after another, so what is sent is whole tiles: their words are their own flags, and nothing waits
for stores to arrive. A slot is cleared by the program that reads it.

Progress: only programs of own tiles wait, for those of foreign tiles, which wait for nothing and have lower numbers;
and programs that copy, for those of own tiles. A GPU starts programs in the order of their numbers, so a grid may be
larger than what fits on the GPU at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import kernel, round_pair
from shotcast.device.triton.launch import Launch
from shotcast.device.triton.words import nan_unless, sum_words
from shotcast.errors import ConfigError
from shotcast.kernels.triton import gemm
from shotcast.kernels.triton.gemm import GemmConfig, GemmForm, ProductShape, Sizes, matrix_at, place_of, sums_of_tile
from shotcast.transport.kernel_call import KernelCall
from shotcast.transport.triton import sync
from shotcast.transport.triton.binding import KernelContext
from shotcast.transport.triton.layout import rooms
from shotcast.transport.triton.sync import Entry
from shotcast.wire import LaunchShape, ProductOp, product_plan


@triton.jit
def send_tile(call, address, quads, sums, rows, DTYPE: tl.constexpr):
    """Round a tile of sums and store its first ``rows`` rows, as words, into the slot ``quads`` quads past ``address``.

    Whoever waits for a word takes it for complete as soon as it has changed, so both halves are stored at once.
    """
    TILE_M: tl.constexpr = sums.shape[0]
    ROW_WORDS: tl.constexpr = sums.shape[1] // 2
    low, high = tl.split(tl.reshape(sums, (TILE_M, ROW_WORDS, 2)))
    words = sync.escape_sentinel(round_pair(low, high, DTYPE))
    i = tl.arange(0, TILE_M)[:, None]
    j = tl.arange(0, ROW_WORDS)[None, :]
    sync.store_to(call, address, quads, i * ROW_WORDS + j, words, (i < rows) & (j >= 0), False)


@triton.jit
def store_rows(out, row, column, offs, words, rows, n, UNIT: tl.constexpr, TILE_N: tl.constexpr):
    """Store words of a tile, as they lie in a slot, where the tile belongs in ``out``, whose rows have n elements."""
    i = offs // (TILE_N // 2)
    j = column // 2 + offs % (TILE_N // 2)
    at = (row + i).to(tl.int64) * (n // UNIT * UNIT)
    if UNIT > 1:
        base = tl.multiple_of(out.to(tl.int64).to(tl.pointer_type(tl.int32)), 2 * UNIT)
        tl.store(base + at // 2 + j, words, mask=(i < rows) & (j < n // UNIT * (UNIT // 2)))
    else:
        base = out.to(tl.int64).to(tl.pointer_type(tl.int16))
        tl.store(base + at + 2 * j, words.to(tl.int16), mask=(i < rows) & (2 * j < n))
        tl.store(base + at + 2 * j + 1, (words >> 16).to(tl.int16), mask=(i < rows) & (2 * j + 1 < n))


@dataclass(frozen=True, slots=True)
class SummedShape(ProductShape):
    """A product that is summed over ranks; ``GATHER`` sends the sums to all."""

    GATHER: bool
    OUT_UNIT: int
    WORLD: int
    BLOCK: int
    WARPS: int


@kernel(shape=SummedShape)
def matmul_reduce(
    a, b, out, entry: Entry, slots_at, slots_quads, sizes: Sizes, block_rows, first, rows, SHAPE: tl.constexpr
):
    """Sum ``a @ b`` over all ranks, rows ``first`` to ``first + rows`` of the blocks of ``block_rows`` that ranks own.

    Without GATHER, ``out`` has the rows of this rank's block, with it all rows. The last blocks may be shorter, or
    empty. Rows of ``out`` have n elements, a multiple of OUT_UNIT; other arguments are those of
    :func:`shotcast.kernels.triton.gemm.gemm_kernel`.
    """
    rank = entry.rank
    WORLD: tl.constexpr = SHAPE.WORLD
    DTYPE: tl.constexpr = SHAPE.DTYPE
    TILE_M: tl.constexpr = SHAPE.TILE_M
    TILE_N: tl.constexpr = SHAPE.TILE_N
    if not SHAPE.TMA:
        a = matrix_at(a, DTYPE, SHAPE.UNIT)
        b = matrix_at(b, DTYPE, SHAPE.UNIT)
    TILE_QUADS: tl.constexpr = TILE_M * TILE_N // 8
    TILE_WORDS: tl.constexpr = TILE_M * TILE_N // 2
    worker = tl.program_id(0) - 1
    tile_rows = tl.cdiv(rows, TILE_M)
    tile_columns = tl.cdiv(sizes.n, TILE_N)
    tiles = tile_rows * tile_columns
    call = sync.enter(entry, SHAPE.WARPS, False)
    if tl.program_id(0) == 0:
        sync.exchange_headers(call, rank * 0, True, WORLD, SHAPE.WARPS, False)
    else:
        dirty = sync.leave_epoch(call, rank * 0, True)
        sync.clear_previous(call, dirty, slots_at, slots_quads, worker, tl.num_programs(0) - 1, SHAPE.BLOCK)
        turn = worker // tiles
        tile = worker % tiles
        tile_row, tile_column = place_of(tile, tile_rows, tile_columns, SHAPE.GROUP)
        owner = (rank + 1 + turn) % WORLD
        row = owner * block_rows + first + tile_row * TILE_M
        column = tile_column * TILE_N
        height = tl.minimum(
            tl.minimum(rows - tile_row * TILE_M, TILE_M), tl.minimum((owner + 1) * block_rows, sizes.m) - row
        )
        target = row if SHAPE.GATHER else first + tile_row * TILE_M
        slots = sync.slots_offset(call.generation, slots_at, slots_quads) + tile * TILE_QUADS
        sums_slots = slots + WORLD * tiles * TILE_QUADS
        if (turn < WORLD) & (height > 0):
            sums = sums_of_tile(a, b, row, column, sizes, SHAPE)
            send_tile(
                call, sync.region_address(entry.peers, owner), slots + rank * tiles * TILE_QUADS, sums, height, DTYPE
            )
            if turn == WORLD - 1:
                addresses = sync.peer_addresses(entry.peers, rank, worker, WORLD)
                for at in range(0, TILE_WORDS, SHAPE.BLOCK):
                    offs = at + tl.arange(0, SHAPE.BLOCK)
                    mask = offs < height * (TILE_N // 2)
                    masks = ()
                    for _r in tl.static_range(WORLD):
                        masks = masks + (mask,)
                    stride = tiles * TILE_QUADS
                    parts, call = sync.await_words(call, slots, stride, offs, masks, 0, False, WORLD, WORLD)
                    words = sync.escape_sentinel(sum_words(parts, WORLD, DTYPE))
                    if SHAPE.GATHER:
                        for i in tl.static_range(WORLD - 1):
                            sync.store_to(call, addresses[i], sums_slots + rank * stride, offs, words, mask, False)
                    words = nan_unless(call.live, words, DTYPE)
                    store_rows(out, target, column, offs, words, height, sizes.n, SHAPE.OUT_UNIT, TILE_N)
                    sync.clear_parts(call, slots, stride, offs, masks, WORLD)
        if SHAPE.GATHER:  # noqa: SIM102, as the compiler knows it
            if (turn >= WORLD) & (height > 0):
                for at in range(0, TILE_WORDS, SHAPE.BLOCK):
                    offs = at + tl.arange(0, SHAPE.BLOCK)
                    masks = (offs < height * (TILE_N // 2),)
                    quads = sums_slots + owner * tiles * TILE_QUADS
                    parts, call = sync.await_words(call, quads, 0, offs, masks, owner, False, 1, WORLD, True)
                    words = nan_unless(call.live, parts[0], DTYPE)
                    store_rows(out, target, column, offs, words, height, sizes.n, SHAPE.OUT_UNIT, TILE_N)
                    sync.clear_parts(call, quads, 0, offs, masks, 1)


_WORDS_OF_A_THREAD = 64
"""Words of all ranks that a thread adds up at a time. Its 128 sums of the tile are sent by then."""


def block_words(world_size: int, config: GemmConfig) -> int:
    """Return the words of a tile that a program adds up at a time: as many as its threads hold of all ranks."""
    most = 32 * config.warps * (_WORDS_OF_A_THREAD // world_size)
    return min(1 << most.bit_length() - 1, config.tile_m * config.tile_n // 2)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The rows of a product that each rank owns, and how many of them pass at a time."""

    rows: int  # of a block
    piece: int  # rows of each block in a call; the last may have fewer
    slot_nbytes: int  # bytes of slots that a call takes on each rank

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """The first row of each call in a block, and how many rows it has."""
        return [(first, min(self.piece, self.rows - first)) for first in range(0, self.rows, self.piece)]

    @property
    def room(self) -> int:
        """The longest message of a workspace whose slots, twice as large, hold a call."""
        return -(-self.slot_nbytes // 2)


def blocks_of(gather: bool, m: int, n: int, world_size: int, config: GemmConfig, max_bytes: int) -> Blocks:
    """Divide the rows of a product among the ranks, and into calls that a workspace has room for.

    With ``gather`` the sums go to all ranks, so blocks may differ in size; each is a number of whole tiles. Raises
    ConfigError if not even a row of tiles has room in a workspace for messages of ``max_bytes``.
    """
    tile_rows = -(-m // config.tile_m)
    rows = -(-tile_rows // world_size) * config.tile_m if gather else m // world_size
    copies = 2 if gather else 1  # slots for parts, and as many for sums
    row_nbytes = copies * world_size * -(-n // config.tile_n) * config.tile_m * config.tile_n * 2
    most = 2 * max_bytes // row_nbytes
    if not most:
        raise ConfigError(
            f"a row of tiles takes {row_nbytes} bytes of slots, and max_bytes={max_bytes} leaves {2 * max_bytes}"
        )
    whole = -(-rows // config.tile_m)
    pieces = -(-whole // most)
    each = -(-whole // pieces)
    return Blocks(rows, min(each * config.tile_m, rows), each * row_nbytes)


def call_of(
    op: ProductOp, form: GemmForm, config: GemmConfig, world_size: int, max_bytes: int, name: str
) -> KernelCall:
    """Return the call that sums products of a form over the ranks.

    A MATMUL_REDUCE_SCATTER has an m that is a multiple of ``world_size``; rows of ``out`` follow each other; ``config``
    is the same on all ranks; ``name`` is that of the dtype. Raises ConfigError if the workspace may not grow so large.
    """
    gather = op is ProductOp.MATMUL_ALL_REDUCE
    blocks = blocks_of(gather, form.m, form.n, world_size, config, max_bytes)
    # ranks differ if their tiles, the order of these, or the width of their rows do
    tiles = (config.group * 1024 + config.tile_m) * 1024 + config.tile_n
    shape = LaunchShape(tiles, block_words(world_size, config), config.warps, form.n)
    nbytes = form.m * form.n * 2
    room = min(room for room in rooms(max_bytes) if room >= blocks.room)
    plan = product_plan(op, name, nbytes, shape, room)
    constants = gemm.constants_of(form, config) | {"OUT_UNIT": math.gcd(gemm.UNIT, form.n), "WARPS": config.warps}
    launches = functools.partial(_launches, op, form, config, blocks, nbytes, shape, room, name)
    return KernelCall(plan, f"{op.label}/{constants}", launches, functools.partial(_given, form))


def _given(form: GemmForm, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple[Any, ...]:
    operands: tuple[Any, Any] = (a, b) if form.uses_tma else (a.data_ptr(), b.data_ptr())
    return (*operands, out.data_ptr())


def _launches(
    op: ProductOp,
    form: GemmForm,
    config: GemmConfig,
    blocks: Blocks,
    nbytes: int,
    shape: LaunchShape,
    room: int,
    name: str,
    context: KernelContext,
) -> Sequence[Launch]:
    gather, world_size = op is ProductOp.MATMUL_ALL_REDUCE, context.world_size
    shared = gemm.arguments_of(form, config) | gemm.constants_of(form, config)
    del shared["out"], shared["out_stride"]
    found = []
    for number, (first, rows) in enumerate(blocks.pieces):
        plan = product_plan(op, name, nbytes, shape, room, nbytes, number)
        tiles = -(-rows // config.tile_m) * -(-form.n // config.tile_n)
        bound = context.launch(
            matmul_reduce,
            plan,
            programs=1 + (2 * world_size - 1 if gather else world_size) * tiles,
            options={"launch_pdl": False},
            block_rows=blocks.rows,
            first=first,
            rows=rows,
            GATHER=gather,
            OUT_UNIT=math.gcd(gemm.UNIT, form.n),
            **shared,
        )
        opened = ("a", "b", "out")
        found.append(Launch(bound.kernel, bound.programs, bound.arguments, opened, bound.options, config.padding_bytes))
    return found
