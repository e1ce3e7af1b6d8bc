"""One-shot reductions: one step, in which every rank reads the data of every other.

They win for short messages: there is one synchronization, but each rank reads the N - 1 whole messages of the others.
The sums are in rank order, accumulated in float32 and rounded once, so they have the bits of two-shot.

A reduce-scatter of tensors that all ranks map stages nothing: each rank reads its block of all of them.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import call_arithmetic, copy, load, store
from shotcast.device.cpu.compilation import Schedule
from shotcast.transport.cpu.host_call import ChunkLimits, HostCall, for_all_ranks, reductions
from shotcast.transport.cpu.layout import (
    ARITHMETIC,
    CHUNK,
    CONTROL_BYTES,
    GENERATION,
    ITEMSIZE,
    NBYTES,
    RANK,
    SOURCES,
    STEP,
    WORLD,
)
from shotcast.transport.cpu.mapped import X, is_mapped, mapped_ranks, meet, place, tell_places
from shotcast.transport.cpu.waiting import ABORTED, DONE, await_all, begin, finish, publish, region
from shotcast.wire import CallPlan


def all_reduce(context: int, plan: int, x: int, out: int) -> int:
    """out = x_0 + ... + x_{N-1} on every rank. x, out: nbytes; they may be the same."""
    word = begin(context, plan)
    if word == 0:
        return ABORTED
    rank, world_size, step = load(context + RANK), load(context + WORLD), load(context + STEP)
    nbytes, chunk, itemsize = load(plan + NBYTES), load(plan + CHUNK), load(plan + ITEMSIZE)
    function = load(plan + ARITHMETIC)
    generation_bytes = load(context + GENERATION)
    done = 0
    while True:
        size = min(chunk, nbytes - done)
        staging = CONTROL_BYTES + (step & 1) * generation_bytes
        if world_size > 1:
            copy(region(context, rank) + staging, x + done, size)
        step = publish(context, step)
        status = await_all(context, step, word)
        if status != DONE:
            return status
        for peer in range(world_size):
            store(context + SOURCES + 8 * peer, region(context, peer) + staging)
        store(context + SOURCES + 8 * rank, x + done)
        call_arithmetic(function, out + done, context + SOURCES, world_size, size // itemsize)
        done += size
        if done >= nbytes:
            return finish(context, step)


def reduce_scatter(context: int, plan: int, x: int, out: int) -> int:
    """out = block ``rank`` of x_0 + ... + x_{N-1}. x: N blocks, nbytes in all; out: one block."""
    tell_places(context, plan, x, x)
    word = begin(context, plan)
    if word == 0:
        return ABORTED
    rank, world_size, step = load(context + RANK), load(context + WORLD), load(context + STEP)
    block, itemsize = load(plan + NBYTES) // world_size, load(plan + ITEMSIZE)
    chunk = load(plan + CHUNK)
    function = load(plan + ARITHMETIC)
    generation_bytes = load(context + GENERATION)
    first, done = step, 0
    mapped = is_mapped(context, rank)
    while True:
        size = min(chunk, block - done)
        staging = CONTROL_BYTES + (step & 1) * generation_bytes
        for peer in range(world_size):
            if peer != rank and not (mapped and step == first):
                copy(region(context, rank) + staging + peer * chunk, x + peer * block + done, size)
        step = publish(context, step)
        status = await_all(context, step, word)
        if status != DONE:
            return status
        if step == first + 1:
            ranks = mapped_ranks(context)
            if ranks == world_size:
                for peer in range(world_size):
                    store(context + SOURCES + 8 * peer, region(context, peer) + place(context, peer, X) + rank * block)
                call_arithmetic(function, out, context + SOURCES, world_size, block // itemsize)
                return meet(context, step, word)
            if ranks > 0:
                continue  # they have staged nothing, which all ranks know, and stage it again
        for peer in range(world_size):
            store(context + SOURCES + 8 * peer, region(context, peer) + staging + rank * chunk)
        store(context + SOURCES + 8 * rank, x + rank * block + done)
        call_arithmetic(function, out + done, context + SOURCES, world_size, size // itemsize)
        done += size
        if done >= block:
            return finish(context, step)


def chunk_limits(plan: CallPlan, world_size: int, room: int) -> ChunkLimits:
    """Return the limits of a step in which a rank stages its own message; ``room``: bytes of a generation."""
    return ChunkLimits(room, (512 << 10) // world_size)


ALL_REDUCE = HostCall(schedule=Schedule(all_reduce), chunk=chunk_limits, arithmetic=reductions)
REDUCE_SCATTER = HostCall(schedule=Schedule(reduce_scatter), chunk=for_all_ranks, arithmetic=reductions)
