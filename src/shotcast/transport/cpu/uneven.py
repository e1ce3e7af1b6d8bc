"""An all_to_all with parts of any size, known only to the sender and receiver of each part.

In the first step each rank publishes the sizes of the parts that it sends, and a first chunk of each. The longest part
of all determines the number of steps. A rank compares the sizes that its peers send with the sizes that it expects.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import copy, load, store
from shotcast.device.cpu.compilation import CompiledSchedule
from shotcast.device.cpu.lazy_numba import njit
from shotcast.transport.cpu.host_call import ChunkLimits, HostCall
from shotcast.transport.cpu.layout import CHUNK, EXTENTS, LINE, OFFSETS, PARTS, PARTS_PEER, PARTS_SENT, RANK, WORLD
from shotcast.transport.cpu.staging import generation, wrap_rank
from shotcast.transport.cpu.waiting import ABORTED, DONE, PARTS_DIFFER, await_all, begin, finish, publish, region
from shotcast.wire import CallPlan

_SIZES = LINE
"""Bytes before the chunks of a generation; they hold the sizes of the parts that a rank sends to each rank."""


@njit(error_model="numpy")
def _sent(plan: int, peer: int) -> int:
    """Return the address of the offset, then the bytes, of the part that this rank sends to ``peer``."""
    return plan + PARTS + 16 * peer


@njit(error_model="numpy")
def _look(context: int, plan: int, staging: int, longest: int) -> int:
    """Compare the sizes that peers send with those expected; return the longest part, or -1 if one differs."""
    rank, world_size = load(context + RANK), load(context + WORLD)
    for peer in range(world_size):
        sizes = region(context, peer) + staging
        for other in range(world_size):
            longest = max(longest, load(sizes + 8 * other))
        if load(sizes + 8 * rank) != load(plan + EXTENTS + 8 * peer):
            store(context + PARTS_PEER, peer)
            store(context + PARTS_SENT, load(sizes + 8 * rank))
            return -1
    return longest


def all_to_all(context: int, plan: int, x: int, out: int) -> int:
    """out = the parts that all ranks send to this one, in rank order. The plan's EXTENTS and OFFSETS describe out."""
    word, rank, world_size, step = begin(context, plan)
    if word == 0:
        return ABORTED
    chunk, own, longest, done = load(plan + CHUNK), region(context, rank), 0, 0
    while True:
        staging = generation(context, step)
        for peer in range(world_size):
            nbytes = load(_sent(plan, peer) + 8)
            if done == 0:
                store(own + staging + 8 * peer, nbytes)
            size = max(0, min(chunk, nbytes - done))
            if peer == rank:
                copy(out + load(plan + OFFSETS + 8 * rank) + done, x + load(_sent(plan, rank)) + done, size)
            else:
                copy(own + staging + _SIZES + peer * chunk, x + load(_sent(plan, peer)) + done, size)
        step = publish(context, step)
        status = await_all(context, step, word)
        if status != DONE:
            return status
        if done == 0:
            longest = _look(context, plan, staging, 0)
            if longest < 0:
                return PARTS_DIFFER
        for distance in range(1, world_size):
            peer = wrap_rank(rank + distance, world_size)
            size = max(0, min(chunk, load(plan + EXTENTS + 8 * peer) - done))
            copy(
                out + load(plan + OFFSETS + 8 * peer) + done,
                region(context, peer) + staging + _SIZES + rank * chunk,
                size,
            )
        done += chunk
        if done >= longest:
            return finish(context, step)


def chunk_limits(plan: CallPlan, world_size: int, capacity: int) -> ChunkLimits:
    """Compute the limits of a step that stages a part for each rank after their sizes."""
    return ChunkLimits((capacity - _SIZES) // world_size, (512 << 10) // world_size)


ALL_TO_ALL = HostCall(schedule=CompiledSchedule(all_to_all), chunk=chunk_limits)
