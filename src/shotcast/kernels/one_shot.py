"""One-shot: every rank sends what a peer needs straight to it, in one step.

Wins for small messages: one store and one wait, at (N-1) times the message on the wire for an all-reduce.

    all_reduce:      out_i = sum over r of x_r                 each rank sends x to all
    reduce_scatter:  out_i = sum over r of slice_i(x_r)        each rank sends slice j to rank j
"""

from __future__ import annotations

import triton.language as tl

from shotcast.kernels.sync import (
    await_words,
    clear_parts,
    clear_previous,
    enter,
    exchange_headers,
    leave_epoch,
    slots_of,
    store_to,
    without_sentinel,
)
from shotcast.kernels.target import kernel, release_next_kernel
from shotcast.kernels.words import load_words, nan_unless, store_words, sum_words, with_own


@kernel
def one_shot_reduce(
    x,
    out,
    own,
    peers,
    rank,
    header,
    nbytes,  # of what each rank ends up with
    slots_at,
    slots_quads,
    SCATTER: tl.constexpr,
    CLEARS: tl.constexpr,
    DTYPE: tl.constexpr,
    UNIT: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    call = enter(own, peers, rank, header, WARPS, PDL)
    quads = (nbytes + 15) // 16  # of one slot
    extent = 0 if CLEARS else quads * WORLD
    if tl.program_id(0) == 0:
        leave_epoch(call, extent, True)
        release_next_kernel(PDL)
        exchange_headers(call, WORLD, WARPS)
    else:
        worker = tl.program_id(0) - 1
        workers = tl.num_programs(0) - 1
        slots = slots_of(call.generation, slots_at, slots_quads)
        span = quads * 4
        for start in range(worker * BLOCK, span, workers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            if not SCATTER:
                words = without_sentinel(load_words(x, 0, offs, nbytes, UNIT))
            for i in tl.static_range(WORLD - 1):
                peer = (rank + 1 + (worker + i) % (WORLD - 1)) % WORLD
                if SCATTER:
                    words = without_sentinel(load_words(x, peer.to(tl.int64) * nbytes, offs, nbytes, UNIT))
                store_to(call, peer, slots + rank * quads, offs, words, offs < span, False)
        leave_epoch(call, extent, True)
        release_next_kernel(PDL)
        clear_previous(call, slots_at, slots_quads, worker, workers, BLOCK)
        for start in range(worker * BLOCK, span, workers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            own_words = load_words(x, rank.to(tl.int64) * nbytes if SCATTER else 0, offs, nbytes, UNIT)
            parts, call = await_words(call, slots, quads, offs, span, 0, span, 0, False, WORLD, WORLD, True)
            words = sum_words(with_own(parts, own_words, rank, WORLD), WORLD, DTYPE)
            words = nan_unless(call.live, words, DTYPE)
            store_words(out, 0, offs, words, nbytes, UNIT)
            if CLEARS:
                clear_parts(call, slots, quads, offs, span, 0, span, WORLD, True)
