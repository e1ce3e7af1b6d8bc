"""Ring algorithms: partial sums travel from rank to rank, so every rank exchanges data only with its two neighbors.

All-reduce takes 2N - 2 steps on slices of 1/N of the message. Slice j starts at rank j + 1, is complete at rank j after
N - 1 hops, and goes around once more. Reduce-scatter and all-gather are the two halves of the all-reduce.

Sums are rounded to the dtype at every hop: round(... round(round(0 + x_{j+1}) + x_{j+2}) ... + x_j).
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import call_arithmetic, copy, load, store
from shotcast.device.cpu.compilation import CompiledSchedule
from shotcast.device.cpu.lazy_numba import njit
from shotcast.transport.cpu import copies, one_shot
from shotcast.transport.cpu.host_call import ChunkLimits, HostCall, sums
from shotcast.transport.cpu.layout import ARITHMETIC, CHUNK, EXTENTS, ITEMSIZE, NBYTES, OFFSETS, RANK, SOURCES, WORLD
from shotcast.transport.cpu.staging import generation, slice_size, wrap_rank
from shotcast.transport.cpu.waiting import ABORTED, DONE, await_all, await_peer, begin, finish, publish, region
from shotcast.wire import SLICE_ALIGN, CallPlan


@njit(error_model="numpy")
def _await_neighbours(context: int, step: int, word: int, first_step: int, receives: bool, sends: bool) -> int:
    """Wait for the left neighbor's data if this step receives, and for the right one's permission if it sends."""
    rank, world_size = load(context + RANK), load(context + WORLD)
    status = DONE
    if step == first_step + 1:
        # Any rank may have read, in the previous call, the staging that is overwritten next.
        status = await_all(context, step, word)
    if status == DONE and receives:
        status = await_peer(context, wrap_rank(rank - 1, world_size), step, word)
    # The first step of a call needs no permission: every rank has finished the previous call.
    if status == DONE and sends and step > first_step:
        status = await_peer(context, wrap_rank(rank + 1, world_size), step, word)
    return status


@njit(error_model="numpy")
def _add(context: int, plan: int, target: int, x: int, received: int, nbytes: int) -> None:
    """Store ``received`` + x, rounded, at ``target``; 0 + x if nothing was received."""
    store(context + SOURCES, x if received == 0 else received)
    store(context + SOURCES + 8, x)
    count = nbytes // load(plan + ITEMSIZE)
    call_arithmetic(load(plan + ARITHMETIC), target, context + SOURCES, 1 if received == 0 else 2, count)


@njit(error_model="numpy")
def _pass_slices(
    context: int, plan: int, x: int, out: int, pitch: int, piece: int, first_hop: int, last_hop: int
) -> int:
    """Pass all slices around the ring, one piece of each slice after the other.

    Ranks add to a slice until it is complete at hop N - 1, and then copy it to ``out``. Slices begin ``pitch`` bytes
    apart, or with ``pitch`` 0 as the plan's OFFSETS and EXTENTS say. If the first hop is N - 1, ``x`` is only this
    rank's slice; likewise ``out`` if the last hop is N - 1.
    """
    word, rank, world_size, step = begin(context, plan)
    if word == 0:
        return ABORTED
    left, first_step, complete = wrap_rank(rank - 1, world_size), step, world_size - 1
    longest = pitch
    if pitch == 0:
        for peer in range(world_size):
            longest = max(longest, load(plan + EXTENTS + 8 * peer))
    done = 0
    while True:
        for hop in range(first_hop, last_hop + 1):
            index = wrap_rank(wrap_rank(rank - 1 - hop, world_size), world_size)
            start = index * pitch if pitch > 0 else load(plan + OFFSETS + 8 * index)
            extent = min(pitch, load(plan + NBYTES) - start) if pitch > 0 else load(plan + EXTENTS + 8 * index)
            size = max(0, min(piece, extent - done))
            source = x + done if first_hop == complete else x + start + done
            result = out + done if last_hop == complete else out + start + done
            sends, receives = hop < last_hop, hop > first_hop
            status = _await_neighbours(context, step, word, first_step, receives, sends)
            if status != DONE:
                return status
            received = region(context, left) + generation(context, step - 1) if receives else 0
            staging = region(context, rank) + generation(context, step)
            if hop < complete:
                _add(context, plan, staging, source, received, size)
                step = publish(context, step)
            elif hop == complete and receives:
                _add(context, plan, result, source, received, size)
                if sends:
                    copy(staging, result, size)
                    step = publish(context, step)
            elif sends:
                copy(staging, received if receives else source, size)
                step = publish(context, step)
                copy(result, staging, size)
            else:
                copy(result, received, size)
        done += piece
        if done >= longest:
            break
    status = await_peer(context, wrap_rank(rank + 1, world_size), step, word)
    return status if status != DONE else finish(context, step)


def all_reduce(context: int, plan: int, x: int, out: int) -> int:
    """out = x_0 + ... + x_{N-1} on every rank. x, out: nbytes; they may be the same. At least two ranks.

    A chunk is a piece of every slice. Slices divide the whole message, so the order of a sum does not depend on pieces.
    """
    world_size = load(context + WORLD)
    pitch = slice_size(load(plan + NBYTES), world_size)
    piece = min(pitch, max(SLICE_ALIGN, load(plan + CHUNK) // world_size // SLICE_ALIGN * SLICE_ALIGN))
    return _pass_slices(context, plan, x, out, pitch, piece, 0, 2 * world_size - 2)


def reduce_scatter(context: int, plan: int, x: int, out: int) -> int:
    """out = block ``rank`` of x_0 + ... + x_{N-1}. x: N blocks, nbytes in all; out: one block. At least two ranks."""
    return _pass_slices(context, plan, x, out, 0, load(plan + CHUNK), 0, load(context + WORLD) - 1)


def all_gather(context: int, plan: int, x: int, out: int) -> int:
    """out = the parts of all ranks in order. x: this rank's part. Any part of the plan's EXTENTS may be empty."""
    world_size = load(context + WORLD)
    return _pass_slices(context, plan, x, out, 0, load(plan + CHUNK), world_size - 1, 2 * world_size - 2)


def chunk_limits(plan: CallPlan, world_size: int, capacity: int) -> ChunkLimits:
    """Compute the limits of a step in which a rank stages one slice."""
    return ChunkLimits(capacity * world_size, (256 << 10) * world_size)


ALL_REDUCE = HostCall(
    schedule=CompiledSchedule(all_reduce), chunk=chunk_limits, arithmetic=sums, alone=one_shot.ALL_REDUCE
)
REDUCE_SCATTER = HostCall(schedule=CompiledSchedule(reduce_scatter), arithmetic=sums, alone=one_shot.REDUCE_SCATTER)
ALL_GATHER = HostCall(schedule=CompiledSchedule(all_gather), alone=copies.ALL_GATHER)
