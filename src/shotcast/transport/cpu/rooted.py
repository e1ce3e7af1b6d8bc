"""Collectives with a root: reduce, gather and scatter.

Data moves to the root or from it alone; the others publish what it reads, or read what it publishes. All ranks make
the same steps, and each step waits for all, so they find each other's headers, and a generation is written again only
when everybody has read it.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import call_arithmetic, copy, load, store
from shotcast.device.cpu.compilation import Schedule
from shotcast.transport.cpu import one_shot, two_shot
from shotcast.transport.cpu.host_call import HostCall, for_all_ranks, reductions
from shotcast.transport.cpu.layout import (
    ARITHMETIC,
    CHUNK,
    CONTROL_BYTES,
    GENERATION,
    ITEMSIZE,
    NBYTES,
    RANK,
    ROOT,
    SOURCES,
    STEP,
    WORLD,
)
from shotcast.transport.cpu.slices import slice_size
from shotcast.transport.cpu.waiting import ABORTED, DONE, await_all, begin, finish, publish, region


def gather(context: int, plan: int, x: int, out: int) -> int:
    """out = the parts of all ranks in order, at the root. x: this rank's part; all parts have nbytes together."""
    word = begin(context, plan)
    if word == 0:
        return ABORTED
    rank, world_size, step = load(context + RANK), load(context + WORLD), load(context + STEP)
    root, part, chunk = load(plan + ROOT), load(plan + NBYTES) // world_size, load(plan + CHUNK)
    generation_bytes = load(context + GENERATION)
    done = 0
    while True:
        size = min(chunk, part - done)
        staging = CONTROL_BYTES + (step & 1) * generation_bytes
        if rank != root:
            copy(region(context, rank) + staging, x + done, size)
        step = publish(context, step)
        if rank == root:
            copy(out + rank * part + done, x + done, size)
        status = await_all(context, step, word)
        if status != DONE:
            return status
        if rank == root:
            for peer in range(world_size):
                if peer != rank:
                    copy(out + peer * part + done, region(context, peer) + staging, size)
        done += size
        if done >= part:
            return finish(context, step)


def scatter(context: int, plan: int, x: int, out: int) -> int:
    """out = part ``rank`` of the root's x, which has nbytes. x is read on the root only."""
    word = begin(context, plan)
    if word == 0:
        return ABORTED
    rank, world_size, step = load(context + RANK), load(context + WORLD), load(context + STEP)
    root, part, chunk = load(plan + ROOT), load(plan + NBYTES) // world_size, load(plan + CHUNK)
    generation_bytes = load(context + GENERATION)
    done = 0
    while True:
        size = min(chunk, part - done)
        staging = CONTROL_BYTES + (step & 1) * generation_bytes
        if rank == root:
            for peer in range(world_size):
                if peer != rank:
                    copy(region(context, rank) + staging + peer * chunk, x + peer * part + done, size)
        step = publish(context, step)
        if rank == root:
            copy(out + done, x + rank * part + done, size)
        status = await_all(context, step, word)
        if status != DONE:
            return status
        if rank != root:
            copy(out + done, region(context, root) + staging + rank * chunk, size)
        done += size
        if done >= part:
            return finish(context, step)


def reduce_at_root(context: int, plan: int, x: int, out: int) -> int:
    """out = x_0 + ... + x_{N-1} at the root, which reads the messages of all. x, out: nbytes; they may be the same."""
    word = begin(context, plan)
    if word == 0:
        return ABORTED
    rank, world_size, step = load(context + RANK), load(context + WORLD), load(context + STEP)
    nbytes, chunk, itemsize = load(plan + NBYTES), load(plan + CHUNK), load(plan + ITEMSIZE)
    root, function = load(plan + ROOT), load(plan + ARITHMETIC)
    generation_bytes = load(context + GENERATION)
    done = 0
    while True:
        size = min(chunk, nbytes - done)
        staging = CONTROL_BYTES + (step & 1) * generation_bytes
        if rank != root:
            copy(region(context, rank) + staging, x + done, size)
        step = publish(context, step)
        status = await_all(context, step, word)
        if status != DONE:
            return status
        if rank == root:
            for peer in range(world_size):
                store(context + SOURCES + 8 * peer, region(context, peer) + staging)
            store(context + SOURCES + 8 * rank, x + done)
            call_arithmetic(function, out + done, context + SOURCES, world_size, size // itemsize)
        done += size
        if done >= nbytes:
            return finish(context, step)


def reduce_by_slices(context: int, plan: int, x: int, out: int) -> int:
    """out = x_0 + ... + x_{N-1} at the root: each rank adds up a slice, which the root reads.

    A generation holds this rank's reduced slice of the previous chunk, then its contribution to this chunk, as in the
    two-shot all-reduce.
    """
    word = begin(context, plan)
    if word == 0:
        return ABORTED
    rank, world_size, step = load(context + RANK), load(context + WORLD), load(context + STEP)
    nbytes, chunk, itemsize = load(plan + NBYTES), load(plan + CHUNK), load(plan + ITEMSIZE)
    root, function = load(plan + ROOT), load(plan + ARITHMETIC)
    generation_bytes = load(context + GENERATION)
    contribution = slice_size(chunk, world_size)
    own = region(context, rank)
    start, previous_start, previous_size = 0, 0, 0
    while True:
        staging = CONTROL_BYTES + (step & 1) * generation_bytes
        size = min(chunk, nbytes - start)
        part = slice_size(size, world_size)
        low, high = min(rank * part, size), min((rank + 1) * part, size)
        if size > 0:
            copy(own + staging + contribution, x + start, low)
            copy(own + staging + contribution + high, x + start + high, size - high)
        step = publish(context, step)
        status = await_all(context, step, word)
        if status != DONE:
            return status

        if high > low:
            for peer in range(world_size):
                store(context + SOURCES + 8 * peer, region(context, peer) + staging + contribution + low)
            store(context + SOURCES + 8 * rank, x + start + low)
            # every peer has published this step, so it has read the other generation, which may be written now
            result = own + CONTROL_BYTES + (step & 1) * generation_bytes
            if rank == root:
                result = out + start + low
            call_arithmetic(function, result, context + SOURCES, world_size, (high - low) // itemsize)

        if previous_size > 0 and rank == root:
            part = slice_size(previous_size, world_size)
            for peer in range(world_size):
                low, high = min(peer * part, previous_size), min((peer + 1) * part, previous_size)
                if peer != rank:
                    copy(out + previous_start + low, region(context, peer) + staging, high - low)

        if size == 0:
            return finish(context, step)
        previous_start, previous_size = start, size
        start += size


GATHER = HostCall(schedule=Schedule(gather))
SCATTER = HostCall(schedule=Schedule(scatter), chunk=for_all_ranks)
REDUCE_AT_ROOT = HostCall(schedule=Schedule(reduce_at_root), chunk=one_shot.chunk_limits, arithmetic=reductions)
REDUCE_BY_SLICES = HostCall(schedule=Schedule(reduce_by_slices), chunk=two_shot.chunk_limits, arithmetic=reductions)
