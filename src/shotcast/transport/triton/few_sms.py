"""Collectives of large messages on few SMs: a grid of as many programs as the call may have SMs, one for each.

    reduce_scatter:  each rank sends part j to rank j, which adds up:  out_i = x_0[i] + x_1[i] + ...  in rank order
    all_reduce:      the same by slices, and then rank j sends its sum to all
    all_gather:      each rank sends x to all
    all_to_all:      each rank sends part j to rank j

Other kernels here have thousands of programs, which pass over the message like a window as long as the GPU has room for
them. Beside a product that fills the GPU they wait for its end. This one leaves most of the GPU to others: few programs
of many warps, each of which passes a share of the message through the window of the peers' regions, chunk by chunk.
Words carry no flags and nothing is cleared: a program tells its namesakes on the other ranks how many steps it has done
(:func:`~.sync.raise_progress`). In step s a program

    sends chunk s                                      into place s % 3 of the window of each peer
    waits until all its namesakes have done s steps    chunk s-1 is here, and all sums of chunk s-2
    takes chunk s-1: adds it up, and sends the sum     into place s-1 % 2 of the second part of the window
    takes the sums of chunk s-2 (all_reduce)

and then says that it has done s + 1. While one warp waits for the stores of a step to arrive, before it says so, the
others send the next chunk. Copies move any dtype, exact to the bit.

An all_gather can announce chunks to a product that runs beside it (:mod:`shotcast.kernels.triton.arriving_gemm`). It
lets the product begin once every program's namesakes have entered, which takes SMs that no program of any rank still
needs to begin.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from shotcast import wire
from shotcast.device.triton.intrinsics import kernel, release_next_kernel
from shotcast.device.triton.words import insert_own, load_words, nan_unless, store_words, sum_words
from shotcast.errors import ConfigError
from shotcast.transport.triton import layout
from shotcast.transport.triton.binding import KernelContext, KernelLaunch
from shotcast.transport.triton.sync import (
    announce,
    await_progress,
    enter,
    exchange_headers,
    leave_epoch,
    peer_addresses,
    raise_progress,
    read_abort_word,
    rotated_peer,
    store_to,
    with_status,
    words_at,
)
from shotcast.wire import CallPlan, Op

ALL_REDUCE = tl.constexpr(0)
REDUCE_SCATTER = tl.constexpr(1)
ALL_GATHER = tl.constexpr(2)
ALL_TO_ALL = tl.constexpr(3)

FLAG_ROW_QUADS = tl.constexpr(layout.FLAG_ROW_QUADS)
PLACES = tl.constexpr(layout.PLACES_IN_WINDOW)
CHUNKS_SENT = tl.constexpr(layout.CHUNKS_IN_WINDOW)
"""Chunks of a program in the first part of the window."""
SUMS_SENT = tl.constexpr(layout.PLACES_IN_WINDOW - layout.CHUNKS_IN_WINDOW)
"""Chunks of sums in the second part of the window: one is sent while the one before is read."""


@triton.jit
def bytes_in_chunk(part_nbytes, start, chunk_nbytes):
    """Return how many bytes of a part lie in the chunk that begins at its byte ``start``."""
    return tl.minimum(tl.maximum(part_nbytes - start, 0), chunk_nbytes).to(tl.int32)


@triton.jit
def words_in(nbytes):
    """Return the words of whole quads that hold ``nbytes``."""
    return (nbytes + 15) // 16 * 4


@triton.jit
def send_chunk(
    call,
    addresses,
    x,
    out,
    place,
    worker,
    start,
    part_nbytes,
    nbytes,
    own_start,
    own_nbytes,
    chunk_nbytes,
    KIND: tl.constexpr,
    UNIT: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Send the chunk from byte ``start`` of each peer's part (all_gather: of ``x``) to ``place`` in its window."""
    mine = place + call.rank * (chunk_nbytes // 16)
    if KIND == ALL_GATHER:
        size = bytes_in_chunk(own_nbytes, start, chunk_nbytes)
        for at in tl.range(0, words_in(size), BLOCK, num_stages=AHEAD):
            offs = at + tl.arange(0, BLOCK)
            words = load_words(x, start, offs, size, UNIT)
            for i in tl.static_range(WORLD - 1):
                store_to(call, addresses[i], mine, offs, words, offs < words_in(size), False)
            store_words(out, own_start + start, offs, words, size, UNIT)
    else:
        for at in tl.range(0, words_in(bytes_in_chunk(part_nbytes, start, chunk_nbytes)), BLOCK, num_stages=AHEAD):
            offs = at + tl.arange(0, BLOCK)
            tiles = ()
            for i in tl.static_range(WORLD - 1):
                first = rotated_peer(call.rank, worker, i, WORLD) * part_nbytes
                size = bytes_in_chunk(tl.minimum(part_nbytes, nbytes - first), start, chunk_nbytes)
                tiles = tiles + (load_words(x, first + start, offs, size, UNIT),)
            for i in tl.static_range(WORLD - 1):
                first = rotated_peer(call.rank, worker, i, WORLD) * part_nbytes
                size = bytes_in_chunk(tl.minimum(part_nbytes, nbytes - first), start, chunk_nbytes)
                store_to(call, addresses[i], mine, offs, tiles[i], offs < words_in(size), False)


@triton.jit
def load_window(call, quads, offs, mask):
    """Load words of this rank's own window, past the first cache, which may hold what lay there before."""
    return tl.load(words_at(call.own.to(tl.int64), quads) + offs, mask=mask, other=0, cache_modifier=".cg")


@triton.jit
def add_chunk(
    call,
    addresses,
    x,
    out,
    place,
    sums_place,
    start,
    part_nbytes,
    nbytes,
    chunk_nbytes,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    UNIT: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Add up a chunk of this rank's part, in rank order, into out. In an all_reduce, send the sum to all peers too."""
    stride = chunk_nbytes // 16
    first = call.rank * part_nbytes
    size = bytes_in_chunk(tl.minimum(part_nbytes, nbytes - first), start, chunk_nbytes)
    out_start = first + start if KIND == ALL_REDUCE else start
    for at in tl.range(0, words_in(size), BLOCK, num_stages=AHEAD):
        offs = at + tl.arange(0, BLOCK)
        mask = offs < words_in(size)
        parts = ()
        for r in tl.static_range(WORLD):
            parts = parts + (load_window(call, place + r * stride, offs, mask & (call.rank != r)),)
        own_words = load_words(x, first + start, offs, size, UNIT)
        words = sum_words(insert_own(parts, own_words, call.rank, WORLD), WORLD, DTYPE)
        if KIND == ALL_REDUCE:
            for i in tl.static_range(WORLD - 1):
                store_to(call, addresses[i], sums_place + call.rank * stride, offs, words, mask, False)
        store_words(out, out_start, offs, nan_unless(call.live, words, DTYPE), size, UNIT)


@triton.jit
def take_chunk(
    call,
    out,
    place,
    start,
    starts,
    part_nbytes,
    chunk_nbytes,
    DTYPE: tl.constexpr,
    UNIT: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Copy the chunk of every other rank's part from ``place`` in this rank's window into out."""
    stride = chunk_nbytes // 16
    for at in tl.range(0, words_in(bytes_in_chunk(part_nbytes, start, chunk_nbytes)), BLOCK, num_stages=AHEAD):
        offs = at + tl.arange(0, BLOCK)
        sizes = ()
        parts = ()
        for r in tl.static_range(WORLD):
            size = bytes_in_chunk(starts[r + 1] - starts[r], start, chunk_nbytes)
            size = tl.where(call.rank == r, 0, size)
            sizes = sizes + (size,)
            parts = parts + (load_window(call, place + r * stride, offs, offs < words_in(size)),)
        for r in tl.static_range(WORLD):
            store_words(out, starts[r] + start, offs, nan_unless(call.live, parts[r], DTYPE), sizes[r], UNIT)


@triton.jit
def keep_chunk(
    call, x, out, start, part_nbytes, chunk_nbytes, UNIT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr
):
    """Copy a chunk of the part that this rank keeps from x to out."""
    first = call.rank * part_nbytes + start
    size = bytes_in_chunk(part_nbytes, start, chunk_nbytes)
    for at in tl.range(0, words_in(size), BLOCK, num_stages=AHEAD):
        offs = at + tl.arange(0, BLOCK)
        store_words(out, first, offs, load_words(x, first, offs, size, UNIT), size, UNIT)


@kernel
def few_sms(
    x,
    out,
    own,
    peers,
    rank,
    header_size,
    header_call,
    part_nbytes: tl.int64,  # bytes of the largest part, and in x the distance between parts
    start0: tl.int64,  # part r of the message is the bytes from start_r to start_(r + 1)
    start1: tl.int64,
    start2: tl.int64,
    start3: tl.int64,
    start4: tl.int64,
    start5: tl.int64,
    start6: tl.int64,
    start7: tl.int64,
    start8: tl.int64,
    chunk_nbytes,  # a multiple of 16
    window_at,
    progress_at,
    arrivals,
    KIND: tl.constexpr,
    ANNOUNCES: tl.constexpr,
    DTYPE: tl.constexpr,
    UNIT: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Carry out the operation of KIND on x into out; ANNOUNCES: say which chunks are there to the kernel after it."""
    worker = tl.program_id(0)
    workers = tl.num_programs(0)
    addresses = peer_addresses(peers, rank, worker, WORLD)
    call = enter(own, peers, rank, header_size, header_call, WARPS, PDL)
    starts = (start0, start1, start2, start3, start4, start5, start6, start7, start8)
    part_nbytes = part_nbytes + call.epoch * 0  # the interpreter takes a small number for one of 32 bits
    nbytes = start8 + call.epoch * 0
    own_start = nbytes * 0
    own_nbytes = nbytes * 0
    for r in tl.static_range(WORLD):
        own_start = tl.where(rank == r, starts[r], own_start)
        own_nbytes = tl.where(rank == r, starts[r + 1] - starts[r], own_nbytes)
    # A program of its own for the headers would take an SM. Nothing is sent before all ranks have come anyway.
    if worker == 0:
        exchange_headers(call, rank * 0, False, WORLD, WARPS, False)
        call = with_status(call, (read_abort_word(call.own, WARPS) == 0).to(tl.int32), call.started)
    else:
        leave_epoch(call, rank * 0, False)
    SUMS: tl.constexpr = KIND == ALL_REDUCE
    progress = progress_at + worker * FLAG_ROW_QUADS
    place_quads = chunk_nbytes // 16 * WORLD
    window = window_at + worker * PLACES * place_quads
    chunks = ((part_nbytes + chunk_nbytes - 1) // chunk_nbytes).to(tl.int32)
    chunks = (chunks - worker + workers - 1) // workers  # those of this program
    steps = chunks + (2 if SUMS else 1)
    raise_progress(call, progress, 0, WORLD, WARPS)
    call = await_progress(call, progress, 0, WORLD, WARPS)  # the peers no longer read what a call before left there
    if ANNOUNCES:
        release_next_kernel(PDL)  # not before: it may take all SMs, and a peer on this GPU may not have begun
    for step in range(0, steps):
        turn = rank * 0 + step
        start = ((call.epoch * 0 + step) * workers + worker) * chunk_nbytes
        before = start - workers * chunk_nbytes
        if step < chunks:
            place = window + turn % CHUNKS_SENT * place_quads
            send_chunk(
                call,
                addresses,
                x,
                out,
                place,
                worker,
                start,
                part_nbytes,
                nbytes,
                own_start,
                own_nbytes,
                chunk_nbytes,
                KIND,
                UNIT,
                WORLD,
                BLOCK,
                AHEAD,
            )
        if step > 0:
            call = await_progress(call, progress, step, WORLD, WARPS)
            if step <= chunks:
                place = window + (turn - 1) % CHUNKS_SENT * place_quads
                if KIND == ALL_GATHER:
                    take_chunk(
                        call, out, place, before, starts, part_nbytes, chunk_nbytes, DTYPE, UNIT, WORLD, BLOCK, AHEAD
                    )
                elif KIND == ALL_TO_ALL:
                    take_chunk(
                        call, out, place, before, starts, part_nbytes, chunk_nbytes, DTYPE, UNIT, WORLD, BLOCK, AHEAD
                    )
                    keep_chunk(call, x, out, before, part_nbytes, chunk_nbytes, UNIT, BLOCK, AHEAD)
                else:
                    sums_place = window + (CHUNKS_SENT + (turn - 1) % SUMS_SENT) * place_quads
                    add_chunk(
                        call,
                        addresses,
                        x,
                        out,
                        place,
                        sums_place,
                        before,
                        part_nbytes,
                        nbytes,
                        chunk_nbytes,
                        KIND,
                        DTYPE,
                        UNIT,
                        WORLD,
                        BLOCK,
                        AHEAD,
                    )
            if SUMS and step > 1:
                sums_place = window + (CHUNKS_SENT + turn % SUMS_SENT) * place_quads
                first = before - workers * chunk_nbytes
                take_chunk(
                    call, out, sums_place, first, starts, part_nbytes, chunk_nbytes, DTYPE, UNIT, WORLD, BLOCK, AHEAD
                )
        if ANNOUNCES:
            announce(arrivals, worker, step, WARPS)  # chunks 0 to step - 1
        if step + 1 < steps:
            raise_progress(call, progress, step + 1, WORLD, WARPS)


BESIDE_REGISTERS, BESIDE_WORDS = 48, 4096
"""Registers of a thread, and the largest tile, with which a program of two ranks has room on an SM beside a product of
:mod:`shotcast.overlap.products`: 512 threads with 48 registers beside 256 with 155. Larger tiles, and those of more
ranks, take more registers, or would spill."""

TILES_AHEAD = 1
"""Tiles that are loaded before they are needed. With 2 and more, loads go to shared memory and hold no registers
(``cp.async``); not timed yet (``research/few_sms.py --ahead``)."""

_KINDS = {
    Op.ALL_REDUCE: ALL_REDUCE,
    Op.REDUCE_SCATTER: REDUCE_SCATTER,
    Op.ALL_GATHER: ALL_GATHER,
    Op.ALL_TO_ALL: ALL_TO_ALL,
}


def bind(plan: CallPlan, context: KernelContext, announces: bool = False) -> KernelLaunch:
    """Return the launch of an all_reduce, a reduce_scatter, an all_gather or an all_to_all.

    An all_gather that ``announces`` lets the next kernel of the stream begin, and tells it which chunks are there.

    Raises:
        ConfigError: the launch needs more of the window than there is.
    """
    item, world_size, shape = wire.DTYPES[plan.dtype], context.world_size, plan.launch
    if plan.op is Op.ALL_REDUCE:
        part = wire.slice_bytes(plan.nbytes, world_size)
    else:
        part = max(plan.sizes) * item if plan.sizes else plan.nbytes // world_size
    starts = [min(rank * part, plan.nbytes) for rank in range(world_size + 1)]
    if plan.sizes:
        starts = [sum(plan.sizes[:rank]) * item for rank in range(world_size + 1)]
    starts += [starts[-1]] * (wire.MAX_WORLD_SIZE - world_size)
    room = context.layout.window_quads * layout.QUAD
    needed = shape.programs * layout.PLACES_IN_WINDOW * world_size * shape.chunk_bytes
    steps = -(-part // (shape.programs * shape.chunk_bytes)) if shape.chunk_bytes else 0
    if shape.chunk_bytes < layout.QUAD or shape.chunk_bytes % layout.QUAD or needed > room:
        raise ConfigError(
            f"few_sms: {shape.programs} programs with chunks of {shape.chunk_bytes} bytes (a multiple of 16) do not go "
            f"into a window of {room} bytes, which holds {layout.PLACES_IN_WINDOW} chunks of each rank for each program"
        )
    if steps + 2 >= 1 << layout.PROGRESS_STEP_BITS or shape.programs > layout.PROGRESS_ROWS:
        raise ConfigError(f"few_sms: {shape.programs} programs would take {steps} steps with {shape.chunk_bytes} bytes")
    arguments: dict[str, Any] = {f"start{i}": start for i, start in enumerate(starts)}
    arguments |= {"part_nbytes": part, "chunk_nbytes": shape.chunk_bytes, "KIND": _KINDS[plan.op], "AHEAD": TILES_AHEAD}
    arguments |= {"arrivals": context.arrivals_address, "ANNOUNCES": announces}
    options: dict[str, Any] = {}
    if context.unit(plan) != layout.QUAD:
        arguments["BLOCK"] = min(shape.block_words, 32 * shape.num_warps * 2)  # each word takes several registers
    elif world_size == 2 and shape.block_words <= BESIDE_WORDS:
        options["maxnreg"] = BESIDE_REGISTERS
    return context.launch(few_sms, plan, programs=shape.programs, options=options, **arguments)
