"""Reduce-scatter of rows with residual add, norm and FP8 in one kernel, and optionally an all-gather.

    reduce_scatter:  row_i = sum over r of x_r[i], for the rows i of this rank    each rank norms its rows
    with gather:     and sends them, normed, to all                               sequence parallelism in one kernel

The gather form is a two-shot whose second shot carries the norm, or its FP8 values and scales, instead of the sum.
Program 0 exchanges the headers. The programs after it push tiles, and the last ones norm whole rows, because a row's
sum of squares needs all of the row at once. A program waits only for programs of lower index, or of the same index on
other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from shotcast import wire
from shotcast.device.triton import tiles
from shotcast.device.triton.intrinsics import INTERPRETED, kernel, release_next_kernel
from shotcast.device.triton.words import accumulate, insert_own, load_words, nan_unless, pack, store_words
from shotcast.kernels.triton.norm import (
    DYNAMIC,
    NONE,
    NormAddresses,
    RowShape,
    finish_row,
    load_weight_and_bias,
    norm_arguments,
)
from shotcast.transport.triton import layout, sync
from shotcast.transport.triton.binding import KernelContext, KernelLaunch
from shotcast.transport.triton.sync import Entry
from shotcast.wire import CallPlan


@triton.constexpr_function
def smaller(a, b):
    """Return the smaller of two compile-time numbers."""
    return min(a, b)


@triton.jit
def sum_of_slots(
    call,
    slots,
    stride,
    own_words,
    SPAN: tl.constexpr,
    OWN: tl.constexpr,
    DTYPE: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Sum SPAN words from each rank's slot, in rank order. Returns (words, call).

    GROUP slots, as many as fit in registers, are polled at once. With OWN, this rank's words are ``own_words``, which
    are in no slot; then all slots are one group.
    """
    offs = tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for first in tl.static_range(0, WORLD, GROUP):
        group_slots = slots + first * stride
        masks = sync.arrival_masks(call, offs, SPAN, 0, SPAN, smaller(GROUP, WORLD - first), OWN)
        parts, call = sync.await_words(
            call, group_slots, stride, offs, masks, first, False, smaller(GROUP, WORLD - first), WORLD
        )
        if OWN:
            parts = insert_own(parts, own_words, call.rank, WORLD)
        low, high = accumulate(low, high, parts, smaller(GROUP, WORLD - first), DTYPE)
    return pack(low, high, DTYPE), call


@triton.jit
def take_rows(
    call,
    second_shot,
    row,
    rows,
    norm,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    SKIP_SELF: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Copy row ``row`` of COUNT ranks, beginning with FIRST, from the second shot to the outputs. Returns the call."""
    HIDDEN: tl.constexpr = SHAPE.HIDDEN
    QUANTIZE: tl.constexpr = SHAPE.QUANTIZE
    WORLD: tl.constexpr = SHAPE.WORLD
    ROW: tl.constexpr = HIDDEN * SHAPE.DTYPE.primitive_bitwidth // 8
    NORM_QUADS: tl.constexpr = ROW // 16 if SHAPE.KEEPS_NORMED else 0
    FP8_QUADS: tl.constexpr = (HIDDEN + 15) // 16 if QUANTIZE != NONE else 0
    SCALE_QUADS: tl.constexpr = 1 if QUANTIZE == DYNAMIC else 0
    FP8_UNIT: tl.constexpr = 16 if HIDDEN % 16 == 0 else 4
    SENT_QUADS: tl.constexpr = NORM_QUADS + FP8_QUADS + SCALE_QUADS
    offs = tl.arange(0, SHAPE.ROW_BLOCK)
    slots = second_shot + (FIRST * rows + row) * SENT_QUADS
    stride = rows * SENT_QUADS
    if SHAPE.KEEPS_NORMED:
        span = ROW // 4
        masks = sync.arrival_masks(call, offs, span, 0, span, COUNT, SKIP_SELF)
        parts, call = sync.await_words(call, slots, stride, offs, masks, FIRST, False, COUNT, WORLD, True)
        for r in tl.static_range(COUNT):
            out_row = (FIRST + r) * rows + row
            row_nbytes = tl.where(call.rank == FIRST + r, 0, ROW)
            store_words(norm.normed, out_row * ROW, offs, nan_unless(call.live, parts[r], SHAPE.DTYPE), row_nbytes, 16)
    if QUANTIZE != NONE:
        span = (FP8_QUADS + SCALE_QUADS) * 4
        masks = sync.arrival_masks(call, offs, span, 0, span, COUNT, SKIP_SELF)
        parts, call = sync.await_words(call, slots + NORM_QUADS, stride, offs, masks, FIRST, False, COUNT, WORLD, True)
        for r in tl.static_range(COUNT):
            out_row = (FIRST + r) * rows + row
            row_nbytes = tl.where(call.rank == FIRST + r, 0, HIDDEN)
            words = tl.where(call.live != 0, parts[r], 0x7F7F7F7F)
            store_words(norm.quantized, out_row * HIDDEN, offs, words, row_nbytes, FP8_UNIT)
            if QUANTIZE == DYNAMIC:
                factor = tl.sum(tl.where(offs == FP8_QUADS * 4, parts[r], 0), axis=0)
                factor = nan_unless(call.live, factor, tl.float32)
                tl.store(
                    norm.scale.to(tl.int64).to(tl.pointer_type(tl.int32)) + out_row, factor, mask=call.rank != FIRST + r
                )
    return call


@dataclass(frozen=True, slots=True)
class ScatterNormShape(RowShape):
    """The fused reduce-scatter; ``GATHER`` sends the rows to all."""

    GATHER: bool
    MULTICAST: bool
    WORLD: int
    BLOCK: int
    GROUP: int
    WARPS: int


@kernel(shape=ScatterNormShape)
def scatter_norm(
    x,
    norm: NormAddresses,
    entry: Entry,
    nbytes,  # bytes of the rows that each rank sums
    row_programs,
    slots_at,
    slots_quads,
    SHAPE: tl.constexpr,
):
    """Sum this rank's rows of x over all ranks, add the residual, and norm them.

    With GATHER, all ranks then gather the normed rows.
    """
    rank = entry.rank
    WORLD: tl.constexpr = SHAPE.WORLD
    HIDDEN: tl.constexpr = SHAPE.HIDDEN
    QUANTIZE: tl.constexpr = SHAPE.QUANTIZE
    DTYPE: tl.constexpr = SHAPE.DTYPE
    ROW_BLOCK: tl.constexpr = SHAPE.ROW_BLOCK
    GROUP: tl.constexpr = SHAPE.GROUP
    ROW: tl.constexpr = HIDDEN * DTYPE.primitive_bitwidth // 8
    # a gathered row consists of the norm (if kept), its FP8 values, and one quad for its scale
    NORM_QUADS: tl.constexpr = ROW // 16 if SHAPE.KEEPS_NORMED else 0
    FP8_QUADS: tl.constexpr = (HIDDEN + 15) // 16 if QUANTIZE != NONE else 0
    SENT_QUADS: tl.constexpr = NORM_QUADS + FP8_QUADS + (1 if QUANTIZE == DYNAMIC else 0)
    FP8_WORDS: tl.constexpr = FP8_QUADS * 4
    FP8_BLOCK: tl.constexpr = ROW_BLOCK // (DTYPE.primitive_bitwidth // 8)
    EARLY: tl.constexpr = ROW_BLOCK <= 4096  # longer rows leave no registers for this while they poll
    OWN: tl.constexpr = GROUP == WORLD  # this rank reads its part of its rows from x
    # This rank's rows go directly to the output. With MULTICAST the switch sends them back here too, and they must have
    # arrived before their slots are cleared; so this rank waits for them as for other ranks' rows.
    SKIP_SELF: tl.constexpr = GROUP == WORLD and not SHAPE.MULTICAST
    PEERS: tl.constexpr = WORLD - SKIP_SELF
    call = sync.enter(entry, SHAPE.WARPS, SHAPE.PDL)
    quads = nbytes // 16  # quads of one slot
    rows = nbytes // ROW
    extent = quads * WORLD
    if SHAPE.GATHER:
        extent += rows * (SENT_QUADS * WORLD)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    pushers = programs - 1 - row_programs
    slots = sync.slots_offset(call.generation, slots_at, slots_quads)
    if program == 0:
        sync.exchange_headers(call, extent, True, WORLD, SHAPE.WARPS, SHAPE.PDL)
    elif program <= pushers:
        worker = program - 1
        addresses = sync.peer_addresses(entry.peers, rank, worker, WORLD, OWN)
        span = quads * 4
        for start in range(worker * SHAPE.BLOCK, span, pushers * SHAPE.BLOCK):
            offs = start + tl.arange(0, SHAPE.BLOCK)
            parts = ()
            for i in tl.static_range(WORLD - OWN):
                parts = parts + (
                    load_words(x, sync.rotated_peer(rank, worker, i, WORLD, OWN) * nbytes, offs, nbytes, 16),
                )
            for i in tl.static_range(WORLD - OWN):
                words = sync.escape_sentinel(parts[i])
                sync.store_to(call, addresses[i], slots + rank * quads, offs, words, offs < span, False)
        sync.leave_epoch(call, extent, True)
        release_next_kernel(SHAPE.PDL)
        sync.clear_previous(call, slots_at, slots_quads, worker, programs - 1, SHAPE.BLOCK)
    else:
        worker = program - 1 - pushers
        offs = tl.arange(0, ROW_BLOCK)
        weights, biases = load_weight_and_bias(norm, offs, SHAPE)
        sync.leave_epoch(call, extent, True)
        release_next_kernel(SHAPE.PDL)
        sync.clear_previous(call, slots_at, slots_quads, program - 1, programs - 1, SHAPE.BLOCK)
        gather_addresses = sync.peer_addresses(entry.peers, rank, worker, WORLD, SKIP_SELF)
        second_shot = slots + quads * WORLD
        first_row = 0
        if SHAPE.GATHER:
            first_row = rank * rows
        for row in range(worker, rows, row_programs):
            start = row * ROW
            if EARLY:
                residual_words = load_words(norm.residual, start, offs, ROW, 16)
            own_words = offs
            if OWN:
                own_words = load_words(x, start + rank * nbytes, offs, ROW, 16)
            total, call = sum_of_slots(
                call, slots + row * (ROW // 16), quads, own_words, ROW // 4, OWN, DTYPE, WORLD, ROW_BLOCK, GROUP
            )
            if not EARLY:
                residual_words = load_words(norm.residual, start, offs, ROW, 16)
                weights, biases = load_weight_and_bias(norm, offs, SHAPE)
            normed, packed, factor = finish_row(
                call.live, row, first_row + row, total, residual_words, weights, biases, norm, SHAPE
            )
            if SHAPE.GATHER:
                row_slot = second_shot + (first_row + row) * SENT_QUADS
                if SHAPE.KEEPS_NORMED:
                    words = sync.escape_sentinel(normed)
                    sync.store_to_all(
                        call, gather_addresses, row_slot, offs, words, offs < ROW // 4, False, SHAPE.MULTICAST, PEERS
                    )
                if QUANTIZE != NONE:
                    fp8_offs = tl.arange(0, FP8_BLOCK)
                    slot = row_slot + NORM_QUADS
                    sent = fp8_offs < FP8_WORDS
                    sync.store_to_all(
                        call, gather_addresses, slot, fp8_offs, packed, sent, False, SHAPE.MULTICAST, PEERS
                    )
                if QUANTIZE == DYNAMIC:
                    # a store to each peer: with a tile this small, every thread would multicast all of it
                    scale_offs = tl.arange(0, 4)
                    words = tl.zeros([4], tl.int32) + factor.to(tl.int32, bitcast=True)
                    slot = row_slot + NORM_QUADS + FP8_QUADS
                    sync.store_to_all(
                        call, gather_addresses, slot, scale_offs, words, scale_offs < 4, False, False, PEERS
                    )
        if SHAPE.GATHER:
            for row in range(worker, rows, row_programs):
                for first in tl.static_range(0, WORLD, GROUP):
                    call = take_rows(
                        call, second_shot, row, rows, norm, first, smaller(GROUP, WORLD - first), SKIP_SELF, SHAPE
                    )


COMPILE_OPTIONS = {"maxnreg": 128}
"""Programs hold rows; :func:`shotcast.collectives.fused_rows.scatter_launch` relies on 16 warps per multiprocessor."""


def bind(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of a reduce-scatter whose rows are normed, with or without the all-gather."""
    assert plan.norm is not None
    row_words = plan.norm.hidden * wire.DTYPES[plan.dtype] // 4
    nbytes = plan.nbytes // context.world_size
    row_block, warps = tiles.row_tile(row_words)
    return context.launch(
        scatter_norm,
        plan,
        num_warps=warps,
        tensors="x and norm",
        options=COMPILE_OPTIONS,
        **norm_arguments(plan.norm, plan.dtype, context.own_address),
        nbytes=nbytes,
        row_programs=max(1, min(nbytes // (4 * row_words), plan.launch.programs // 2)),
        # rows decide the warps, and a thread that polls has words of its own
        BLOCK=plan.launch.block_words if INTERPRETED else max(plan.launch.block_words, 128 * warps),
        ROW_BLOCK=row_block,
        UNIT=layout.QUAD,
        GATHER=plan.op in wire.GATHERED_NORMS,
        GROUP=min(context.world_size, tiles.slots_at_once(row_block, warps)),
    )
