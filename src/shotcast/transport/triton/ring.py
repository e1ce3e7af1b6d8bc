"""Ring: each rank sends only to the next, 2N-2 steps for an all-reduce. What MultiShot is measured against.

    step s < N-1:  rank i passes on slice i-1-s, to which it has added its own; slice j ends, summed, at rank j
    step s >= N-1: rank i passes on slice i-(s-N+1), finished; every slice visits every rank

Slice j is summed in the order j+1, j+2, ..., N-1, 0, ..., j, and rounded to the dtype at each hop: N-1 roundings, at
most (N-1) u (|x_0| + ... + |x_{N-1}|) off the exact sum to first order, u = 2^-24, 2^-11, 2^-9 for float32, float16,
bfloat16.
The order depends on nothing but N, so every rank and every run gets the same bits.
"""

from __future__ import annotations

import triton.language as tl

from shotcast.device.triton.intrinsics import kernel, release_next_kernel
from shotcast.device.triton.words import load_words, nan_unless, store_words, sum_words
from shotcast.transport.triton.sync import (
    await_words,
    clear_previous,
    enter,
    escape_sentinel,
    exchange_headers,
    leave_epoch,
    region_address,
    slots_offset,
    store_to,
)


@kernel
def ring(
    x,
    out,
    own,
    peers,
    rank,
    header,
    nbytes,  # of the whole message, all slices together
    slice_nbytes,  # distance between slices; a multiple of 16 where UNIT is 16, and in an all-reduce
    slots_at,
    slots_quads,
    REDUCE: tl.constexpr,
    GATHER: tl.constexpr,
    DTYPE: tl.constexpr,
    UNIT: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """REDUCE and GATHER: all_reduce. REDUCE alone: reduce_scatter, out is a slice. GATHER alone: x is a slice."""
    after = region_address(peers, (rank + 1) % WORLD)
    call = enter(own, peers, rank, header, WARPS, PDL)
    quads = (slice_nbytes + 15) // 16
    HOPS: tl.constexpr = (WORLD - 1) * (REDUCE + GATHER)
    if tl.program_id(0) == 0:
        exchange_headers(call, quads * HOPS, True, WORLD, WARPS, PDL)
    else:
        worker = tl.program_id(0) - 1
        workers = tl.num_programs(0) - 1
        slots = slots_offset(call.generation, slots_at, slots_quads)
        span = quads * 4
        before = (rank + WORLD - 1) % WORLD
        for start in range(worker * BLOCK, span, workers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            if REDUCE:
                left = tl.minimum(slice_nbytes, nbytes - before * slice_nbytes)
                words = sum_words((load_words(x, before.to(tl.int64) * slice_nbytes, offs, left, UNIT),), 1, DTYPE)
            else:
                words = load_words(x, 0, offs, slice_nbytes, UNIT)
                store_words(out, rank.to(tl.int64) * slice_nbytes, offs, words, slice_nbytes, UNIT)
            store_to(call, after, slots, offs, escape_sentinel(words), offs < span, False)
        dirty = leave_epoch(call, quads * HOPS, True)
        release_next_kernel(PDL)
        clear_previous(call, dirty, slots_at, slots_quads, worker, workers, BLOCK)
        for hop in tl.static_range(HOPS):
            for start in range(worker * BLOCK, span, workers * BLOCK):
                offs = start + tl.arange(0, BLOCK)
                masks = (offs < span,)
                parts, call = await_words(call, slots + hop * quads, 0, offs, masks, before, False, 1, WORLD)
                words = parts[0]
                if REDUCE and hop < WORLD - 1:
                    which = (rank + 2 * WORLD - 2 - hop) % WORLD
                    left = tl.minimum(slice_nbytes, nbytes - which * slice_nbytes)
                    own_words = load_words(x, which.to(tl.int64) * slice_nbytes, offs, left, UNIT)
                    words = sum_words((words, own_words), 2, DTYPE)
                    ready = hop == WORLD - 2
                else:
                    which = (rank + 2 * WORLD - 1 - hop + (WORLD - 1 if REDUCE else 0)) % WORLD
                    left = tl.minimum(slice_nbytes, nbytes - which * slice_nbytes)
                    ready = True
                if hop < HOPS - 1:
                    store_to(call, after, slots + (hop + 1) * quads, offs, escape_sentinel(words), offs < span, False)
                if ready:
                    words = nan_unless(call.live, words, DTYPE)
                    if GATHER:
                        store_words(out, which.to(tl.int64) * slice_nbytes, offs, words, left, UNIT)
                    else:
                        store_words(out, 0, offs, words, left, UNIT)
