"""One-shot: every rank sends the data that a peer needs directly to it, in one step.

    all_reduce:      out_i = sum over r of x_r                 each rank sends x to all
    reduce_scatter:  out_i = sum over r of slice_i(x_r)        each rank sends slice j to rank j

and likewise for other reductions. Floats of up to 32 bits go through sentinel slots, any other data as flag cells.

It wins for small messages: one store and one wait, at the cost of (N-1) times the message on the link for an
all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import await_prior_kernel, kernel, release_next_kernel
from shotcast.device.triton.reductions import reduce_words, reduced_unless_stopped
from shotcast.device.triton.words import insert_own, load_words, store_words
from shotcast.transport.triton import sync
from shotcast.transport.triton.binding import KernelContext, KernelLaunch, TileShape, reduction_arguments
from shotcast.transport.triton.sync import Entry
from shotcast.wire import CallPlan, Op


@triton.jit
def tiles_to_send(x, rank, rotation, nbytes, offs, SCATTER: tl.constexpr, UNIT: tl.constexpr, WORLD: tl.constexpr):
    """Load a tile for each peer, in the order of ``rotated_peer``; without SCATTER, one tile for all of them."""
    if not SCATTER:
        tiles = (load_words(x, 0, offs, nbytes, UNIT),)
    else:
        tiles = ()
        for i in tl.static_range(WORLD - 1):
            peer = sync.rotated_peer(rank, rotation, i, WORLD)
            tiles = tiles + (load_words(x, peer.to(tl.int64) * nbytes, offs, nbytes, UNIT),)
    return tiles


@dataclass(frozen=True, slots=True)
class OneShotShape(TileShape):
    """A one-shot kernel; ``SCATTER`` makes it a reduce_scatter, and ``CELLS`` makes it send flag cells."""

    SCATTER: bool
    CELLS: bool
    REDUCTION: int
    CLEAR_AFTER_READ: bool


@kernel(shape=OneShotShape)
def one_shot_reduce(
    x,
    out,
    entry: Entry,
    nbytes,  # bytes of each rank's result
    slots_at,  # with CELLS, the place of the flag cells
    slots_quads,
    SHAPE: tl.constexpr,
):
    """Reduce x over all ranks (all_reduce), or with SCATTER this rank's slice of x (reduce_scatter)."""
    rank = entry.rank
    WORLD: tl.constexpr = SHAPE.WORLD
    BLOCK: tl.constexpr = SHAPE.BLOCK
    CELLS: tl.constexpr = SHAPE.CELLS
    worker = tl.program_id(0) - 1
    workers = tl.num_programs(0) - 1
    addresses = sync.peer_addresses(entry.peers, rank, worker, WORLD)
    await_prior_kernel(SHAPE.PDL)
    offs = tl.maximum(worker, 0) * BLOCK + tl.arange(0, BLOCK)
    tiles = tiles_to_send(x, rank, worker, nbytes, offs, SHAPE.SCATTER, SHAPE.UNIT, WORLD)
    call = sync.enter(entry, SHAPE.WARPS, False)  # the program has already waited for the prior kernel
    quads = (nbytes + 15) // 16  # quads of one slot
    # Of two ranks, each sums the words of one peer, so one slot serves, and half as much is cleared.
    SLOTS: tl.constexpr = 1 if WORLD == 2 and not SHAPE.SCATTER else WORLD
    extent = 0 if SHAPE.CLEAR_AFTER_READ else quads * SLOTS
    if tl.program_id(0) == 0:
        sync.exchange_headers(call, extent, not CELLS, WORLD, SHAPE.WARPS, SHAPE.PDL)
    else:
        if CELLS:
            slots = sync.cells_offset(call.epoch, slots_at, slots_quads)
            stride = quads * 2
        else:
            slots = sync.slots_offset(call.generation, slots_at, slots_quads)
            stride = quads * (SLOTS > 1)
        span = quads * 4
        for start in range(worker * BLOCK, span, workers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            for i in tl.static_range(WORLD - 1):
                tile = tiles[i if SHAPE.SCATTER else 0]
                words = tile if CELLS else sync.escape_sentinel(tile)
                sync.store_to(call, addresses[i], slots + rank * stride, offs, words, offs < span, CELLS)
            tiles = tiles_to_send(x, rank, worker, nbytes, offs + workers * BLOCK, SHAPE.SCATTER, SHAPE.UNIT, WORLD)
        sync.leave_epoch(call, extent, not CELLS)
        release_next_kernel(SHAPE.PDL)
        if not CELLS:
            sync.clear_previous(call, slots_at, slots_quads, worker, workers, BLOCK)
        for start in range(worker * BLOCK, span, workers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            own_words = load_words(x, rank.to(tl.int64) * nbytes if SHAPE.SCATTER else 0, offs, nbytes, SHAPE.UNIT)
            masks = sync.arrival_masks(call, offs, span, 0, span, WORLD, True)
            parts, call = sync.await_words(call, slots, stride, offs, masks, 0, CELLS, WORLD, WORLD)
            words = reduce_words(insert_own(parts, own_words, rank, WORLD), WORLD, SHAPE.DTYPE, SHAPE.REDUCTION)
            words = reduced_unless_stopped(call.live, words, SHAPE.DTYPE)
            store_words(out, 0, offs, words, nbytes, SHAPE.UNIT)
            if SHAPE.CLEAR_AFTER_READ:
                sync.clear_parts(call, slots, stride, offs, masks, WORLD)


def bind(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of an all_reduce or a reduce_scatter."""
    scatter = plan.op is Op.REDUCE_SCATTER
    nbytes = plan.nbytes // context.world_size if scatter else plan.nbytes
    return context.launch(one_shot_reduce, plan, nbytes=nbytes, SCATTER=scatter, **reduction_arguments(plan, context))
