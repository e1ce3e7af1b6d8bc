"""Two-shot with FP8 words: a quarter (float32) or half of the bytes, at the cost of precision.

    shot 1: rank i sends Q(x_i[j]) to rank j, which sums:  s_j = D(Q(x_0[j])) + D(Q(x_1[j])) + ... in rank order
    shot 2: rank j sends Q(s_j) to all
    out_i = D(Q(s_0)), D(Q(s_1)), ..., D(Q(s_{N-1}))

Q turns 128 elements, a *block*, into 128 bytes and a scale; D is its inverse. ``docs/reference/numerics.md`` ("FP8
transport") defines both to the bit, and bounds the error. It wins if the bandwidth of the links sets the time.

A slot holds the words of its *groups* of blocks (:mod:`.fp8_groups`), then their scales. A rank's own slice does not
travel, but it is rounded as if it had.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import (
    kernel,
    load_words_of_quad,
    opaque,
    release_next_kernel,
    store_words_of_quad,
    yield_core,
)
from shotcast.transport.triton import sync
from shotcast.transport.triton.binding import KernelContext, KernelLaunch, TileShape
from shotcast.transport.triton.fp8_groups import (
    dequantize,
    load_group,
    quantize,
    store_group,
    tile_offsets,
    to_quads,
    to_rows,
)
from shotcast.transport.triton.sync import POLLS_PER_CHECK, SENTINEL, Entry
from shotcast.wire import CallPlan


@triton.jit
def slot_quads_of(quads, DTYPE: tl.constexpr):
    """Return how many quads of slot words ``quads`` of a message become.

    A partial group has as many as its first block.
    """
    if DTYPE == tl.float32:
        words = quads // 128 * 32 + tl.minimum(quads % 128, 32)
    else:
        words = quads // 32 * 16 + tl.minimum(quads % 32, 16)
    return words


@triton.jit
def groups_of(quads, DTYPE: tl.constexpr):
    """Return how many groups ``quads`` of a message become; the last may be partial."""
    if DTYPE == tl.float32:
        groups = (quads + 127) // 128
    else:
        groups = (quads + 31) // 32
    return groups


@triton.jit
def quads_of_slice(rank, quads, slice_quads):
    """Return the number of quads in a rank's slice of a message; the last slices may be shorter or empty."""
    return tl.minimum(slice_quads, tl.maximum(quads - rank * slice_quads, 0))


@triton.jit
def scales_of(scales, i: tl.constexpr, DTYPE: tl.constexpr):
    """Return the scales of slot ``i``."""
    if DTYPE == tl.float32:
        part = (scales[4 * i], scales[4 * i + 1], scales[4 * i + 2], scales[4 * i + 3])
    else:
        part = (scales[2 * i], scales[2 * i + 1])
    return part


@triton.jit
def add_tiles(total, values):
    """Add two groups of four tiles."""
    return total[0] + values[0], total[1] + values[1], total[2] + values[2], total[3] + values[3]


@triton.jit
def choose_scales(part, own, is_own, GROUP_SCALES: tl.constexpr):
    """Return the ``own`` scales if the slot is this rank's, else the scales of the slot."""
    chosen = ()
    for block in tl.static_range(GROUP_SCALES):
        chosen = chosen + (tl.where(is_own, own[block], part[block]),)
    return chosen


@triton.jit
def scales_at(address, quads, rows, DTYPE: tl.constexpr):
    """Return pointers to the scales of each group, ``quads`` quads past an address, for each quad of a row."""
    QUADS: tl.constexpr = 32 if DTYPE == tl.float32 else 16
    GROUP_SCALES: tl.constexpr = 4 if DTYPE == tl.float32 else 2
    return sync.words_at(address, quads) + (to_rows(rows * GROUP_SCALES) + to_quads(tl.arange(0, QUADS) * 0))


@triton.jit
def send(call, rank, quads, word_quads, rows, words, scales, message_quads, DTYPE: tl.constexpr):
    """Push a tile of slot words, and its scales, into the slot ``quads`` quads past the start of a rank's region.

    The slot holds ``message_quads`` quads of the message; its scales begin at quad ``word_quads``.
    """
    ROW: tl.constexpr = 128 if DTYPE == tl.float32 else 64
    GROUP_SCALES: tl.constexpr = 4 if DTYPE == tl.float32 else 2
    offs = tile_offsets(rows, ROW, DTYPE)
    address = sync.region_address(call.peers, rank)
    sync.store_to(call, address, quads, offs, words, offs < slot_quads_of(message_quads, DTYPE) * 4, False)
    once = to_quads(tl.arange(0, ROW // 4) == 0)
    mask = to_rows(rows < groups_of(message_quads, DTYPE)) & once & (call.live != 0)
    store_words_of_quad(scales_at(address, quads + word_quads, rows, DTYPE), scales, mask, GROUP_SCALES)


@triton.jit
def load_slots(
    call,
    quads,
    stride,
    word_quads,
    rows,
    total_quads,
    slice_quads,
    first,
    OF_SENDER: tl.constexpr,
    COUNT: tl.constexpr,
    DTYPE: tl.constexpr,
    WORLD: tl.constexpr,
):
    """Load a tile of COUNT slots: (words of each, scales of each). All loads are issued before any is used.

    Slot i belongs to rank ``(first + i) % WORLD``. With OF_SENDER it holds that rank's slice, else this rank's slice.
    Words beyond the slice read as arrived, and so does the slot of this rank itself.
    """
    ROW: tl.constexpr = 128 if DTYPE == tl.float32 else 64
    GROUP_SCALES: tl.constexpr = 4 if DTYPE == tl.float32 else 2
    offs = tile_offsets(rows, ROW, DTYPE)
    words = ()
    scales = ()
    for i in tl.static_range(COUNT):
        source = (first + i) % WORLD
        message_quads = quads_of_slice(source if OF_SENDER else call.rank, total_quads, slice_quads)
        other = source != call.rank
        base = sync.words_at(call.own.to(tl.int64), quads + source * stride)
        mask = (offs < slot_quads_of(message_quads, DTYPE) * 4) & other
        part = tl.load(base + offs, mask=mask, other=0, volatile=True)
        words = words + (part,)
        mask = to_rows(rows < groups_of(message_quads, DTYPE)) & to_quads(tl.arange(0, ROW // 4) >= 0) & other
        pointer = scales_at(call.own.to(tl.int64), quads + source * stride + word_quads, rows, DTYPE)
        scales = scales + load_words_of_quad(pointer, mask, tl.max(part, axis=2), GROUP_SCALES)
    return words, scales


@triton.jit
def missing_quads(words, scales, i: tl.constexpr, DTYPE: tl.constexpr):
    """Return 1 for each quad of slot ``i`` that lacks a word, or a scale of its row."""
    part = scales_of(scales, i, DTYPE)
    missing = tl.max((words[i] == SENTINEL).to(tl.int32), axis=2)
    for block in tl.static_range(4 if DTYPE == tl.float32 else 2):
        missing = missing | (part[block] == SENTINEL).to(tl.int32)
    return missing


@triton.jit
def any_missing(words, scales, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    """Return 1 while a word or a scale of any slot has not arrived, else 0."""
    largest = tl.max(words[0].to(tl.uint32, bitcast=True), axis=2)
    for i in tl.static_range(COUNT):
        largest = tl.maximum(largest, tl.max(words[i].to(tl.uint32, bitcast=True), axis=2))
        part = scales_of(scales, i, DTYPE)
        for block in tl.static_range(4 if DTYPE == tl.float32 else 2):
            largest = tl.maximum(largest, part[block].to(tl.uint32, bitcast=True))
    return (tl.max(largest) == 0xFFFFFFFF).to(tl.int32)


@triton.jit
def await_slots(
    call,
    quads,
    stride,
    word_quads,
    rows,
    total_quads,
    slice_quads,
    first,
    OF_SENDER: tl.constexpr,
    COUNT: tl.constexpr,
    DTYPE: tl.constexpr,
    WORLD: tl.constexpr,
):
    """Wait until a tile of COUNT slots (see :func:`load_slots`) has arrived completely. Returns (words, scales, call).

    If the call is stopped, it returns at once, with ``live`` 0. With OF_SENDER, the words are computed from other
    ranks' words, so the deadline is extended (see :func:`shotcast.transport.triton.sync.check_deadline`).
    """
    words, scales = load_slots(
        call, quads, stride, word_quads, rows, total_quads, slice_quads, first, OF_SENDER, COUNT, DTYPE, WORLD
    )
    waiting = any_missing(words, scales, COUNT, DTYPE) & call.live
    started = call.started
    live = call.live
    polls = 0
    while waiting != 0:
        yield_core()
        words, scales = load_slots(
            call, quads, stride, word_quads, rows, total_quads, slice_quads, first, OF_SENDER, COUNT, DTYPE, WORLD
        )
        waiting = any_missing(words, scales, COUNT, DTYPE)
        polls += 1
        if polls % POLLS_PER_CHECK == 0:
            late_ranks = call.rank * 0
            for i in tl.static_range(COUNT):
                late_ranks = late_ranks | (tl.max(missing_quads(words, scales, i, DTYPE)) << ((first + i) % WORLD))
            started, live = sync.check_deadline(call, started, late_ranks, True, WORLD, OF_SENDER)
            waiting = waiting & live
    call = sync.with_status(call, live, started)
    return words, scales, call


@triton.jit
def clear_slots(
    call,
    quads,
    stride,
    word_quads,
    rows,
    total_quads,
    slice_quads,
    OF_SENDER: tl.constexpr,
    DTYPE: tl.constexpr,
    WORLD: tl.constexpr,
):
    """Restore the sentinels where :func:`await_slots` has read a tile, as :func:`~.sync.clear_parts` does."""
    ROW: tl.constexpr = 128 if DTYPE == tl.float32 else 64
    GROUP_SCALES: tl.constexpr = 4 if DTYPE == tl.float32 else 2
    for i in range(1, opaque(call.rank * 0 + WORLD)):  # not unrolled: that would hold all addresses in registers
        source = (call.rank + i) % WORLD
        slot = quads + source * stride
        message_quads = quads_of_slice(source if OF_SENDER else call.rank, total_quads, slice_quads)
        offs = tile_offsets(rows, ROW, DTYPE)
        mask = offs < slot_quads_of(message_quads, DTYPE) * 4
        base = sync.words_at(call.own.to(tl.int64), slot)
        tl.store(base + offs, tl.full(offs.shape, SENTINEL, tl.int32), mask=mask)
        offs = rows[None, :] * GROUP_SCALES + tl.arange(0, GROUP_SCALES)[:, None]
        mask = offs < groups_of(message_quads, DTYPE) * GROUP_SCALES
        base = sync.words_at(call.own.to(tl.int64), slot + word_quads)
        tl.store(base + offs, tl.full(offs.shape, SENTINEL, tl.int32), mask=mask)


@dataclass(frozen=True, slots=True)
class Fp8Shape(TileShape):
    """An FP8 two-shot kernel; ``NATIVE`` says that the GPU has FP8 conversion instructions."""

    NATIVE: bool
    CLEAR_AFTER_READ: bool


@kernel(shape=Fp8Shape)
def two_shot_fp8_all_reduce(x, out, entry: Entry, nbytes, slots_at, slots_quads, SHAPE: tl.constexpr):
    """Sum x over all ranks into out, with FP8 words."""
    rank = entry.rank
    WORLD: tl.constexpr = SHAPE.WORLD
    NATIVE: tl.constexpr = SHAPE.NATIVE
    DTYPE: tl.constexpr = SHAPE.DTYPE
    ROW: tl.constexpr = 128 if DTYPE == tl.float32 else 64
    GROUP_SCALES: tl.constexpr = 4 if DTYPE == tl.float32 else 2
    ROWS: tl.constexpr = SHAPE.BLOCK // ROW if SHAPE.BLOCK > ROW else 1
    SLOTS_AT_ONCE: tl.constexpr = 8 // GROUP_SCALES  # slots whose words and scales fit in the registers of a thread
    call = sync.enter(entry, SHAPE.WARPS, SHAPE.PDL)
    quads = (nbytes + 15) // 16
    slice_quads = (quads + WORLD - 1) // WORLD  # the last slices may be shorter, or empty
    groups = groups_of(slice_quads, DTYPE)
    word_quads = slot_quads_of(slice_quads, DTYPE)
    stride = word_quads + (groups * GROUP_SCALES + 3) // 4
    worker = tl.program_id(0) - 1
    workers = tl.num_programs(0) - 1
    rounds = (groups + workers * ROWS - 1) // (workers * ROWS)
    extent = 0 if SHAPE.CLEAR_AFTER_READ else stride * (2 * WORLD)
    if tl.program_id(0) == 0:
        sync.exchange_headers(call, extent, True, WORLD, SHAPE.WARPS, SHAPE.PDL)
    else:
        first_shot = sync.slots_offset(call.generation, slots_at, slots_quads)
        second_shot = first_shot + stride * WORLD
        for chunk in range(0, rounds):
            rows = (chunk * workers + worker) * ROWS + tl.arange(0, ROWS)
            for i in range(0, WORLD - 1):
                peer = sync.rotated_peer(rank, worker, i, WORLD)
                remaining = tl.minimum(slice_quads * 16, nbytes - peer * slice_quads * 16)
                values = load_group(x, peer * slice_quads * 16, rows, remaining, DTYPE, SHAPE.UNIT)
                words, scales = quantize(values, DTYPE, NATIVE)
                size = quads_of_slice(peer, quads, slice_quads)
                send(call, peer, first_shot + rank * stride, word_quads, rows, words, scales, size, DTYPE)
        sync.leave_epoch(call, extent, True)
        release_next_kernel(SHAPE.PDL)
        sync.clear_previous(call, slots_at, slots_quads, worker, workers, SHAPE.BLOCK)
        own_quads = quads_of_slice(rank, quads, slice_quads)
        for chunk in range(0, rounds + 1):
            if chunk < rounds:
                own_rank = opaque(rank)
                rows = (chunk * workers + worker) * ROWS + tl.arange(0, ROWS)
                remaining = tl.minimum(slice_quads * 16, nbytes - own_rank * slice_quads * 16)
                values = load_group(x, own_rank * slice_quads * 16, rows, remaining, DTYPE, SHAPE.UNIT)
                own_words, own_scales = quantize(values, DTYPE, NATIVE)
                total = (0.0, 0.0, 0.0, 0.0)
                for first in tl.static_range(0, WORLD, SLOTS_AT_ONCE):
                    words, scales, call = await_slots(
                        call,
                        first_shot,
                        stride,
                        word_quads,
                        rows,
                        quads,
                        slice_quads,
                        own_rank * 0 + first,
                        False,
                        SLOTS_AT_ONCE if first + SLOTS_AT_ONCE < WORLD else WORLD - first,
                        DTYPE,
                        WORLD,
                    )
                    for i in tl.static_range(SLOTS_AT_ONCE if first + SLOTS_AT_ONCE < WORLD else WORLD - first):
                        is_own = own_rank == first + i
                        part = choose_scales(scales_of(scales, i, DTYPE), own_scales, is_own, GROUP_SCALES)
                        values = dequantize(tl.where(is_own, own_words, words[i]), part, DTYPE, NATIVE)
                        total = add_tiles(total, values)
                sum_words, sum_scales = quantize(total, DTYPE, NATIVE)
                for i in tl.static_range(WORLD - 1):
                    peer = sync.rotated_peer(own_rank, worker, i, WORLD)
                    send(
                        call,
                        peer,
                        second_shot + own_rank * stride,
                        word_quads,
                        rows,
                        sum_words,
                        sum_scales,
                        own_quads,
                        DTYPE,
                    )
                values = dequantize(sum_words, sum_scales, DTYPE, NATIVE)
                store_group(out, own_rank * slice_quads * 16, rows, values, remaining, call.live, DTYPE, SHAPE.UNIT)
                if SHAPE.CLEAR_AFTER_READ:
                    clear_slots(call, first_shot, stride, word_quads, rows, quads, slice_quads, False, DTYPE, WORLD)
            if chunk > 0:
                own_rank = opaque(rank)
                rows = ((chunk - 1) * workers + worker) * ROWS + tl.arange(0, ROWS)
                for first in tl.static_range(1, WORLD, SLOTS_AT_ONCE):
                    words, scales, call = await_slots(
                        call,
                        second_shot,
                        stride,
                        word_quads,
                        rows,
                        quads,
                        slice_quads,
                        own_rank + first,
                        True,
                        SLOTS_AT_ONCE if first + SLOTS_AT_ONCE < WORLD else WORLD - first,
                        DTYPE,
                        WORLD,
                    )
                    for i in tl.static_range(SLOTS_AT_ONCE if first + SLOTS_AT_ONCE < WORLD else WORLD - first):
                        peer = (own_rank + first + i) % WORLD
                        remaining = tl.minimum(slice_quads * 16, nbytes - peer * slice_quads * 16)
                        values = dequantize(words[i], scales_of(scales, i, DTYPE), DTYPE, NATIVE)
                        store_group(out, peer * slice_quads * 16, rows, values, remaining, call.live, DTYPE, SHAPE.UNIT)
                if SHAPE.CLEAR_AFTER_READ:
                    clear_slots(call, second_shot, stride, word_quads, rows, quads, slice_quads, True, DTYPE, WORLD)


def compile_options(world_size: int, native_fp8: bool) -> dict[str, int]:
    """Return as few registers per thread as hold the tiles; without a limit, the assembler takes twice as many."""
    if world_size <= 4:
        return {"maxnreg": 128}
    return {"maxnreg": 168} if native_fp8 else {}


def bind(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of an all_reduce."""
    options = compile_options(context.world_size, context.native_fp8)
    return context.launch(two_shot_fp8_all_reduce, plan, options=options)
