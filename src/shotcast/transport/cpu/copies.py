"""One-shot collectives that only move bytes: every rank publishes its data, and every rank copies what it needs.

They support any dtype and are exact to the bit. An all-gather of tensors that all ranks map, and a broadcast of a
tensor that the root's peers map, stage nothing: every rank reads the tensors directly.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import copy, load
from shotcast.device.cpu.compilation import CompiledSchedule
from shotcast.transport.cpu.host_call import HostCall, for_all_ranks
from shotcast.transport.cpu.layout import CHUNK, EXTENTS, NBYTES, OFFSETS, ROOT
from shotcast.transport.cpu.mapped import X, is_mapped, place, tell_places
from shotcast.transport.cpu.staging import generation, wrap_rank
from shotcast.transport.cpu.waiting import ABORTED, DONE, await_all, await_peer, begin, finish, meet, publish, region


def all_gather(context: int, plan: int, x: int, out: int) -> int:
    """out = the parts of all ranks in order. x: this rank's part. Any part of the plan's EXTENTS may be empty."""
    tell_places(context, plan, x, x)
    word, rank, world_size, step = begin(context, plan)
    if word == 0:
        return ABORTED
    chunk, longest = load(plan + CHUNK), 0
    for peer in range(world_size):
        longest = max(longest, load(plan + EXTENTS + 8 * peer))
    first, done = step, 0
    mapped = is_mapped(context, rank)
    while True:
        staging = generation(context, step)
        size = max(0, min(chunk, load(plan + EXTENTS + 8 * rank) - done))
        unstaged = mapped and step == first
        if not unstaged:
            copy(region(context, rank) + staging, x + done, size)
        step = publish(context, step)
        if not unstaged:
            copy(out + load(plan + OFFSETS + 8 * rank) + done, x + done, size)
        ranks = 1 if unstaged else 0
        for distance in range(1, world_size):
            peer = wrap_rank(rank + distance, world_size)
            status = await_peer(context, peer, step, word)
            if status != DONE:
                return status
            if step == first + 1 and is_mapped(context, peer):
                ranks += 1
            elif not unstaged:
                size = max(0, min(chunk, load(plan + EXTENTS + 8 * peer) - done))
                copy(out + load(plan + OFFSETS + 8 * peer) + done, region(context, peer) + staging, size)
        if ranks == world_size:
            for distance in range(world_size):
                peer = wrap_rank(rank + distance, world_size)
                source = region(context, peer) + place(context, peer, X)
                copy(out + load(plan + OFFSETS + 8 * peer), source, load(plan + EXTENTS + 8 * peer))
            return meet(context, step, word)
        if ranks > 0:
            continue  # these ranks staged nothing, as all ranks know, so all stage this chunk again
        done += chunk
        if done >= longest:
            return finish(context, step)


def all_to_all(context: int, plan: int, x: int, out: int) -> int:
    """Block r of out = block ``rank`` of x_r. x, out: N blocks, nbytes in all."""
    word, rank, world_size, step = begin(context, plan)
    if word == 0:
        return ABORTED
    block, chunk = load(plan + NBYTES) // world_size, load(plan + CHUNK)
    done = 0
    while True:
        size = min(chunk, block - done)
        staging = generation(context, step)
        for peer in range(world_size):
            if peer != rank:
                copy(region(context, rank) + staging + peer * chunk, x + peer * block + done, size)
        step = publish(context, step)
        copy(out + rank * block + done, x + rank * block + done, size)
        for distance in range(1, world_size):
            peer = wrap_rank(rank + distance, world_size)
            status = await_peer(context, peer, step, word)
            if status != DONE:
                return status
            copy(out + peer * block + done, region(context, peer) + staging + rank * chunk, size)
        done += size
        if done >= block:
            return finish(context, step)


def broadcast(context: int, plan: int, x: int, out: int) -> int:
    """out = the root's x. x, out: nbytes; they may be the same, and x is read on the root only."""
    tell_places(context, plan, x, x)
    word, rank, _, step = begin(context, plan)
    if word == 0:
        return ABORTED
    nbytes, chunk, root = load(plan + NBYTES), load(plan + CHUNK), load(plan + ROOT)
    first, done = step, 0
    while True:
        size = min(chunk, nbytes - done)
        staging = generation(context, step)
        if rank == root and is_mapped(context, root):
            step = publish(context, publish(context, step))
            copy(out, x, nbytes)
            break
        if rank == root:
            # Every rank must have read step - 2. At the first step all of them have, since the previous call is over.
            if step > first:
                status = await_all(context, step, word)
                if status != DONE:
                    return status
            copy(region(context, rank) + staging, x + done, size)
            step = publish(context, step)
            copy(out + done, x + done, size)
        else:
            step = publish(context, step)
            status = await_peer(context, root, step, word)
            if status != DONE:
                return status
            if is_mapped(context, root):
                copy(out, region(context, root) + place(context, root, X), nbytes)
                step = publish(context, step)
                break
            copy(out + done, region(context, root) + staging, size)
        done += size
        if done >= nbytes:
            break
    # The root's next call overwrites the staging of the step before last, or the root's tensor may have been reused by
    # then. The other ranks only wait until all have started.
    status = await_all(context, step if rank == root else first + 1, word)
    return status if status != DONE else finish(context, step)


def barrier(context: int, plan: int, x: int, out: int) -> int:
    """Wait until every rank has called. A barrier also precedes a vendor's collective, to compare headers."""
    word, _, _, step = begin(context, plan)
    return meet(context, step, word) if word != 0 else ABORTED


ALL_GATHER = HostCall(schedule=CompiledSchedule(all_gather))
ALL_TO_ALL = HostCall(schedule=CompiledSchedule(all_to_all), chunk=for_all_ranks)
BROADCAST = HostCall(schedule=CompiledSchedule(broadcast))
BARRIER = HostCall(schedule=CompiledSchedule(barrier))
