"""Two-shot all-reduce with residual add, norm and FP8 in the same kernel.

Every rank norms every row of the sums that two-shot (``two_shot.py``) sends to all. Slices consist of whole tiles,
ROW_TILES to a row. A program has the tile with its number in every slice, and norms these tiles together with the other
programs of their rows (``fused_tiles.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl

from shotcast.device.triton.intrinsics import await_prior_kernel, kernel, release_next_kernel
from shotcast.device.triton.words import insert_own, load_words, sum_words
from shotcast.kernels.triton.norm import NormAddresses
from shotcast.transport.triton import fused_tiles, sync
from shotcast.transport.triton.binding import KernelContext, KernelLaunch
from shotcast.transport.triton.fused_tiles import RowCells, RowTileShape
from shotcast.transport.triton.sync import Entry
from shotcast.wire import CallPlan


@dataclass(frozen=True, slots=True)
class TwoShotNormShape(RowTileShape):
    """The fused two-shot."""

    MULTICAST: bool
    CLEAR_AFTER_READ: bool


@kernel(shape=TwoShotNormShape)
def two_shot_norm(
    x, norm: NormAddresses, entry: Entry, nbytes, cells: RowCells, slots_at, slots_quads, SHAPE: tl.constexpr
):
    """Sum x over all ranks, add the residual, and norm the rows. There is one program for each tile of a slice."""
    rank = entry.rank
    WORLD: tl.constexpr = SHAPE.WORLD
    BLOCK: tl.constexpr = SHAPE.BLOCK
    ROW: tl.constexpr = SHAPE.HIDDEN * SHAPE.DTYPE.primitive_bitwidth // 8
    TILE: tl.constexpr = BLOCK // 4  # quads
    worker = tl.program_id(0) - 1
    tiles = nbytes // ROW * SHAPE.ROW_TILES
    slice_tiles = (tiles + WORLD - 1) // WORLD  # the last slices may be shorter, or empty
    offs = tl.arange(0, BLOCK)
    addresses = sync.peer_addresses(entry.peers, rank, worker, WORLD)
    await_prior_kernel(SHAPE.PDL)
    words = ()
    for i in tl.static_range(WORLD - 1):
        peer_tile = sync.rotated_peer(rank, worker, i, WORLD) * slice_tiles + worker
        _, _, tile_start, tile_nbytes = fused_tiles.tile_bounds(peer_tile, tiles, SHAPE)
        words = words + (load_words(x, tile_start, offs, tile_nbytes, 16),)
    call = sync.enter(entry, SHAPE.WARPS, False)  # the program has already waited for the prior kernel
    extent = 0 if SHAPE.CLEAR_AFTER_READ else slice_tiles * (2 * WORLD * TILE)
    if tl.program_id(0) == 0:
        sync.exchange_headers(call, extent, True, WORLD, SHAPE.WARPS, SHAPE.PDL)
    else:
        first_shot = sync.slots_offset(call.generation, slots_at, slots_quads)
        second_shot = first_shot + slice_tiles * (WORLD * TILE)
        stride = slice_tiles * TILE
        for i in tl.static_range(WORLD - 1):
            # send whole tiles, with zeros beyond the end of a row, so that the wait is the same for all tiles
            sent = (offs >= 0) & (sync.rotated_peer(rank, worker, i, WORLD) * slice_tiles + worker < tiles)
            slots = first_shot + (rank * slice_tiles + worker) * TILE
            sync.store_to(call, addresses[i], slots, offs, sync.escape_sentinel(words[i]), sent, False)
        own_tile = rank * slice_tiles + worker
        _, _, tile_start, tile_nbytes = fused_tiles.tile_bounds(own_tile, tiles, SHAPE)
        own_words = load_words(x, tile_start, offs, tile_nbytes, 16)
        operands = fused_tiles.load_operands(norm, worker, slice_tiles, tiles, WORLD, SHAPE)
        sync.leave_epoch(call, extent, True)
        release_next_kernel(SHAPE.PDL)
        sync.clear_previous(call, slots_at, slots_quads, worker, tl.num_programs(0) - 1, BLOCK)
        span = tl.where(own_tile < tiles, BLOCK, 0)
        slots = first_shot + worker * TILE
        masks = sync.arrival_masks(call, offs, span, 0, span, WORLD, True)
        parts, call = sync.await_words(call, slots, stride, offs, masks, 0, False, WORLD, WORLD)
        own_sum = sync.escape_sentinel(sum_words(insert_own(parts, own_words, rank, WORLD), WORLD, SHAPE.DTYPE))
        sums = second_shot + own_tile * TILE
        sync.store_to_all(call, addresses, sums, offs, own_sum, offs < span, False, SHAPE.MULTICAST, WORLD - 1)
        if SHAPE.CLEAR_AFTER_READ:
            sync.clear_parts(call, slots, stride, offs, masks, WORLD)
        slots = second_shot + worker * TILE
        masks = sync.arrival_masks(
            call, offs, BLOCK, slice_tiles * BLOCK, (tiles - worker) * BLOCK, WORLD, not SHAPE.MULTICAST
        )
        parts, call = sync.await_words(call, slots, stride, offs, masks, 0, False, WORLD, WORLD, True)
        if SHAPE.CLEAR_AFTER_READ:
            sync.clear_parts(call, slots, stride, offs, masks, WORLD)
        sums = insert_own(parts, own_sum, rank, WORLD)
        fused_tiles.finish_tiles(call, cells, worker, slice_tiles, tiles, sums, operands, norm, WORLD, SHAPE)


def bind(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of an all-reduce whose rows are normed."""
    # cells of rows need no spacing here: with four rows a program, it gains nothing
    return context.launch(two_shot_norm, plan, tensors="x and norm", **fused_tiles.tile_arguments(plan, context))
