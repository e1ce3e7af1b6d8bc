"""One-shot reductions: a single step in which every rank reads the data of every peer.

They win for short messages: there is one synchronization, but each rank reads all N - 1 messages of its peers in full.
Sums are accumulated in rank order in float32 and rounded once, so they match two-shot bit for bit.

A reduce-scatter of tensors that all ranks map stages nothing: each rank reads its block directly from all of them.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import call_arithmetic, copy, load, store
from shotcast.device.cpu.compilation import CompiledSchedule
from shotcast.device.cpu.lazy_numba import HostFunction, njit
from shotcast.transport.cpu.host_call import ChunkLimits, HostCall, for_all_ranks, reductions
from shotcast.transport.cpu.layout import ARITHMETIC, RANK, SOURCES, STEP, WORLD
from shotcast.transport.cpu.mapped import X, is_mapped, mapped_ranks, place, tell_places
from shotcast.transport.cpu.staging import generation, set_sources, sizes
from shotcast.transport.cpu.waiting import ABORTED, DONE, await_all, begin, finish, meet, publish, region
from shotcast.wire import CallPlan


@njit(error_model="numpy")
def add(context: int, plan: int, target: int, count: int) -> None:
    """Store the sum of ``count`` elements of all sources at ``target``."""
    call_arithmetic(load(plan + ARITHMETIC), target, context + SOURCES, load(context + WORLD), count)


@njit(error_model="numpy")
def read_all(sum_up: HostFunction, root: int, context: int, plan: int, x: int, out: int) -> int:
    """Let ``root`` (-1 for every rank) read the messages of all ranks and add them with ``sum_up``, as :func:`add`
    does.

    x, out: nbytes; they may be the same.
    """
    word, rank, world_size, step = begin(context, plan)
    if word == 0:
        return ABORTED
    nbytes, chunk, itemsize = sizes(plan)
    done = 0
    while True:
        size = min(chunk, nbytes - done)
        staging = generation(context, step)
        if world_size > 1 and rank != root:
            copy(region(context, rank) + staging, x + done, size)
        step = publish(context, step)
        status = await_all(context, step, word)
        if status != DONE:
            return status
        if root < 0 or rank == root:
            set_sources(context, staging, x + done)
            sum_up(context, plan, out + done, size // itemsize)
        done += size
        if done >= nbytes:
            return finish(context, step)


def all_reduce(context: int, plan: int, x: int, out: int) -> int:
    """out = x_0 + ... + x_{N-1} on every rank. x, out: nbytes; they may be the same."""
    return read_all(add, -1, context, plan, x, out)


@njit(error_model="numpy")
def read_blocks(sum_up: HostFunction, maps: bool, context: int, plan: int, word: int, x: int, out: int) -> int:
    """Let every rank read its block of all messages and add the blocks with ``sum_up``, as :func:`add` does.

    ``maps`` says that tensors may be mapped. x: N blocks, nbytes in all; out: one block. The call must have begun.
    """
    rank, world_size, step = load(context + RANK), load(context + WORLD), load(context + STEP)
    nbytes, chunk, itemsize = sizes(plan)
    block = nbytes // world_size
    first, done = step, 0
    mapped = maps and is_mapped(context, rank)
    while True:
        size = min(chunk, block - done)
        staging = generation(context, step)
        for peer in range(world_size):
            if peer != rank and not (mapped and step == first):
                copy(region(context, rank) + staging + peer * chunk, x + peer * block + done, size)
        step = publish(context, step)
        status = await_all(context, step, word)
        if status != DONE:
            return status
        if maps and step == first + 1:
            ranks = mapped_ranks(context)
            if ranks == world_size:
                for peer in range(world_size):
                    store(context + SOURCES + 8 * peer, region(context, peer) + place(context, peer, X) + rank * block)
                add(context, plan, out, block // itemsize)
                return meet(context, step, word)
            if ranks > 0:
                continue  # these ranks staged nothing, as all ranks know, so all stage it again
        set_sources(context, staging + rank * chunk, x + rank * block + done)
        sum_up(context, plan, out + done, size // itemsize)
        done += size
        if done >= block:
            return finish(context, step)


def reduce_scatter(context: int, plan: int, x: int, out: int) -> int:
    """out = block ``rank`` of x_0 + ... + x_{N-1}. x: N blocks, nbytes in all; out: one block."""
    tell_places(context, plan, x, x)
    word = begin(context, plan)[0]
    return read_blocks(add, True, context, plan, word, x, out) if word != 0 else ABORTED


def chunk_limits(plan: CallPlan, world_size: int, capacity: int) -> ChunkLimits:
    """Compute the limits of a step in which a rank stages its message; ``capacity`` is the bytes of a generation."""
    return ChunkLimits(capacity, (512 << 10) // world_size)


ALL_REDUCE = HostCall(schedule=CompiledSchedule(all_reduce), chunk=chunk_limits, arithmetic=reductions)
REDUCE_SCATTER = HostCall(schedule=CompiledSchedule(reduce_scatter), chunk=for_all_ranks, arithmetic=reductions)
