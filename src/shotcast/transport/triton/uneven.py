"""An all_to_all with parts of any size, each known only to its two ranks.

    out_i = part_i(x_0), ..., part_i(x_{N-1})      each rank sends part j to rank j

The first bytes of each part, its *head*, go as flag cells in one step, and the rest through the window
(``docs/reference/protocols.md``, "Uneven parts"). In front of a head lie the size of the part and the number of chunks
that its sender has beyond the heads. All data is exact to the bit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

from shotcast import wire
from shotcast.device.triton.intrinsics import INTERPRETED, await_prior_kernel, kernel, release_next_kernel
from shotcast.device.triton.launch import Wide
from shotcast.device.triton.words import load_words, nan_unless, store_words
from shotcast.errors import ConfigError
from shotcast.transport.triton import layout, sync
from shotcast.transport.triton.binding import KernelContext, KernelLaunch, TileShape
from shotcast.transport.triton.few_sms import bytes_in_chunk, load_window, words_in
from shotcast.transport.triton.sync import Entry
from shotcast.wire import CallPlan

FLAG_ROW_QUADS = tl.constexpr(layout.FLAG_ROW_QUADS)
CHUNKS_SENT = tl.constexpr(layout.CHUNKS_IN_WINDOW)
PARTS_CAME = tl.constexpr(layout.PARTS_CAME)
FAULT_PARTS_DIFFER = tl.constexpr(wire.PARTS_DIFFER)
SIZE_WORDS = tl.constexpr(4)
"""Words in front of a head: the bytes of the part, low word first, the chunks of its sender beyond the heads, and 0."""
HEAD_QUADS_BEFORE = tl.constexpr(2)
"""The number of quads that the flag cells of these words take."""


class Spans(NamedTuple):
    """The parts of a call, in bytes, as its sizes determine them; all but ``chunks_sent`` take 64 bits."""

    firsts: tuple[int, ...]  # where the part of x for the i-th peer, rank + 1 + i, begins
    sizes: tuple[int, ...]  # and how long it is
    own_first: int  # where the part that the rank keeps begins in x
    own_start: int  # and in out
    own_nbytes: int
    starts: tuple[int, ...]  # part r of out is the bytes from `starts[r]` to `starts[r + 1]`
    longest_sent: int  # bytes of the longest part for another rank
    longest_received: int  # and from one
    chunks_sent: int  # the chunks of the longest part that is sent, beyond its head


_OPEN = Spans((Wide(),) * 7, (Wide(),) * 7, Wide(), Wide(), Wide(), (Wide(),) * 9, Wide(), Wide(), 0)
"""The argument of a kernel whose calls supply their sizes."""


@triton.jit
def size_words(nbytes, chunks, lanes):
    """Return the words that lie in front of a part."""
    wide = nbytes.to(tl.int64)
    low = wide.to(tl.int32)
    high = (wide >> 32).to(tl.int32)
    return tl.where(lanes == 0, low, tl.where(lanes == 1, high, tl.where(lanes == 2, chunks, 0)))


@triton.jit
def await_sizes(call, buffer, stride, WORLD: tl.constexpr, WARPS: tl.constexpr):
    """Wait for the words in front of the parts of all other ranks. Returns (a tile for each rank, call)."""
    lanes = sync.thread_ids(WARPS)
    masks = ()
    for r in tl.static_range(WORLD):
        masks = masks + ((lanes < SIZE_WORDS) & (call.rank != r),)
    return sync.await_words(call, buffer, stride, lanes, masks, call.rank * 0, True, WORLD, WORLD)


@triton.jit
def compare_sizes(call, buffer, stride, starts, WORLD: tl.constexpr, WARPS: tl.constexpr):
    """Stop the call if a rank sends a part whose size does not match ``starts``, which describe out."""
    came, call = await_sizes(call, buffer, stride, WORLD, WARPS)
    lanes = sync.thread_ids(WARPS)
    sizes = lanes < 2
    differing_cells = lanes * 0
    for r in tl.static_range(WORLD):
        expected = size_words(starts[r + 1] - starts[r], call.rank * 0, lanes)
        differs = sizes & (call.rank != r) & (came[r] != expected)
        differing_cells = differing_cells | (differs.to(tl.int32) << r)
    found = tl.sum(differing_cells << tl.where(sizes, 8 * lanes, 0), axis=0)
    if (found != 0) & (call.live != 0):
        kept = (call.own + PARTS_CAME + 1).to(tl.pointer_type(tl.int32))
        for r in tl.static_range(WORLD):
            expected = size_words(starts[r + 1] - starts[r], call.rank * 0, lanes)
            tl.store(kept + 4 * r + lanes, tl.where(call.rank == r, expected, came[r]), mask=sizes)
            tl.store(kept + 4 * r + 2 + lanes, expected, mask=sizes)
        tl.store(call.own + PARTS_CAME, call.epoch)
        tl.debug_barrier()
        sync.stop(call, FAULT_PARTS_DIFFER, (found | found >> 8) & 0xFF, WORLD)


@triton.jit
def most_chunks(call, came, chunks, WORLD: tl.constexpr, WARPS: tl.constexpr):
    """Return the most chunks beyond the heads that any rank has, or 0 if the call is stopped."""
    lanes = sync.thread_ids(WARPS)
    most = tl.where(lanes == 2, chunks, 0)
    for r in tl.static_range(WORLD):
        most = tl.maximum(most, tl.where((lanes == 2) & (call.rank != r), came[r], 0))
    return tl.max(most, axis=0) * call.live


@triton.jit
def keep_part(x, spans, out, step, steps, worker, workers, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Copy this program's share of one step of the part that the rank keeps; ``steps`` steps copy all of it."""
    shares = (spans.own_first.to(tl.int64) * 0 + workers) * steps
    share = ((spans.own_nbytes + shares - 1) // shares + 15) // 16 * 16
    start = (step * workers + worker) * share
    size = bytes_in_chunk(spans.own_nbytes, start, share)
    for at in range(0, words_in(size), BLOCK):
        offs = at + tl.arange(0, BLOCK)
        to = spans.own_start + start
        store_words(out, to, offs, load_words(x, spans.own_first + start, offs, size, UNIT), size, UNIT)


@triton.jit
def send_parts(
    call, addresses, x, spans, place, first_word, stride, start, nbytes, CELLS: tl.constexpr, SHAPE: tl.constexpr
):
    """Send each peer ``nbytes`` of its part from ``start`` on: tiles at ``first_word``, ``stride`` words apart."""
    for at in range(first_word, words_in(bytes_in_chunk(spans.longest_sent, start, nbytes)), stride):
        offs = at + tl.arange(0, SHAPE.HEAD_BLOCK if CELLS else SHAPE.BLOCK)
        tiles = ()
        for i in tl.static_range(SHAPE.WORLD - 1):
            size = bytes_in_chunk(spans.sizes[i], start, nbytes)
            tiles = tiles + (load_words(x, spans.firsts[i] + start, offs, size, SHAPE.UNIT),)
        for i in tl.static_range(SHAPE.WORLD - 1):
            mask = offs < words_in(bytes_in_chunk(spans.sizes[i], start, nbytes))
            sync.store_to(call, addresses[i], place, offs, tiles[i], mask, CELLS)


@dataclass(frozen=True, slots=True)
class UnevenShape(TileShape):
    """An uneven all_to_all; heads pass in tiles of ``HEAD_BLOCK`` words."""

    HEAD_BLOCK: int


@kernel(shape=UnevenShape)
def exchange_parts(
    x,
    out,
    entry: Entry,
    spans: Spans,
    head_nbytes,  # multiples of 16
    chunk_nbytes,
    cells_at,
    cells_quads,
    window_at,
    progress_at,
    SHAPE: tl.constexpr,
):
    """Copy part j of x into part ``rank`` of rank j's out."""
    rank = entry.rank
    WORLD: tl.constexpr = SHAPE.WORLD
    BLOCK: tl.constexpr = SHAPE.BLOCK
    UNIT: tl.constexpr = SHAPE.UNIT
    HEAD_BLOCK: tl.constexpr = SHAPE.HEAD_BLOCK
    WARPS: tl.constexpr = SHAPE.WARPS
    worker = tl.program_id(0) - 1
    workers = tl.num_programs(0) - 1
    addresses = sync.peer_addresses(entry.peers, rank, 0, WORLD)
    starts = spans.starts
    await_prior_kernel(SHAPE.PDL)
    call = sync.enter(entry, WARPS, False)  # the program has already waited for the prior kernel
    zero = call.epoch * 0  # 64 bits wide, as sizes are; the interpreter takes a small number for a 32-bit one
    buffer = sync.cells_offset(call.epoch, cells_at, cells_quads)
    stride = HEAD_QUADS_BEFORE + head_nbytes // 16 * 2
    mine = buffer + rank * stride
    if tl.program_id(0) == 0:
        lanes = sync.thread_ids(WARPS)
        for i in tl.static_range(WORLD - 1):
            words = size_words(spans.sizes[i], spans.chunks_sent, lanes)
            sync.store_to(call, addresses[i], mine, lanes, words, lanes < SIZE_WORDS, True)
        sync.exchange_headers(call, rank * 0, False, WORLD, WARPS, SHAPE.PDL)
        call = sync.with_status(call, (sync.read_abort_word(call.own, WARPS) == 0).to(tl.int32), call.started)
        compare_sizes(call, buffer, stride, starts, WORLD, WARPS)
    else:
        send_parts(
            call,
            addresses,
            x,
            spans,
            mine + HEAD_QUADS_BEFORE,
            worker * HEAD_BLOCK,
            workers * HEAD_BLOCK,
            zero,
            head_nbytes,
            True,
            SHAPE,
        )
        sync.leave_epoch(call, rank * 0, False)
        release_next_kernel(SHAPE.PDL)
        heads = buffer + HEAD_QUADS_BEFORE
        longest = spans.longest_received
        for at in range(
            worker * HEAD_BLOCK, words_in(bytes_in_chunk(longest, zero, head_nbytes)), workers * HEAD_BLOCK
        ):
            offs = at + tl.arange(0, HEAD_BLOCK)
            came_nbytes = ()
            masks = ()
            for r in tl.static_range(WORLD):
                size = bytes_in_chunk(starts[r + 1] - starts[r], zero, head_nbytes)
                size = tl.where(rank == r, 0, size)
                came_nbytes = came_nbytes + (size,)
                masks = masks + (offs < words_in(size),)
            parts, call = sync.await_words(call, heads, stride, offs, masks, rank * 0, True, WORLD, WORLD)
            for r in tl.static_range(WORLD):
                store_words(out, starts[r], offs, nan_unless(call.live, parts[r], SHAPE.DTYPE), came_nbytes[r], UNIT)
        came, call = await_sizes(call, buffer, stride, WORLD, WARPS)
        most = most_chunks(call, came, spans.chunks_sent, WORLD, WARPS)
        steps = (most + workers - 1) // workers  # the most of any program, so that all divide the kept part alike
        turns = tl.maximum(steps, 1)
        if steps == 0:
            keep_part(x, spans, out, zero, turns, worker, workers, UNIT, BLOCK)
        else:
            progress = progress_at + worker * FLAG_ROW_QUADS
            place_quads = chunk_nbytes // 16 * WORLD
            window = window_at + worker * CHUNKS_SENT * place_quads
            sync.raise_progress(call, progress, 0, WORLD, WARPS)
            # the peers no longer read what an earlier call left there
            call = sync.await_progress(call, progress, 0, WORLD, WARPS)
            for step in range(0, steps + 1):
                turn = rank * 0 + step
                start = head_nbytes + ((zero + step) * workers + worker) * chunk_nbytes
                if step < steps:
                    place = window + turn % CHUNKS_SENT * place_quads + rank * (chunk_nbytes // 16)
                    send_parts(call, addresses, x, spans, place, rank * 0, BLOCK, start, chunk_nbytes, False, SHAPE)
                    keep_part(x, spans, out, zero + step, turns, worker, workers, UNIT, BLOCK)
                if step > 0:
                    call = sync.await_progress(call, progress, step, WORLD, WARPS)
                    place = window + (turn - 1) % CHUNKS_SENT * place_quads
                    before = start - workers * chunk_nbytes
                    for at in range(0, words_in(bytes_in_chunk(longest, before, chunk_nbytes)), BLOCK):
                        offs = at + tl.arange(0, BLOCK)
                        came_nbytes = ()
                        parts = ()
                        for r in tl.static_range(WORLD):
                            size = bytes_in_chunk(starts[r + 1] - starts[r], before, chunk_nbytes)
                            size = tl.where(rank == r, 0, size)
                            came_nbytes = came_nbytes + (size,)
                            chunk = place + r * (chunk_nbytes // 16)
                            parts = parts + (load_window(call, chunk, offs, offs < words_in(size)),)
                        for r in tl.static_range(WORLD):
                            words = nan_unless(call.live, parts[r], SHAPE.DTYPE)
                            store_words(out, starts[r] + before, offs, words, came_nbytes[r], UNIT)
                if step < steps:
                    sync.raise_progress(call, progress, step + 1, WORLD, WARPS)


HEAD_BYTES = 128 << 10
"""The most bytes of a head: beyond that, the window is faster than cells at twice the bytes."""


def bind(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of an all_to_all with uneven parts, whose sizes each call supplies."""
    bound = context.launch(
        exchange_parts,
        plan,
        tensors="x, out and sizes",
        head_nbytes=head_bytes(context),
        chunk_nbytes=plan.launch.chunk_bytes,
        HEAD_BLOCK=plan.launch.block_words if INTERPRETED else 32 * plan.launch.num_warps,
        spans=_OPEN,
    )
    return bound._replace(of_sizes=functools.lru_cache(256)(functools.partial(sized_arguments, plan, context)))


def sized_arguments(plan: CallPlan, context: KernelContext, sizes: tuple[int, ...]) -> Sequence[int]:
    """Return the elements of :class:`Spans`, given how many elements this rank sends to, then receives from, each rank.

    Raises ConfigError if a part takes more steps through the window than can be counted.
    """
    item, world_size, rank, shape = wire.DTYPES[plan.dtype], context.world_size, context.rank, plan.launch
    nbytes = [item * size for size in sizes]
    sent, received = nbytes[:world_size], nbytes[world_size:]
    longest_sent, longest_received = (max(*half[:rank], *half[rank + 1 :], 0) for half in (sent, received))
    chunks = -(-max(longest_sent - head_bytes(context), 0) // shape.chunk_bytes)
    steps = -(-chunks // shape.programs)
    if steps + 1 >= 1 << layout.PROGRESS_STEP_BITS:
        raise ConfigError(
            f"all_to_all: a part of {longest_sent} bytes takes {steps} steps through a window of "
            f"{context.layout.window_quads * layout.QUAD} bytes; a larger max_bytes makes them fewer"
        )
    firsts, starts = (list(itertools.accumulate(half, initial=0)) for half in (sent, received))
    peers = [*range(rank + 1, world_size), *range(rank)]
    unused = wire.MAX_WORLD_SIZE - world_size
    return (
        *(firsts[peer] for peer in peers),
        *[0] * unused,
        *(sent[peer] for peer in peers),
        *[0] * unused,
        *(firsts[rank], starts[rank], sent[rank]),
        *starts,
        *[starts[-1]] * unused,
        *(longest_sent, longest_received, chunks),
    )


def head_bytes(context: KernelContext) -> int:
    """Return the bytes of a head: as many as fit in the cells of a call, the same on all ranks."""
    capacity = context.layout.cells_quads // context.world_size - HEAD_QUADS_BEFORE.value
    return min(HEAD_BYTES, capacity // 2 * layout.QUAD)
