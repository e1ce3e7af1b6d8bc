"""One-shot all-reduce with residual add, norm and FP8 in the same kernel.

    row_i = sum over r of x_r[i];  every rank norms every row

It wins for small messages, as one-shot does. A program has one tile of a row. It sends the tile to all ranks, sums it
with the peers' tiles, and norms it together with the other programs of the row (``fused_tiles.py``).
"""

from __future__ import annotations

import triton.language as tl

from shotcast import wire
from shotcast.device.triton.intrinsics import await_prior_kernel, kernel, release_next_kernel
from shotcast.device.triton.words import insert_own, load_words, sum_words
from shotcast.kernels.triton.norm import NormAddresses
from shotcast.transport.triton import fused_tiles, layout, sync
from shotcast.transport.triton.binding import KernelContext, KernelLaunch
from shotcast.transport.triton.fused_tiles import RowCells, RowTileShape
from shotcast.transport.triton.sync import Entry
from shotcast.wire import CallPlan


@kernel(shape=RowTileShape)
def one_shot_norm(
    x, norm: NormAddresses, entry: Entry, nbytes, cells: RowCells, slots_at, slots_quads, SHAPE: tl.constexpr
):
    """Sum x over all ranks, add the residual, and norm the rows.

    There is one program for every tile of BLOCK words, with ROW_TILES tiles to a row. The next kernel may launch at
    once, and the words to sum are loaded while the epoch is read; each saves half a microsecond between GEMMs.
    """
    rank = entry.rank
    WORLD: tl.constexpr = SHAPE.WORLD
    BLOCK: tl.constexpr = SHAPE.BLOCK
    release_next_kernel(SHAPE.PDL)
    ROW: tl.constexpr = SHAPE.HIDDEN * SHAPE.DTYPE.primitive_bitwidth // 8
    TILE: tl.constexpr = BLOCK // 4  # quads
    tiles = nbytes // ROW * SHAPE.ROW_TILES
    SLOTS: tl.constexpr = 1 if WORLD == 2 else WORLD  # each of two ranks has one peer
    extent = tiles * (TILE * SLOTS)
    stride = tiles * (TILE * (SLOTS > 1))
    tile = tl.program_id(0) - 1
    workers = tl.num_programs(0) - 1
    offs = tl.arange(0, BLOCK)
    addresses = sync.peer_addresses(entry.peers, rank, tile, WORLD)
    _, _, tile_start, tile_nbytes = fused_tiles.tile_bounds(tile, tiles, SHAPE)
    await_prior_kernel(SHAPE.PDL)
    words = load_words(x, tile_start, offs, tile_nbytes, 16)
    operands = fused_tiles.load_operands(norm, tile, workers, tiles, 1, SHAPE)
    call = sync.enter(entry, SHAPE.WARPS, False)  # the program has already waited for the prior kernel
    if tl.program_id(0) == 0:
        sync.exchange_headers(call, extent, True, WORLD, SHAPE.WARPS, False)
    else:
        slots = sync.slots_offset(call.generation, slots_at, slots_quads)
        span = tile_nbytes // 16 * 4
        slot = slots + rank * stride + tile * TILE
        sync.store_to_all(
            call, addresses, slot, offs, sync.escape_sentinel(words), offs < span, False, False, WORLD - 1
        )
        sync.leave_epoch(call, extent, True)
        sync.clear_previous(call, slots_at, slots_quads, tile, workers, BLOCK)
        masks = sync.arrival_masks(call, offs, span, 0, span, WORLD, True)
        parts, call = sync.await_words(call, slots + tile * TILE, stride, offs, masks, 0, False, WORLD, WORLD)
        totals = (sum_words(insert_own(parts, words, rank, WORLD), WORLD, SHAPE.DTYPE),)
        fused_tiles.finish_tiles(call, cells, tile, workers, tiles, totals, operands, norm, 1, SHAPE)


def bind(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of an all-reduce whose rows are normed."""
    assert plan.norm is not None
    row_words = plan.norm.hidden * wire.DTYPES[plan.dtype] // 4
    rows, row_tiles = plan.nbytes // (4 * row_words), -(-row_words // plan.launch.block_words)
    return context.launch(
        one_shot_norm,
        plan,
        programs=1 + max(1, rows * row_tiles),
        tensors="x and norm",
        **fused_tiles.tile_arguments(plan, context, layout.row_cell_stride(rows, row_tiles)),
    )
