"""Collectives of large messages on few SMs: the grid has one program for each SM that the call may use.

    reduce_scatter:  each rank sends part j to rank j, which adds up:  out_i = x_0[i] + x_1[i] + ...  in rank order,
                     or applies another reduction
    all_reduce:      the same by slices, and then rank j sends its sum to all
    all_gather:      each rank sends x to all
    all_to_all:      each rank sends part j to rank j
    broadcast:       an all_gather in which only the root has a part

Other kernels here have thousands of programs, which pass over the message like a window as long as the GPU has room for
them. Next to a GEMM that fills the GPU, they wait for it to end. This kernel leaves most of the GPU to others: it has
few programs of many warps, each of which passes a share of the message through the window of the peers' regions, chunk
by chunk. ``docs/reference/protocols.md`` ("Progress through a window") lists the steps of a program, and says how it
finds tensors in memory that the ranks map, for which nothing passes through the window.

A program requests all words that a tile needs at once, from local memory and from the window, so it keeps its SM busy.
It waits for a step that ended one step ago, whose stores had that long to arrive. One SM moves 44 GB/s in and as much
out (H200, ``research/sm_wires.py``). That bounds an all_reduce of two ranks, whose programs read and write each byte of
the message twice. Copies move any dtype, exact to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from shotcast import wire
from shotcast.device.triton.intrinsics import kernel
from shotcast.device.triton.launch import Wide
from shotcast.device.triton.reductions import reduce_words, reduced_unless_stopped
from shotcast.device.triton.words import load_words, store_words
from shotcast.errors import ConfigError
from shotcast.transport.triton import layout, sync
from shotcast.transport.triton.binding import KernelContext, KernelLaunch, TileShape, reduction_arguments
from shotcast.transport.triton.sync import Blocks, Entry, Places
from shotcast.wire import CallPlan, Op

ALL_REDUCE = tl.constexpr(0)
REDUCE_SCATTER = tl.constexpr(1)
ALL_GATHER = tl.constexpr(2)
ALL_TO_ALL = tl.constexpr(3)

FLAG_ROW_QUADS = tl.constexpr(layout.FLAG_ROW_QUADS)
PLACE_ROW_QUADS = tl.constexpr(layout.PLACE_ROW_QUADS)
LAG = tl.constexpr(layout.STEPS_IN_FLIGHT)
"""The number of steps between sending a chunk and taking it."""
TURNS = tl.constexpr(2 * layout.STEPS_IN_FLIGHT)
"""The number of places that a program has in either part of the window."""


class SentParts(NamedTuple):
    """The parts of a message, in bytes: the longest, where each begins, and this rank's.

    ``copied_nbytes`` is what this rank copies to its ``out`` in an all_gather: nothing if that is in place.
    """

    longest: tl.tensor
    starts: tuple[tl.tensor, ...]
    own_start: tl.tensor
    own_nbytes: tl.tensor
    copied_nbytes: tl.tensor


@triton.jit
def bytes_in_chunk(part_nbytes, start, chunk_nbytes):
    """Return how many bytes of a part lie in the chunk that begins at its byte ``start``."""
    return tl.minimum(tl.maximum(part_nbytes - start, 0), chunk_nbytes).to(tl.int32)


@triton.jit
def words_in(nbytes):
    """Return the number of words in the whole quads that hold ``nbytes``."""
    return (nbytes + 15) // 16 * 4


@triton.jit
def load_window(call, quads, offs, mask):
    """Load words of this rank's window, bypassing the first cache, which may hold what lay there before."""
    return tl.load(sync.words_at(call.own.to(tl.int64), quads) + offs, mask=mask, other=0, cache_modifier=".cg")


@triton.jit
def other_rank(call, i):
    """Return the ``i``-th of the other ranks, in rank order."""
    return i + (i >= call.rank).to(tl.int32)


@triton.jit
def load_of(call, place, i, offs, size, stride):
    """Load a tile of the ``i``-th other rank's chunk, which is ``size`` bytes in its place in the window."""
    return load_window(call, place + other_rank(call, i) * stride, offs, offs < words_in(size))


@triton.jit
def by_rank(others, own, rank, WORLD: tl.constexpr):
    """Order tiles by rank, given the other ranks' tiles in rank order and this rank's."""
    tiles = (tl.where(rank == 0, own, others[0]),)
    for r in tl.static_range(1, WORLD - 1):
        tiles = tiles + (tl.where(rank == r, own, tl.where(rank < r, others[r - 1], others[r])),)
    return tiles + (tl.where(rank == WORLD - 1, own, others[WORLD - 2]),)


@triton.jit
def load_where_they_lie(x, xs, source, start, own_nbytes, sizes, SHAPE: tl.constexpr):
    """Load the tile at byte ``start`` of a part: this rank's, and those of the other ranks in rank order.

    ``source`` is where the part begins in ``x`` and ``xs``. ``sizes`` are the bytes of each part in an all_gather.
    """
    TILE: tl.constexpr = 4 * SHAPE.MAPPED_BLOCK
    offs = tl.arange(0, TILE // 4)
    size = bytes_in_chunk(own_nbytes, start, TILE)
    others = ()
    for i in tl.static_range(SHAPE.WORLD - 1):
        if SHAPE.KIND == ALL_GATHER:
            size_of_other = bytes_in_chunk(sizes[i], start, TILE)
        else:
            size_of_other = size
        others = others + (load_words(xs[i], source + start, offs, size_of_other, SHAPE.UNIT),)
    return load_words(x, source + start, offs, size, SHAPE.UNIT), others


@triton.jit
def where_they_lie(call, x, out, addresses, row, progress, parts, SHAPE: tl.constexpr):
    """Carry out the operation on tensors that all ranks map, and meet the other ranks."""
    worker = tl.program_id(0)
    workers = tl.num_programs(0)
    KIND: tl.constexpr = SHAPE.KIND
    UNIT: tl.constexpr = SHAPE.UNIT
    WORLD: tl.constexpr = SHAPE.WORLD
    PEERS: tl.constexpr = WORLD - 1
    ADDS: tl.constexpr = KIND < ALL_GATHER
    TILE: tl.constexpr = 4 * SHAPE.MAPPED_BLOCK
    xs = ()
    outs = ()
    begins = ()
    sizes = ()
    for i in tl.static_range(PEERS):
        xs = xs + (sync.tensor_at(call, addresses, row, other_rank(call, i), False),)
        if KIND == ALL_REDUCE:
            outs = outs + (sync.tensor_at(call, addresses, row, other_rank(call, i), True),)
        begin = parts.starts[1]
        end = parts.starts[2]
        for r in tl.static_range(WORLD):
            chosen = other_rank(call, i) == r
            begin = tl.where(chosen, parts.starts[r], begin)
            end = tl.where(chosen, parts.starts[r + 1], end)
        begins = begins + (begin,)
        sizes = sizes + (end - begin,)
    tiles = (((parts.own_nbytes if ADDS else parts.longest) + TILE - 1) // TILE).to(tl.int32)
    tiles = (tiles - worker + workers - 1) // workers  # for this program
    own_part = call.rank * parts.longest
    source = own_part * 0 if KIND == ALL_GATHER else own_part
    offs = tl.arange(0, TILE // 4)
    start = (call.epoch * 0 + worker) * TILE
    own_words, others = load_where_they_lie(x, xs, source, start, parts.own_nbytes, sizes, SHAPE)
    for _ in range(0, tiles):
        # the words of the next tile are on their way while this one is added up and stored
        following = start + workers * TILE
        next_own, next_others = load_where_they_lie(x, xs, source, following, parts.own_nbytes, sizes, SHAPE)
        own_size = bytes_in_chunk(parts.own_nbytes, start, TILE)
        if ADDS:
            words = reduce_words(by_rank(others, own_words, call.rank, WORLD), WORLD, SHAPE.DTYPE, SHAPE.REDUCTION)
            target = start
            if KIND == ALL_REDUCE:
                target = source + start
                for i in tl.static_range(PEERS):
                    store_words(outs[i], target, offs, words, own_size, UNIT)
            store_words(out, target, offs, words, own_size, UNIT)
        else:
            copied = bytes_in_chunk(parts.copied_nbytes, start, TILE)
            store_words(out, parts.own_start + start, offs, own_words, copied, UNIT)
            for i in tl.static_range(PEERS):
                size = bytes_in_chunk(sizes[i], start, TILE)
                store_words(out, begins[i] + start, offs, others[i], size, UNIT)
        start, own_words, others = following, next_own, next_others
    sync.raise_progress(call, progress, 1, WORLD, SHAPE.WARPS)
    call = sync.await_progress(call, progress, 1, WORLD, SHAPE.WARPS)
    if KIND == ALL_REDUCE:
        for i in tl.static_range(PEERS):
            missing = ((sizes[i] + TILE - 1) // TILE).to(tl.int32)
            missing = tl.where(call.live == 0, missing, 0)  # the sums of a peer may not have come
            for tile in range(worker, missing, workers):
                start = (call.epoch * 0 + tile) * TILE
                size = bytes_in_chunk(sizes[i], start, TILE)
                words = load_words(out, begins[i] + start, offs, size, UNIT)
                words = reduced_unless_stopped(call.live, words, SHAPE.DTYPE)
                store_words(out, begins[i] + start, offs, words, size, UNIT)


@triton.jit
def through_window(call, x, out, addresses, progress, window_at, chunk_nbytes, parts, SHAPE: tl.constexpr):
    """Carry out the operation through the window, chunk by chunk."""
    worker = tl.program_id(0)
    workers = tl.num_programs(0)
    rank = call.rank
    WORLD: tl.constexpr = SHAPE.WORLD
    KIND: tl.constexpr = SHAPE.KIND
    WARPS: tl.constexpr = SHAPE.WARPS
    PLACES: tl.constexpr = 2 * TURNS if KIND == ALL_REDUCE else TURNS
    ADDS: tl.constexpr = KIND < ALL_GATHER
    PEERS: tl.constexpr = WORLD - 1
    part_nbytes = parts.longest
    message = parts.starts[8] + call.epoch * 0
    stride = chunk_nbytes // 16
    place_quads = stride * WORLD
    window = window_at + worker * PLACES * place_quads
    chunks = ((part_nbytes + chunk_nbytes - 1) // chunk_nbytes).to(tl.int32)
    chunks = (chunks - worker + workers - 1) // workers  # for this program
    steps = tl.where(chunks > 0, chunks + (2 * LAG if KIND == ALL_REDUCE else LAG), 0)
    own_part = rank * part_nbytes
    for step in range(0, steps):
        turn = rank * 0 + step
        running = call.live
        late_ranks = rank * 0
        if step >= LAG:
            call, late_ranks = sync.await_progress_by_warp(call, progress, step - LAG + 1, WORLD)
        # a chunk that begins at the end of a part is empty, like those after the last
        start = ((call.epoch * 0 + step) * workers + worker) * chunk_nbytes
        before = tl.where(turn >= LAG, start - LAG * workers * chunk_nbytes, part_nbytes)
        first = tl.where(turn >= 2 * LAG, start - 2 * LAG * workers * chunk_nbytes, part_nbytes)
        mine = window + turn % TURNS * place_quads + rank * stride
        came = window + (turn + LAG) % TURNS * place_quads
        sums_mine = window + (TURNS + turn % TURNS) * place_quads + rank * stride
        sums_came = window + (TURNS + (turn + LAG) % TURNS) * place_quads
        own_size = bytes_in_chunk(parts.own_nbytes, before, chunk_nbytes)
        copied_size = own_size
        own_from = own_part + before
        if KIND == ALL_GATHER:
            own_size = bytes_in_chunk(parts.own_nbytes, start, chunk_nbytes)
            copied_size = bytes_in_chunk(parts.copied_nbytes, start, chunk_nbytes)
            own_from = start
        longest = bytes_in_chunk(part_nbytes, start, chunk_nbytes)
        longest = tl.maximum(longest, bytes_in_chunk(part_nbytes, before, chunk_nbytes))
        sent_sizes = ()
        sent_from = ()
        taken_sizes = ()
        taken_to = ()
        taken_from = before
        if KIND == ALL_REDUCE:
            taken_from = first
            longest = tl.maximum(longest, bytes_in_chunk(part_nbytes, first, chunk_nbytes))
        for i in tl.static_range(PEERS):
            part = sync.rotated_peer(rank, worker, i, WORLD) * part_nbytes
            sent_from = sent_from + (part + start,)
            sent_sizes = sent_sizes + (bytes_in_chunk(tl.minimum(part_nbytes, message - part), start, chunk_nbytes),)
            begin = parts.starts[1]
            end = parts.starts[2]
            for r in tl.static_range(WORLD):
                chosen = other_rank(call, i) == r
                begin = tl.where(chosen, parts.starts[r], begin)
                end = tl.where(chosen, parts.starts[r + 1], end)
            taken_sizes = taken_sizes + (bytes_in_chunk(end - begin, taken_from, chunk_nbytes),)
            taken_to = taken_to + (begin + taken_from,)
        for at in range(0, words_in(longest), SHAPE.BLOCK):
            offs = at + tl.arange(0, SHAPE.BLOCK)
            own_words = load_words(x, own_from, offs, own_size, SHAPE.UNIT)
            tiles = ()
            if KIND != ALL_GATHER:
                for i in tl.static_range(PEERS):
                    tiles = tiles + (load_words(x, sent_from[i], offs, sent_sizes[i], SHAPE.UNIT),)
            came_words = ()
            taken = ()
            for i in tl.static_range(PEERS):
                if ADDS:
                    came_words = came_words + (load_of(call, came, i, offs, own_size, stride),)
                if KIND == ALL_REDUCE:
                    taken = taken + (load_of(call, sums_came, i, offs, taken_sizes[i], stride),)
                elif KIND != REDUCE_SCATTER:
                    taken = taken + (load_of(call, came, i, offs, taken_sizes[i], stride),)
            for i in tl.static_range(PEERS):
                if KIND == ALL_GATHER:
                    sync.store_to(call, addresses[i], mine, offs, own_words, offs < words_in(own_size), False)
                else:
                    sync.store_to(call, addresses[i], mine, offs, tiles[i], offs < words_in(sent_sizes[i]), False)
            if ADDS:
                words = reduce_words(by_rank(came_words, own_words, rank, WORLD), WORLD, SHAPE.DTYPE, SHAPE.REDUCTION)
                if KIND == ALL_REDUCE:
                    for i in tl.static_range(PEERS):
                        sync.store_to(call, addresses[i], sums_mine, offs, words, offs < words_in(own_size), False)
                own_words = reduced_unless_stopped(call.live, words, SHAPE.DTYPE)
            own_to = own_from
            if KIND == REDUCE_SCATTER:
                own_to = before
            elif KIND == ALL_GATHER:
                own_to = parts.own_start + start
            store_words(out, own_to, offs, own_words, copied_size, SHAPE.UNIT)
            if KIND != REDUCE_SCATTER:
                for i in tl.static_range(PEERS):
                    words = reduced_unless_stopped(call.live, taken[i], SHAPE.DTYPE)
                    store_words(out, taken_to[i], offs, words, taken_sizes[i], SHAPE.UNIT)
        call = sync.join_warps(call, late_ranks, running, WORLD, WARPS)
        if step + 1 < steps:
            sync.raise_progress(call, progress, step + 1, WORLD, WARPS)


@dataclass(frozen=True, slots=True)
class FewSmsShape(TileShape):
    """A kernel on few SMs; ``KIND`` is its operation.

    ``MAPPED_BLOCK`` is the number of words in a tile of tensors that all ranks map.
    """

    KIND: int
    REDUCTION: int
    MAPPED_BLOCK: int


@kernel(shape=FewSmsShape)
def few_sms(
    x,
    out,
    entry: Entry,
    part_nbytes: tl.int64,  # bytes of the largest part; in x also the distance between parts
    starts,  # part r of the message is the bytes from starts[r] to starts[r + 1], of 64 bits
    chunk_nbytes,  # a multiple of 16
    window_at,
    progress_at,
    places: Places,
    blocks: Blocks,
    SHAPE: tl.constexpr,
):
    """Carry out the operation KIND on x into out."""
    rank = entry.rank
    WORLD: tl.constexpr = SHAPE.WORLD
    KIND: tl.constexpr = SHAPE.KIND
    WARPS: tl.constexpr = SHAPE.WARPS
    worker = tl.program_id(0)
    addresses = sync.peer_addresses(entry.peers, rank, worker, WORLD)
    call = sync.enter(entry, WARPS, SHAPE.PDL)
    part_nbytes = part_nbytes + call.epoch * 0  # the interpreter takes a small number for a 32-bit one
    nbytes = starts[8] + call.epoch * 0
    own_start = nbytes * 0
    own_nbytes = nbytes * 0
    for r in tl.static_range(WORLD):
        own_start = tl.where(rank == r, starts[r], own_start)
        own_nbytes = tl.where(rank == r, starts[r + 1] - starts[r], own_nbytes)
    copied_nbytes = own_nbytes
    if KIND == ALL_GATHER:
        copied_nbytes = tl.where(x.to(tl.int64) == out.to(tl.int64) + own_start, 0, own_nbytes)
    # A separate program for the headers would take an SM. Nothing is sent before all ranks have come anyway.
    if worker == 0:
        sync.exchange_headers(call, rank * 0, False, WORLD, WARPS, False)
        call = sync.with_status(call, (sync.read_abort_word(call.own, WARPS) == 0).to(tl.int32), call.started)
    else:
        sync.leave_epoch(call, rank * 0, False)
    parts = SentParts(part_nbytes, starts, own_start, own_nbytes, copied_nbytes)
    progress = progress_at + worker * FLAG_ROW_QUADS
    row = blocks.rows + (worker * 2 + (call.epoch & 1).to(tl.int32)) * PLACE_ROW_QUADS
    sync.tell_places(call, row, places, WORLD, WARPS)
    sync.raise_progress(call, progress, 0, WORLD, WARPS)
    # the peers no longer read what an earlier call left there
    call = sync.await_progress(call, progress, 0, WORLD, WARPS)
    mapped = call.live != 0
    for r in tl.static_range(WORLD):
        mapped = mapped & (sync.place_of(call, row, r, False) != 0)
        if KIND == ALL_REDUCE:
            mapped = mapped & (sync.place_of(call, row, r, True) != 0)
    if mapped:
        where_they_lie(call, x, out, blocks.addresses, row, progress, parts, SHAPE)
    else:
        through_window(call, x, out, addresses, progress, window_at, chunk_nbytes, parts, SHAPE)


MAPPED_WORDS = 16384
"""The number of words of all ranks that a program holds, with as many more on their way, if tensors are mapped."""

_KINDS = {
    Op.ALL_REDUCE: ALL_REDUCE,
    Op.REDUCE_SCATTER: REDUCE_SCATTER,
    Op.ALL_GATHER: ALL_GATHER,
    Op.ALL_TO_ALL: ALL_TO_ALL,
    Op.BROADCAST: ALL_GATHER,
}


def mapped_block(block: int, warps: int, world_size: int, unit: int) -> int:
    """Return the words in a tile of tensors that all ranks map, given ``block`` words in a tile of the window."""
    if unit != layout.QUAD:
        return min(block, 64 * warps)  # each word takes several registers
    if warps == 1:  # in the interpreter
        return block
    return max(128 * warps, min(MAPPED_WORDS // triton.next_power_of_2(world_size), 512 * warps))


def bind(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of an all_reduce, a reduce_scatter, an all_gather, an all_to_all or a broadcast.

    Raises ConfigError if the launch needs more of the window than there is.
    """
    item, world_size, shape = wire.DTYPES[plan.dtype], context.world_size, plan.launch
    if plan.op is Op.ALL_REDUCE:
        part = wire.slice_bytes(plan.nbytes, world_size)
    elif plan.op is Op.BROADCAST:
        part = plan.nbytes
    else:
        part = max(plan.sizes) * item if plan.sizes else plan.nbytes // world_size
    starts = [min(rank * part, plan.nbytes) for rank in range(world_size + 1)]
    if plan.sizes:
        starts = [sum(plan.sizes[:rank]) * item for rank in range(world_size + 1)]
    elif plan.op is Op.BROADCAST:
        starts = [part * (rank > plan.root) for rank in range(world_size + 1)]
    starts += [starts[-1]] * (wire.MAX_WORLD_SIZE - world_size)
    capacity = context.layout.window_quads * layout.QUAD
    places = layout.places_in_window(plan.op)
    needed = shape.programs * places * world_size * shape.chunk_bytes
    steps = -(-part // (shape.programs * shape.chunk_bytes)) if shape.chunk_bytes else 0
    if shape.chunk_bytes < layout.QUAD or shape.chunk_bytes % layout.QUAD or needed > capacity:
        raise ConfigError(
            f"few_sms: {shape.programs} programs with chunks of {shape.chunk_bytes} bytes (a multiple of 16) do not go "
            f"into a window of {capacity} bytes, which holds {places} chunks of each rank for each program"
        )
    if steps + 2 * layout.STEPS_IN_FLIGHT >= 1 << layout.PROGRESS_STEP_BITS or shape.programs > layout.PROGRESS_ROWS:
        raise ConfigError(f"few_sms: {shape.programs} programs would take {steps} steps with {shape.chunk_bytes} bytes")
    block, unit = shape.block_words, context.unit(plan)
    reduces: dict[str, Any] = {"REDUCTION": 0}
    if plan.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
        found = reduction_arguments(plan, context)
        reduces = {name: found[name] for name in ("DTYPE", "REDUCTION")}
        if found["CELLS"] or plan.reduction not in ("sum", "avg"):
            unit = 1  # each word takes several registers, as if words were not loaded whole
    if unit != layout.QUAD:
        block = min(block, 64 * shape.num_warps)
    return context.launch(
        few_sms,
        plan,
        programs=shape.programs,
        part_nbytes=part,
        starts=tuple(map(Wide, starts)),
        chunk_nbytes=shape.chunk_bytes,
        tensors="x and out in place",
        places=Places(Wide(), Wide()),
        blocks=Blocks(context.layout.places_at, context.blocks_address),
        KIND=_KINDS[plan.op].value,
        **reduces,
        BLOCK=block,
        MAPPED_BLOCK=mapped_block(shape.block_words, shape.num_warps, world_size, unit),
    )
