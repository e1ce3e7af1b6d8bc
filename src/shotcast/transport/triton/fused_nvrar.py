"""All-reduce over nodes with residual add, norm and FP8 in the same kernel.

Every rank norms every row of the sums that ``nvrar.py`` gathers. Slices consist of whole tiles, ROW_TILES to a row. A
program has the tile with its number in every slice, and norms these tiles together with the other programs of their
rows (``fused_tiles.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl

from shotcast.device.triton.intrinsics import await_prior_kernel, kernel, release_next_kernel
from shotcast.device.triton.words import insert_own, load_words
from shotcast.kernels.triton.norm import NormAddresses
from shotcast.transport.triton import exchanges, fused_tiles, sync
from shotcast.transport.triton.binding import KernelContext, KernelLaunch
from shotcast.transport.triton.exchanges import DOUBLING, HALVING, PAIRS, NodesShape, Tile
from shotcast.transport.triton.fused_tiles import RowCells, RowTileShape
from shotcast.transport.triton.network import enter_network
from shotcast.transport.triton.nvrar import begin_exchange, finish_exchange, nodes_arguments, partial_sum
from shotcast.transport.triton.sync import EntryWithPuts
from shotcast.wire import CallPlan


@dataclass(frozen=True, slots=True)
class NodesNormShape(RowTileShape, NodesShape):
    """The fused all-reduce over nodes."""

    CLEAR_AFTER_READ: bool


@kernel(shape=NodesNormShape)
def nvrar_norm(
    x,
    norm: NormAddresses,
    entry: EntryWithPuts,
    nbytes,
    cells: RowCells,
    slots_at,
    slots_quads,
    staging_at,
    staging_quads,
    SHAPE: tl.constexpr,
):
    """Sum x over all ranks, add the residual, and norm the rows. There is one program for each tile of a slice."""
    rank = entry.rank
    BLOCK: tl.constexpr = SHAPE.BLOCK
    DTYPE: tl.constexpr = SHAPE.DTYPE
    LOCAL: tl.constexpr = SHAPE.LOCAL
    ROW: tl.constexpr = SHAPE.HIDDEN * DTYPE.primitive_bitwidth // 8
    TILE: tl.constexpr = BLOCK // 4  # quads
    worker = tl.program_id(0) - 1
    place = exchanges.place_of(rank, SHAPE)
    local = place.local
    first_rank = rank - local
    tiles = nbytes // ROW * SHAPE.ROW_TILES
    slice_tiles = (tiles + LOCAL - 1) // LOCAL  # the last slices may be shorter, or empty
    offs = tl.arange(0, BLOCK)
    mates = ()
    if LOCAL > 1:
        mates = sync.peer_addresses(entry.peers + first_rank * 8, local, worker, LOCAL)
    targets = exchanges.targets_of(entry, place, SHAPE)
    await_prior_kernel(SHAPE.PDL)
    own_tile = local * slice_tiles + worker
    _, _, own_start, own_nbytes = fused_tiles.tile_bounds(own_tile, tiles, SHAPE)
    words = ()
    if LOCAL == 1:
        words = (load_words(x, own_start, offs, own_nbytes, 16),)
    else:
        for i in tl.static_range(LOCAL - 1):
            peer_tile = sync.rotated_peer(local, worker, i, LOCAL) * slice_tiles + worker
            _, _, tile_start, tile_nbytes = fused_tiles.tile_bounds(peer_tile, tiles, SHAPE)
            words = words + (load_words(x, tile_start, offs, tile_nbytes, 16),)
    call = sync.enter(entry, SHAPE.WARPS, False)  # the program has already waited for the prior kernel
    inner_quads = slice_tiles * (2 * LOCAL * TILE if LOCAL > 1 else 0)
    extent = inner_quads + exchanges.exchange_quads(slice_tiles * TILE, SHAPE)
    if SHAPE.CLEAR_AFTER_READ:
        extent = extent * 0
    if tl.program_id(0) == 0:
        sync.exchange_headers(call, extent, True, SHAPE.WORLD, SHAPE.WARPS, SHAPE.PDL, entry.puts, SHAPE.PUTS)
    else:
        first_shot = sync.slots_offset(call.generation, slots_at, slots_quads)
        second_shot = first_shot + slice_tiles * (LOCAL * TILE)
        network = enter_network(
            call, first_shot + inner_quads, staging_at, staging_quads, SHAPE.PUTS, SHAPE.CLEAR_AFTER_READ
        )
        stride = slice_tiles * TILE
        # whole tiles are sent, with zeros beyond the end of a row, so that the wait is the same for all tiles
        span = tl.where(own_tile < tiles, BLOCK, 0)
        if LOCAL == 1:
            value = partial_sum(words, DTYPE, 1)
            at = Tile(worker, worker * BLOCK, slice_tiles * BLOCK, offs, span)
            begin_exchange(call, network, targets, place, at, value, SHAPE)
        else:
            for i in tl.static_range(LOCAL - 1):
                sent = (offs >= 0) & (sync.rotated_peer(local, worker, i, LOCAL) * slice_tiles + worker < tiles)
                slots = first_shot + (local * slice_tiles + worker) * TILE
                sync.store_to(call, mates[i], slots, offs, sync.escape_sentinel(words[i]), sent, False)
        operands = fused_tiles.load_operands(norm, worker, slice_tiles, tiles, LOCAL, SHAPE)
        if LOCAL > 1:
            own_words = load_words(x, own_start, offs, own_nbytes, 16)
        sync.leave_epoch(call, extent, True)
        release_next_kernel(SHAPE.PDL)
        sync.clear_previous(call, slots_at, slots_quads, worker, tl.num_programs(0) - 1, BLOCK)
        if LOCAL > 1:
            slots = first_shot + worker * TILE
            masks = ()
            for r in tl.static_range(LOCAL):
                masks = masks + ((offs < span) & (local != r),)
            parts, call = sync.await_words(call, slots, stride, offs, masks, first_rank, False, LOCAL, SHAPE.WORLD)
            value = partial_sum(insert_own(parts, own_words, local, LOCAL), DTYPE, LOCAL)
            if SHAPE.CLEAR_AFTER_READ:
                sync.clear_parts(call, slots, stride, offs, masks, LOCAL)
            at = Tile(worker, worker * BLOCK, slice_tiles * BLOCK, offs, span)
            begin_exchange(call, network, targets, place, at, value, SHAPE)
        at = Tile(worker, worker * BLOCK, slice_tiles * BLOCK, offs, span)
        own_sum, call = finish_exchange(call, network, targets, place, at, value, SHAPE)
        sums = (own_sum,)
        if LOCAL > 1:
            sync.store_to_all(
                call, mates, second_shot + own_tile * TILE, offs, own_sum, offs < span, False, False, LOCAL - 1
            )
            slots = second_shot + worker * TILE
            masks = ()
            for r in tl.static_range(LOCAL):
                masks = masks + ((offs >= 0) & (r * slice_tiles + worker < tiles) & (local != r),)
            parts, call = sync.await_words(
                call, slots, stride, offs, masks, first_rank, False, LOCAL, SHAPE.WORLD, True
            )
            if SHAPE.CLEAR_AFTER_READ:
                sync.clear_parts(call, slots, stride, offs, masks, LOCAL)
            sums = insert_own(parts, own_sum, local, LOCAL)
        fused_tiles.finish_tiles(call, cells, worker, slice_tiles, tiles, sums, operands, norm, LOCAL, SHAPE)


def bind(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of an all-reduce and norm that exchanges between nodes by doubling."""
    arguments = fused_tiles.tile_arguments(plan, context) | nodes_arguments(plan, context)
    return context.launch(nvrar_norm, plan, tensors="x and norm", EXCHANGE=DOUBLING.value, **arguments)


def bind_pairs(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of an all-reduce and norm that exchanges between all pairs of nodes at once."""
    arguments = fused_tiles.tile_arguments(plan, context) | nodes_arguments(plan, context)
    return context.launch(nvrar_norm, plan, tensors="x and norm", EXCHANGE=PAIRS.value, **arguments)


def bind_halving(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of an all-reduce and norm that exchanges between nodes by halving and doubling."""
    arguments = fused_tiles.tile_arguments(plan, context) | nodes_arguments(plan, context)
    return context.launch(nvrar_norm, plan, tensors="x and norm", EXCHANGE=HALVING.value, **arguments)
