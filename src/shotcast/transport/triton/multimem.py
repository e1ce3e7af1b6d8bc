"""MultiShot with the sum in the switch: two shots through a multicast address.

    staging:  rank i copies x_i to its own slots, and each program raises a flag at all ranks
    shot 1:   rank j loads slice j of all ranks by one multicast address; the switch adds:  s_j = x_0[j] + x_1[j] + ...
    shot 2:   rank j sends s_j to all by one multicast store
    out_i = s_0, s_1, ..., s_{N-1}

Each rank sends and receives (N+1)/N of the message, compared with 2 (N-1)/N for two-shot by peer stores, so it pays
from four ranks on. The order of the additions is the switch's, and it determines the bits of the sum (16-bit floats are
added in float32 and rounded once). All ranks get the same bits, since one rank loads each sum. The kernel is compiled
and inspected, and run with an emulated multicast address; it has not been run on hardware.
"""

from __future__ import annotations

import triton.language as tl

from shotcast.device.triton.intrinsics import INTERPRETED, kernel, release_next_kernel
from shotcast.device.triton.words import load_words, nan_unless, store_words
from shotcast.errors import ConfigError
from shotcast.transport.triton import layout, sync
from shotcast.transport.triton.binding import KernelContext, KernelLaunch, TileShape
from shotcast.transport.triton.multicast import multicast_quads, multicast_sum
from shotcast.transport.triton.sync import Entry
from shotcast.wire import CallPlan

FLAG_ROW_QUADS = tl.constexpr(layout.FLAG_ROW_QUADS)


@kernel(shape=TileShape)
def multimem_all_reduce(x, out, entry: Entry, nbytes, flags_at, slots_at, slots_quads, SHAPE: tl.constexpr):
    """Sum x over all ranks into out, in the switch."""
    rank = entry.rank
    WORLD: tl.constexpr = SHAPE.WORLD
    BLOCK: tl.constexpr = SHAPE.BLOCK
    call = sync.enter(entry, SHAPE.WARPS, SHAPE.PDL)
    quads = (nbytes + 15) // 16
    slice_quads = (quads + WORLD - 1) // WORLD  # the last slices may be shorter, or empty
    if tl.program_id(0) == 0:
        sync.exchange_headers(call, slice_quads * (2 * WORLD), True, WORLD, SHAPE.WARPS, SHAPE.PDL)
    else:
        worker = tl.program_id(0) - 1
        workers = tl.num_programs(0) - 1
        staging = sync.slots_offset(call.generation, slots_at, slots_quads)
        second_shot = staging + slice_quads * WORLD
        flags = flags_at + worker * FLAG_ROW_QUADS
        slice_words = slice_quads * 4
        total = quads * 4
        for start in range(worker * BLOCK, slice_words, workers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            for r in tl.static_range(WORLD):
                words = load_words(x, r * slice_quads * 16, offs, nbytes - r * slice_quads * 16, SHAPE.UNIT)
                mask = (offs < slice_words) & (offs < total - r * slice_words)
                sync.store_to(call, call.own.to(tl.int64), staging + r * slice_quads, offs, words, mask, False)
        sync.raise_flags(call, flags, WORLD, SHAPE.WARPS)
        sync.leave_epoch(call, slice_quads * (2 * WORLD), True)
        release_next_kernel(SHAPE.PDL)
        sync.clear_previous(call, slots_at, slots_quads, worker, workers, BLOCK)
        own_span = tl.minimum(slice_words, tl.maximum(total - rank * slice_words, 0) // 4 * 4)
        if worker * BLOCK < own_span:  # then all ranks need the words that this program will send
            call = sync.await_flags(call, flags, WORLD, SHAPE.WARPS)
        source = sync.multicast_address(call, staging + rank * slice_quads)
        target = sync.multicast_address(call, second_shot + rank * slice_quads)
        for start in range(worker * BLOCK, own_span, workers * BLOCK):
            quad_offs = start // 4 + tl.arange(0, BLOCK // 4)
            mask = (quad_offs * 4 < own_span) & (call.live != 0)
            sums = multicast_sum(source, quad_offs, mask, SHAPE.DTYPE)
            words = ()
            for i in tl.static_range(4):
                words = words + (sync.escape_sentinel(sums[i]),)
            multicast_quads(target, quad_offs, words, mask)
        for start in range(worker * BLOCK, slice_words, workers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            masks = sync.arrival_masks(call, offs, slice_words, slice_words, total, WORLD)
            parts, call = sync.await_words(call, second_shot, slice_quads, offs, masks, 0, False, WORLD, WORLD)
            for r in tl.static_range(WORLD):
                words = nan_unless(call.live, parts[r], SHAPE.DTYPE)
                remaining = tl.minimum(slice_quads * 16, nbytes - r * slice_quads * 16)
                store_words(out, r * slice_quads * 16, offs, words, remaining, SHAPE.UNIT)


def bind(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of an all_reduce. Raises ConfigError if the workspace has no multicast address.

    Other workspaces of the communicator may have one, because the switch has room for a limited number.
    """
    if not context.multicast:
        raise ConfigError(f"multimem: the workspace for messages of {plan.nbytes} bytes got no multicast address")
    block, warps = plan.launch.block_words, plan.launch.num_warps
    if not INTERPRETED:
        # two threads of a program could get different sums for one quad, so each quad has one thread
        block = max(block, 128 * warps)
    programs = 1 + min(plan.launch.programs, layout.FLAG_ROWS)
    return context.launch(multimem_all_reduce, plan, programs=programs, BLOCK=block)
