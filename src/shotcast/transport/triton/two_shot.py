"""Two-shot (MultiShot): reduce-scatter, then all-gather. Two steps for any number of ranks, while a ring takes 2N-2.

    shot 1: rank i sends slice j of x_i to rank j, which sums:  s_j = x_0[j] + x_1[j] + ... in float32, in rank order
    shot 2: rank j sends s_j to all: one multicast store if the switch offers it, else a store to each peer
    out_i = s_0, s_1, ..., s_{N-1}

and likewise for other reductions. Floats of up to 32 bits go through sentinel slots, any other data as flag cells. Each
rank sends 2 (N-1)/N of the message.

A program sends all its tiles first. Then it sums and sends one tile while it gathers the previous one. By default a
program has one tile, and the grid passes over the message as a window (``docs/design/all_reduce.md``).
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
from shotcast.wire import CallPlan


@triton.jit
def tiles_to_send(
    x,
    rank,
    rotation,
    slice_quads,
    nbytes,
    offs,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    UNIT: tl.constexpr,
    WORLD: tl.constexpr,
):
    """Load tiles of the slices of peers FIRST to END - 1, in ``rotated_peer`` order; zero beyond a slice."""
    tiles = ()
    for i in tl.static_range(FIRST, END):
        start = sync.rotated_peer(rank, rotation, i, WORLD) * slice_quads * 16
        tiles = tiles + (load_words(x, start, offs, tl.minimum(nbytes - start, slice_quads * 16), UNIT),)
    return tiles


@dataclass(frozen=True, slots=True)
class TwoShotShape(TileShape):
    """A two-shot kernel; ``CELLS`` makes it send flag cells."""

    CELLS: bool
    REDUCTION: int
    MULTICAST: bool
    CLEAR_AFTER_READ: bool


@kernel(shape=TwoShotShape)
def two_shot_all_reduce(
    x,
    out,
    entry: Entry,
    nbytes,
    slots_at,  # with CELLS, the place of the flag cells
    slots_quads,
    SHAPE: tl.constexpr,
):
    """Reduce x over all ranks into out."""
    rank = entry.rank
    WORLD: tl.constexpr = SHAPE.WORLD
    BLOCK: tl.constexpr = SHAPE.BLOCK
    CELLS: tl.constexpr = SHAPE.CELLS
    UNIT: tl.constexpr = SHAPE.UNIT
    worker = tl.program_id(0) - 1
    workers = tl.num_programs(0) - 1
    quads = (nbytes + 15) // 16
    slice_quads = (quads + WORLD - 1) // WORLD  # the last slices may be shorter, or empty
    slice_words = slice_quads * 4
    addresses = sync.peer_addresses(entry.peers, rank, worker, WORLD)
    await_prior_kernel(SHAPE.PDL)
    offs = tl.maximum(worker, 0) * BLOCK + tl.arange(0, BLOCK)
    # A small message is loaded completely before the epoch is known. Of a large one, only the first tile is: otherwise
    # the links would wait for the loads.
    EARLY: tl.constexpr = WORLD - 1 if SHAPE.WARPS == 1 else 1
    tiles = tiles_to_send(x, rank, worker, slice_quads, nbytes, offs, 0, EARLY, UNIT, WORLD)
    call = sync.enter(entry, SHAPE.WARPS, False)  # the program has already waited for the prior kernel
    rounds = (slice_words + workers * BLOCK - 1) // (workers * BLOCK)
    extent = 0 if SHAPE.CLEAR_AFTER_READ else slice_quads * (2 * WORLD)
    if tl.program_id(0) == 0:
        sync.exchange_headers(call, extent, not CELLS, WORLD, SHAPE.WARPS, SHAPE.PDL)
    else:
        if CELLS:
            first_shot = sync.cells_offset(call.epoch, slots_at, slots_quads)
            stride = slice_quads * 2
        else:
            first_shot = sync.slots_offset(call.generation, slots_at, slots_quads)
            stride = slice_quads
        second_shot = first_shot + stride * WORLD
        total = quads * 4
        for chunk in range(0, rounds):
            offs = (chunk * workers + worker) * BLOCK + tl.arange(0, BLOCK)
            for i in tl.static_range(WORLD - 1):
                peer = sync.rotated_peer(rank, worker, i, WORLD)
                mask = (offs < slice_words) & (offs < total - peer * slice_words)
                if i < EARLY:
                    words = tiles[i]
                else:
                    (words,) = tiles_to_send(x, rank, worker, slice_quads, nbytes, offs, i, i + 1, UNIT, WORLD)
                if not CELLS:
                    words = sync.escape_sentinel(words)
                sync.store_to(call, addresses[i], first_shot + rank * stride, offs, words, mask, CELLS)
            next_offs = offs + workers * BLOCK
            tiles = tiles_to_send(x, rank, worker, slice_quads, nbytes, next_offs, 0, EARLY, UNIT, WORLD)
        sync.leave_epoch(call, extent, not CELLS)
        release_next_kernel(SHAPE.PDL)
        if not CELLS:
            sync.clear_previous(call, slots_at, slots_quads, worker, workers, BLOCK)
        own_span = tl.minimum(slice_words, tl.maximum(total - rank * slice_words, 0) // 4 * 4)
        sums = second_shot + rank * stride
        for chunk in range(0, rounds + 1):
            if chunk < rounds:
                offs = (chunk * workers + worker) * BLOCK + tl.arange(0, BLOCK)
                remaining = nbytes - rank * slice_quads * 16
                own_words = load_words(x, rank * slice_quads * 16, offs, remaining, UNIT)
                masks = sync.arrival_masks(call, offs, own_span, 0, own_span, WORLD, True)
                parts, call = sync.await_words(call, first_shot, stride, offs, masks, 0, CELLS, WORLD, WORLD)
                words = reduce_words(insert_own(parts, own_words, rank, WORLD), WORLD, SHAPE.DTYPE, SHAPE.REDUCTION)
                if not CELLS:
                    words = sync.escape_sentinel(words)
                sync.store_to_all(
                    call, addresses, sums, offs, words, offs < own_span, CELLS, SHAPE.MULTICAST, WORLD - 1
                )
                remaining = tl.minimum(slice_quads * 16, remaining)
                words = reduced_unless_stopped(call.live, words, SHAPE.DTYPE)
                store_words(out, rank * slice_quads * 16, offs, words, remaining, UNIT)
                if SHAPE.CLEAR_AFTER_READ:
                    sync.clear_parts(call, first_shot, slice_quads, offs, masks, WORLD)
            if chunk > 0:
                offs = ((chunk - 1) * workers + worker) * BLOCK + tl.arange(0, BLOCK)
                masks = sync.arrival_masks(call, offs, slice_words, slice_words, total, WORLD, not SHAPE.MULTICAST)
                parts, call = sync.await_words(call, second_shot, stride, offs, masks, 0, CELLS, WORLD, WORLD)
                for r in tl.static_range(WORLD):
                    words = reduced_unless_stopped(call.live, parts[r], SHAPE.DTYPE)
                    remaining = tl.minimum(slice_quads * 16, nbytes - r * slice_quads * 16)
                    remaining = tl.where(rank == r, 0, remaining)
                    store_words(out, r * slice_quads * 16, offs, words, remaining, UNIT)
                if SHAPE.CLEAR_AFTER_READ:
                    sync.clear_parts(call, second_shot, slice_quads, offs, masks, WORLD)


def bind(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of an all_reduce."""
    by = reduction_arguments(plan, context)
    return context.launch(two_shot_all_reduce, plan, MULTICAST=context.multicast and not by["CELLS"], **by)
