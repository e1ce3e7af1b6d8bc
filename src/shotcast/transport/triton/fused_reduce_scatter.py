"""Reduce-scatter of rows, with residual add, RMSNorm and FP8 in the same kernel, and a second shot where all gather.

    reduce_scatter:  row_i = sum over r of x_r[i], for i mine    each rank norms its rows
    with gather:     and sends them, normed, to all              sequence parallelism in one kernel

The gather form is a two-shot whose second shot carries the norm, or its FP8 and scales, instead of the sum. After the
program of the headers come programs that push tiles, then programs that norm whole rows: a row's sum of squares needs
all of it at once. A program waits only for programs of lower index, or of its own on other ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import kernel, release_next_kernel
from shotcast.device.triton.words import insert_own, load_words, nan_unless, pack, store_words, sum_on
from shotcast.kernels.triton.norm import DYNAMIC, NONE, finish_row
from shotcast.transport.triton.sync import (
    arrival_masks,
    await_words,
    clear_previous,
    enter,
    escape_sentinel,
    exchange_headers,
    leave_epoch,
    peer_addresses,
    rotated_peer,
    slots_offset,
    store_to,
    store_to_all,
)


@triton.constexpr_function
def smaller(a, b):
    return min(a, b)


@triton.jit
def sum_of_slots(
    call,
    at,
    stride,
    mine,
    SPAN: tl.constexpr,
    OWN: tl.constexpr,
    DTYPE: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Sum of SPAN words of each rank's slot, in rank order. Returns (words, call).

    GROUP slots are polled at once, as many as registers hold. With OWN, this rank's words are ``mine``, from no slot;
    then all slots are one group.
    """
    offs = tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for first in tl.static_range(0, WORLD, GROUP):
        place = at + first * stride
        masks = arrival_masks(call, offs, SPAN, 0, SPAN, smaller(GROUP, WORLD - first), OWN)
        parts, call = await_words(call, place, stride, offs, masks, first, False, smaller(GROUP, WORLD - first), WORLD)
        if OWN:
            parts = insert_own(parts, mine, call.rank, WORLD)
        low, high = sum_on(low, high, parts, smaller(GROUP, WORLD - first), DTYPE)
    return pack(low, high, DTYPE), call


@triton.jit
def take_rows(
    call,
    second_shot,
    row,
    rows,
    normed,
    quantized,
    scale,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    SKIP_SELF: tl.constexpr,
    HIDDEN: tl.constexpr,
    QUANTIZE: tl.constexpr,
    KEEPS_NORMED: tl.constexpr,
    DTYPE: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row ``row`` of the ranks from FIRST on, COUNT of them, from the second shot to the outputs. Returns the call."""
    ROW: tl.constexpr = HIDDEN * DTYPE.primitive_bitwidth // 8
    NORM_QUADS: tl.constexpr = ROW // 16 if KEEPS_NORMED else 0
    FP8_QUADS: tl.constexpr = (HIDDEN + 15) // 16 if QUANTIZE != NONE else 0
    SCALE_QUADS: tl.constexpr = 1 if QUANTIZE == DYNAMIC else 0
    FP8_UNIT: tl.constexpr = 16 if HIDDEN % 16 == 0 else 4
    SENT_QUADS: tl.constexpr = NORM_QUADS + FP8_QUADS + SCALE_QUADS
    offs = tl.arange(0, BLOCK)
    at = second_shot + (FIRST * rows + row) * SENT_QUADS
    stride = rows * SENT_QUADS
    if KEEPS_NORMED:
        span = ROW // 4
        masks = arrival_masks(call, offs, span, 0, span, COUNT, SKIP_SELF)
        parts, call = await_words(call, at, stride, offs, masks, FIRST, False, COUNT, WORLD, True)
        for r in tl.static_range(COUNT):
            there = (FIRST + r) * rows + row
            left = tl.where(call.rank == FIRST + r, 0, ROW)
            store_words(normed, there * ROW, offs, nan_unless(call.live, parts[r], DTYPE), left, 16)
    if QUANTIZE != NONE:
        span = (FP8_QUADS + SCALE_QUADS) * 4
        masks = arrival_masks(call, offs, span, 0, span, COUNT, SKIP_SELF)
        parts, call = await_words(call, at + NORM_QUADS, stride, offs, masks, FIRST, False, COUNT, WORLD, True)
        for r in tl.static_range(COUNT):
            there = (FIRST + r) * rows + row
            left = tl.where(call.rank == FIRST + r, 0, HIDDEN)
            words = tl.where(call.live != 0, parts[r], 0x7F7F7F7F)
            store_words(quantized, there * HIDDEN, offs, words, left, FP8_UNIT)
            if QUANTIZE == DYNAMIC:
                factor = tl.sum(tl.where(offs == FP8_QUADS * 4, parts[r], 0), axis=0)
                factor = nan_unless(call.live, factor, tl.float32)
                tl.store(scale.to(tl.int64).to(tl.pointer_type(tl.int32)) + there, factor, mask=call.rank != FIRST + r)
    return call


@kernel
def scatter_rms_norm(
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
    nbytes,  # of the rows that each rank sums
    row_programs,
    slots_at,
    slots_quads,
    GATHER: tl.constexpr,
    MULTICAST: tl.constexpr,
    HIDDEN: tl.constexpr,
    QUANTIZE: tl.constexpr,
    KEEPS_NORMED: tl.constexpr,
    DTYPE: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    ROW: tl.constexpr = HIDDEN * DTYPE.primitive_bitwidth // 8
    # a gathered row: the norm, if kept, then its FP8, then a quad of its scale
    NORM_QUADS: tl.constexpr = ROW // 16 if KEEPS_NORMED else 0
    FP8_QUADS: tl.constexpr = (HIDDEN + 15) // 16 if QUANTIZE != NONE else 0
    SENT_QUADS: tl.constexpr = NORM_QUADS + FP8_QUADS + (1 if QUANTIZE == DYNAMIC else 0)
    FP8_WORDS: tl.constexpr = FP8_QUADS * 4
    FP8_BLOCK: tl.constexpr = ROW_BLOCK // (DTYPE.primitive_bitwidth // 8)
    EARLY: tl.constexpr = ROW_BLOCK <= 4096  # registers of longer rows hold nothing while they poll
    OWN: tl.constexpr = GROUP == WORLD  # this rank's part of its own rows is read where it lies
    # a row of its own goes straight to the output; but what the switch brings back must have come before its slot is
    # cleared, so then it is waited for like the others'
    SKIP_SELF: tl.constexpr = GROUP == WORLD and not MULTICAST
    call = enter(own, peers, rank, header, WARPS, PDL)
    quads = nbytes // 16  # of one slot
    rows = nbytes // ROW
    extent = quads * WORLD
    if GATHER:
        extent += rows * (SENT_QUADS * WORLD)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    pushers = programs - 1 - row_programs
    slots = slots_offset(call.generation, slots_at, slots_quads)
    if program == 0:
        exchange_headers(call, extent, True, WORLD, WARPS, PDL)
    elif program <= pushers:
        worker = program - 1
        summers = peer_addresses(peers, rank, worker, WORLD, OWN)
        span = quads * 4
        for start in range(worker * BLOCK, span, pushers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            parts = ()
            for i in tl.static_range(WORLD - OWN):
                parts = parts + (load_words(x, rotated_peer(rank, worker, i, WORLD, OWN) * nbytes, offs, nbytes, 16),)
            for i in tl.static_range(WORLD - OWN):
                words = escape_sentinel(parts[i])
                store_to(call, summers[i], slots + rank * quads, offs, words, offs < span, False)
        dirty = leave_epoch(call, extent, True)
        release_next_kernel(PDL)
        clear_previous(call, dirty, slots_at, slots_quads, worker, programs - 1, BLOCK)
    else:
        worker = program - 1 - pushers
        offs = tl.arange(0, ROW_BLOCK)
        gain = load_words(weight, 0, offs, ROW, 16)
        dirty = leave_epoch(call, extent, True)
        release_next_kernel(PDL)
        clear_previous(call, dirty, slots_at, slots_quads, program - 1, programs - 1, BLOCK)
        addresses = peer_addresses(peers, rank, worker, WORLD, SKIP_SELF)
        second_shot = slots + quads * WORLD
        first_row = 0
        if GATHER:
            first_row = rank * rows
        for row in range(worker, rows, row_programs):
            start = row * ROW
            if EARLY:
                before = load_words(residual, start, offs, ROW, 16)
            mine = gain
            if OWN:
                mine = load_words(x, start + rank * nbytes, offs, ROW, 16)
            total, call = sum_of_slots(
                call, slots + row * (ROW // 16), quads, mine, ROW // 4, OWN, DTYPE, WORLD, ROW_BLOCK, GROUP
            )
            if not EARLY:
                before = load_words(residual, start, offs, ROW, 16)
                gain = load_words(weight, 0, offs, ROW, 16)
            norm, packed, factor = finish_row(
                call.live,
                row,
                first_row + row,
                total,
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
            if GATHER:
                to = second_shot + (first_row + row) * SENT_QUADS
                if KEEPS_NORMED:
                    words = escape_sentinel(norm)
                    store_to_all(call, addresses, to, offs, words, offs < ROW // 4, False, MULTICAST, WORLD - SKIP_SELF)
                if QUANTIZE != NONE:
                    few = tl.arange(0, FP8_BLOCK)
                    at = to + NORM_QUADS
                    store_to_all(call, addresses, at, few, packed, few < FP8_WORDS, False, MULTICAST, WORLD - SKIP_SELF)
                if QUANTIZE == DYNAMIC:
                    # by a store to each peer: of a tile this small, each thread would multicast the whole
                    four = tl.arange(0, 4)
                    words = tl.zeros([4], tl.int32) + factor.to(tl.int32, bitcast=True)
                    at = to + NORM_QUADS + FP8_QUADS
                    store_to_all(call, addresses, at, four, words, four < 4, False, False, WORLD - SKIP_SELF)
        if GATHER:
            for row in range(worker, rows, row_programs):
                for first in tl.static_range(0, WORLD, GROUP):
                    call = take_rows(
                        call,
                        second_shot,
                        row,
                        rows,
                        normed,
                        quantized,
                        scale,
                        first,
                        smaller(GROUP, WORLD - first),
                        SKIP_SELF,
                        HIDDEN,
                        QUANTIZE,
                        KEEPS_NORMED,
                        DTYPE,
                        WORLD,
                        ROW_BLOCK,
                    )
