"""Two-shot all-reduce with residual add, RMSNorm and FP8 in the same kernel.

    shot 1: rank i sends slice j of x_i to rank j, which sums:  s_j = x_0[j] + x_1[j] + ... in float32, in rank order
    shot 2: rank j sends s_j to all
    every rank norms every row of s_0, s_1, ..., s_{N-1}

Wins from where two-shot beats one-shot. Slices are those of the plain two-shot, whatever the rows: the sums of shot 2
lie side by side, so a row is one stretch of them. After the program of the headers come programs that push and reduce
tiles, then programs that norm whole rows (see ``fused_one_shot.py``).
"""

from __future__ import annotations

import triton.language as tl

from shotcast.kernels.norm import finish_row
from shotcast.kernels.sync import (
    await_words,
    clear_previous,
    enter,
    exchange_headers,
    leave_epoch,
    slots_of,
    store_to,
    store_to_all,
    without_sentinel,
)
from shotcast.kernels.target import kernel, release_next_kernel
from shotcast.kernels.words import load_words, sum_words, with_own


@kernel
def two_shot_rms_norm(
    x,
    residual,
    weight,
    new_residual,
    normed,
    quantized,
    scale,
    eps,
    own,
    peers,
    rank,
    header,
    nbytes,
    row_programs,
    slots_at,
    slots_quads,
    MULTICAST: tl.constexpr,
    HIDDEN: tl.constexpr,
    QUANTIZE: tl.constexpr,
    KEEPS_NORMED: tl.constexpr,
    DTYPE: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    ROW: tl.constexpr = HIDDEN * DTYPE.primitive_bitwidth // 8
    call = enter(own, peers, rank, header, WARPS, PDL)
    quads = nbytes // 16
    slice_quads = (quads + WORLD - 1) // WORLD  # the last slices may be shorter, or empty
    extent = slice_quads * (2 * WORLD)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    pushers = programs - 1 - row_programs
    first_shot = slots_of(call.generation, slots_at, slots_quads)
    second_shot = first_shot + slice_quads * WORLD
    if program == 0:
        leave_epoch(call, extent, True)
        release_next_kernel(PDL)
        exchange_headers(call, WORLD, WARPS)
    elif program <= pushers:
        worker = program - 1
        slice_words = slice_quads * 4
        slice_bytes = slice_quads * 16
        total = quads * 4
        for start in range(worker * BLOCK, slice_words, pushers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            parts = ()
            for i in tl.static_range(WORLD - 1):
                peer = (rank + 1 + (worker + i) % (WORLD - 1)) % WORLD
                left = tl.minimum(nbytes - peer * slice_bytes, slice_bytes)
                parts = parts + (load_words(x, peer * slice_bytes, offs, left, 16),)
            for i in tl.static_range(WORLD - 1):
                peer = (rank + 1 + (worker + i) % (WORLD - 1)) % WORLD
                mask = (offs < slice_words) & (offs < total - peer * slice_words)
                store_to(call, peer, first_shot + rank * slice_quads, offs, without_sentinel(parts[i]), mask, False)
        leave_epoch(call, extent, True)
        release_next_kernel(PDL)
        clear_previous(call, slots_at, slots_quads, worker, programs - 1, BLOCK)
        mine = tl.minimum(slice_words, tl.maximum(total - rank * slice_words, 0))
        for start in range(worker * BLOCK, mine, pushers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            words = load_words(x, rank * slice_bytes, offs, mine * 4, 16)
            parts, call = await_words(call, first_shot, slice_quads, offs, mine, 0, mine, 0, False, WORLD, WORLD, True)
            words = without_sentinel(sum_words(with_own(parts, words, rank, WORLD), WORLD, DTYPE))
            store_to_all(
                call, second_shot + rank * slice_quads, offs, words, offs < mine, False, MULTICAST, WORLD, False, worker
            )
    else:
        offs = tl.arange(0, ROW_BLOCK)
        gain = load_words(weight, 0, offs, ROW, 16)
        clear_previous(call, slots_at, slots_quads, program - 1, programs - 1, BLOCK)
        leave_epoch(call, extent, True)
        release_next_kernel(PDL)
        for row in range(program - 1 - pushers, nbytes // ROW, row_programs):
            before = load_words(residual, row * ROW, offs, ROW, 16)
            at = row * (ROW // 16)
            parts, call = await_words(
                call, second_shot + at, 0, offs, ROW // 4, slice_quads, ROW // 4, at, False, 1, WORLD, False, True, True
            )
            finish_row(
                call.live,
                row,
                row,
                parts[0],
                before,
                gain,
                new_residual,
                normed,
                quantized,
                scale,
                eps,
                HIDDEN,
                QUANTIZE,
                KEEPS_NORMED,
                DTYPE,
                16,
                ROW_BLOCK,
            )
