"""Collectives with a root: reduce, gather and scatter.

Data moves only to or from the root. Each step waits for all ranks, which therefore see each other's headers, and a
generation is overwritten only after every rank has read it.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import copy, load
from shotcast.device.cpu.compilation import CompiledSchedule
from shotcast.transport.cpu import one_shot, two_shot
from shotcast.transport.cpu.host_call import HostCall, for_all_ranks, reductions
from shotcast.transport.cpu.layout import CHUNK, NBYTES, ROOT
from shotcast.transport.cpu.one_shot import add, read_all
from shotcast.transport.cpu.staging import generation
from shotcast.transport.cpu.two_shot import by_slices, take_slices
from shotcast.transport.cpu.waiting import ABORTED, DONE, await_all, begin, finish, publish, region


def gather(context: int, plan: int, x: int, out: int) -> int:
    """out = the parts of all ranks in order, at the root. x: this rank's part; all parts together have nbytes."""
    word, rank, world_size, step = begin(context, plan)
    if word == 0:
        return ABORTED
    root, part, chunk = load(plan + ROOT), load(plan + NBYTES) // world_size, load(plan + CHUNK)
    done = 0
    while True:
        size = min(chunk, part - done)
        staging = generation(context, step)
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
    word, rank, world_size, step = begin(context, plan)
    if word == 0:
        return ABORTED
    root, part, chunk = load(plan + ROOT), load(plan + NBYTES) // world_size, load(plan + CHUNK)
    done = 0
    while True:
        size = min(chunk, part - done)
        staging = generation(context, step)
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
    """out = x_0 + ... + x_{N-1} at the root, which reads all messages. x, out: nbytes; they may be the same."""
    return read_all(add, load(plan + ROOT), context, plan, x, out)


def reduce_by_slices(context: int, plan: int, x: int, out: int) -> int:
    """out = x_0 + ... + x_{N-1} at the root: each rank sums a slice, which the root reads."""
    return by_slices(take_slices, load(plan + ROOT), context, plan, x, out)


GATHER = HostCall(schedule=CompiledSchedule(gather))
SCATTER = HostCall(schedule=CompiledSchedule(scatter), chunk=for_all_ranks)
REDUCE_AT_ROOT = HostCall(schedule=CompiledSchedule(reduce_at_root), chunk=one_shot.chunk_limits, arithmetic=reductions)
REDUCE_BY_SLICES = HostCall(
    schedule=CompiledSchedule(reduce_by_slices), chunk=two_shot.chunk_limits, arithmetic=reductions
)
