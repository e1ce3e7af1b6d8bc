"""Ring: each rank sends only to the next, in 2N-2 steps for an all-reduce. This is the baseline for MultiShot.

    step s < N-1:  rank i passes on slice i-1-s, to which it has added its own; the sum of slice j ends at rank j
    step s >= N-1: rank i passes on the finished slice i-(s-N+1); every slice visits every rank

Slice j is summed in the order j+1, j+2, ..., N-1, 0, ..., j, and rounded to the dtype at each hop. To first order,
these N-1 roundings are off the exact sum by at most (N-1) u (|x_0| + ... + |x_{N-1}|), with u = 2^-24, 2^-11, 2^-8 for
float32, float16, bfloat16. The order depends on nothing but N, so every rank and every run gets the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl

from shotcast.device.triton.intrinsics import kernel, release_next_kernel
from shotcast.device.triton.words import load_words, nan_unless, store_words, sum_words
from shotcast.transport.triton import sync
from shotcast.transport.triton.binding import KernelContext, KernelLaunch, TileShape
from shotcast.transport.triton.sync import Entry
from shotcast.wire import CallPlan, Op, slice_bytes


@dataclass(frozen=True, slots=True)
class RingShape(TileShape):
    """A ring kernel, for the operations that :func:`ring` describes."""

    REDUCE: bool
    GATHER: bool


@kernel(shape=RingShape)
def ring(
    x,
    out,
    entry: Entry,
    nbytes,  # bytes of the whole message, all slices together
    slice_nbytes,  # distance between slices: a multiple of 16 if UNIT is 16, and in an all-reduce
    slots_at,
    slots_quads,
    SHAPE: tl.constexpr,
):
    """Sum and gather the slices of x around the ring.

    REDUCE and GATHER make an all_reduce. REDUCE alone makes a reduce_scatter: out is one slice. GATHER alone makes an
    all_gather: x is one slice.
    """
    rank = entry.rank
    WORLD: tl.constexpr = SHAPE.WORLD
    BLOCK: tl.constexpr = SHAPE.BLOCK
    UNIT: tl.constexpr = SHAPE.UNIT
    next_region = sync.region_address(entry.peers, (rank + 1) % WORLD)
    call = sync.enter(entry, SHAPE.WARPS, SHAPE.PDL)
    quads = (slice_nbytes + 15) // 16
    HOPS: tl.constexpr = (WORLD - 1) * (SHAPE.REDUCE + SHAPE.GATHER)
    if tl.program_id(0) == 0:
        sync.exchange_headers(call, quads * HOPS, True, WORLD, SHAPE.WARPS, SHAPE.PDL)
    else:
        worker = tl.program_id(0) - 1
        workers = tl.num_programs(0) - 1
        slots = sync.slots_offset(call.generation, slots_at, slots_quads)
        span = quads * 4
        previous_rank = (rank + WORLD - 1) % WORLD
        for start in range(worker * BLOCK, span, workers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            if SHAPE.REDUCE:
                remaining = tl.minimum(slice_nbytes, nbytes - previous_rank * slice_nbytes)
                words = sum_words(
                    (load_words(x, previous_rank.to(tl.int64) * slice_nbytes, offs, remaining, UNIT),), 1, SHAPE.DTYPE
                )
            else:
                words = load_words(x, 0, offs, slice_nbytes, UNIT)
                store_words(out, rank.to(tl.int64) * slice_nbytes, offs, words, slice_nbytes, UNIT)
            sync.store_to(call, next_region, slots, offs, sync.escape_sentinel(words), offs < span, False)
        sync.leave_epoch(call, quads * HOPS, True)
        release_next_kernel(SHAPE.PDL)
        sync.clear_previous(call, slots_at, slots_quads, worker, workers, BLOCK)
        for hop in tl.static_range(HOPS):
            for start in range(worker * BLOCK, span, workers * BLOCK):
                offs = start + tl.arange(0, BLOCK)
                masks = (offs < span,)
                parts, call = sync.await_words(
                    call, slots + hop * quads, 0, offs, masks, previous_rank, False, 1, WORLD
                )
                words = parts[0]
                if SHAPE.REDUCE and hop < WORLD - 1:
                    slice_index = (rank + 2 * WORLD - 2 - hop) % WORLD
                    remaining = tl.minimum(slice_nbytes, nbytes - slice_index * slice_nbytes)
                    own_words = load_words(x, slice_index.to(tl.int64) * slice_nbytes, offs, remaining, UNIT)
                    words = sum_words((words, own_words), 2, SHAPE.DTYPE)
                    finished = hop == WORLD - 2
                else:
                    slice_index = (rank + 2 * WORLD - 1 - hop + (WORLD - 1 if SHAPE.REDUCE else 0)) % WORLD
                    remaining = tl.minimum(slice_nbytes, nbytes - slice_index * slice_nbytes)
                    finished = True
                if hop < HOPS - 1:
                    sync.store_to(
                        call,
                        next_region,
                        slots + (hop + 1) * quads,
                        offs,
                        sync.escape_sentinel(words),
                        offs < span,
                        False,
                    )
                if finished:
                    words = nan_unless(call.live, words, SHAPE.DTYPE)
                    if SHAPE.GATHER:
                        store_words(out, slice_index.to(tl.int64) * slice_nbytes, offs, words, remaining, UNIT)
                    else:
                        store_words(out, 0, offs, words, remaining, UNIT)


def bind(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of an all_reduce, a reduce_scatter or an all_gather."""
    part = plan.nbytes // context.world_size
    if plan.op is Op.ALL_REDUCE:
        part = slice_bytes(plan.nbytes, context.world_size)
    gathers = plan.op is Op.ALL_REDUCE or plan.op is Op.ALL_GATHER
    return context.launch(ring, plan, slice_nbytes=part, REDUCE=plan.op is not Op.ALL_GATHER, GATHER=gathers)
