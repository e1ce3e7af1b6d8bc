"""Rings: partial sums travel from rank to rank, so every rank talks to its two neighbours only.

All-reduce takes 2N - 2 steps on slices of 1/N of the message: slice j starts at rank j + 1, is complete at rank j after
N - 1 hops, and goes around once more. Every rank moves 2 (N - 1) / N of the message, as little as possible; the number
of steps is what MultiShot removes. Reduce-scatter and all-gather are its halves.

Sums are rounded to the dtype at every hop: round(... round(round(0 + x_{j+1}) + x_{j+2}) ... + x_j).
"""

from __future__ import annotations

from numba import njit

from shotcast.device.cpu.atomics import call_arithmetic, copy, load, store
from shotcast.device.cpu.compilation import Schedule
from shotcast.transport.cpu.layout import (
    ARITHMETIC,
    CHUNK,
    CONTROL_BYTES,
    EXTENTS,
    GENERATION,
    HEADER,
    ITEMSIZE,
    NBYTES,
    OFFSETS,
    RANK,
    SOURCES,
    STEP,
    WORLD,
)
from shotcast.transport.cpu.slices import around, slice_size
from shotcast.transport.cpu.waiting import ABORTED, DONE, begin, finish, meet, meet_all, publish, region
from shotcast.wire import SLICE_ALIGN


@njit(error_model="numpy")
def _staging(context: int, rank: int, step: int) -> int:
    return region(context, rank) + CONTROL_BYTES + (step & 1) * load(context + GENERATION)


@njit(error_model="numpy")
def _meet_neighbours(context: int, step: int, word: int) -> int:
    """Until step ``step`` may be written (right) and what the left neighbour wrote in the step before it is there."""
    rank, world_size = load(context + RANK), load(context + WORLD)
    status = meet(context, around(rank - 1, world_size), step, word)
    if status == DONE:
        status = meet(context, around(rank + 1, world_size), step, word)
    return status


@njit(error_model="numpy")
def _first_hop(context: int, plan: int, step: int, x: int, nbytes: int) -> None:
    store(context + SOURCES, x)
    target = _staging(context, load(context + RANK), step)
    call_arithmetic(load(plan + ARITHMETIC), target, context + SOURCES, 1, nbytes // load(plan + ITEMSIZE))


@njit(error_model="numpy")
def _hop(context: int, plan: int, step: int, x: int, nbytes: int, target: int) -> None:
    """target = what the left neighbour sent in the step before + x."""
    left = around(load(context + RANK) - 1, load(context + WORLD))
    store(context + SOURCES, _staging(context, left, step - 1))
    store(context + SOURCES + 8, x)
    call_arithmetic(load(plan + ARITHMETIC), target, context + SOURCES, 2, nbytes // load(plan + ITEMSIZE))


def all_reduce(context: int, plan: int, x: int, out: int) -> int:
    """out = x_0 + ... + x_{N-1} on every rank. x, out: nbytes; they may be the same. At least two ranks.

    A chunk is a piece of every slice.
    """
    word = begin(context, load(plan + HEADER))
    if word == 0:
        return ABORTED
    rank, world_size, step = load(context + RANK), load(context + WORLD), load(context + STEP)
    nbytes = load(plan + NBYTES)
    # Slices are of the whole message, so that its pieces do not decide which rank adds what first.
    part = slice_size(nbytes, world_size)
    piece = min(part, max(SLICE_ALIGN, load(plan + CHUNK) // world_size // SLICE_ALIGN * SLICE_ALIGN))
    right, left = around(rank + 1, world_size), around(rank - 1, world_size)
    first = step
    done = 0
    while True:
        for hop in range(2 * world_size - 1):
            sliced = around(around(rank - 1 - hop, world_size), world_size)
            place = sliced * part + done
            length = max(0, min(min(piece, part - done), nbytes - place))
            if hop == 0:
                # The first step of a call needs no permission: everybody has finished the call before.
                if step > first:
                    status = meet(context, right, step, word)
                    if status != DONE:
                        return status
                _first_hop(context, plan, step, x + place, length)
                step = publish(context, step)
                continue
            if hop == 1 and done == 0:
                # What is overwritten next may have been read by anybody in the call before, not by the neighbour only.
                status = meet_all(context, step, word)
                if status != DONE:
                    return status
            if hop == 2 * world_size - 2:
                status = meet(context, left, step, word)
                if status != DONE:
                    return status
                copy(out + place, _staging(context, left, step - 1), length)
                continue
            status = _meet_neighbours(context, step, word)
            if status != DONE:
                return status
            target = _staging(context, rank, step)
            if hop < world_size - 1:
                _hop(context, plan, step, x + place, length, target)
                step = publish(context, step)
            elif hop == world_size - 1:
                _hop(context, plan, step, x + place, length, out + place)
                copy(target, out + place, length)
                step = publish(context, step)
            else:
                copy(target, _staging(context, left, step - 1), length)
                step = publish(context, step)
                copy(out + place, target, length)
        done += piece
        if done >= part:
            break
    status = meet(context, right, step, word)
    if status != DONE:
        return status
    return finish(context, step)


def reduce_scatter(context: int, plan: int, x: int, out: int) -> int:
    """out = block ``rank`` of x_0 + ... + x_{N-1}. x: N blocks, nbytes in all; out: one block. At least two ranks."""
    word = begin(context, load(plan + HEADER))
    if word == 0:
        return ABORTED
    rank, world_size, step = load(context + RANK), load(context + WORLD), load(context + STEP)
    block, chunk = load(plan + NBYTES) // world_size, load(plan + CHUNK)
    right, left = around(rank + 1, world_size), around(rank - 1, world_size)
    first = step
    done = 0
    while True:
        size = min(chunk, block - done)
        for hop in range(world_size):
            place = around(rank - 1 - hop, world_size) * block + done
            if hop == 0:
                if step > first:
                    status = meet(context, right, step, word)
                    if status != DONE:
                        return status
                _first_hop(context, plan, step, x + place, size)
                step = publish(context, step)
                continue
            if hop == 1 and done == 0:
                status = meet_all(context, step, word)
                if status != DONE:
                    return status
            if hop < world_size - 1:
                status = _meet_neighbours(context, step, word)
                if status != DONE:
                    return status
                _hop(context, plan, step, x + place, size, _staging(context, rank, step))
                step = publish(context, step)
            else:
                status = meet(context, left, step, word)
                if status != DONE:
                    return status
                _hop(context, plan, step, x + place, size, out + done)
        done += size
        if done >= block:
            break
    status = meet(context, right, step, word)
    if status != DONE:
        return status
    return finish(context, step)


def all_gather(context: int, plan: int, x: int, out: int) -> int:
    """out = the ranks' parts in order. x: this rank's part; parts as the plan's extents, any may be empty."""
    word = begin(context, load(plan + HEADER))
    if word == 0:
        return ABORTED
    rank, world_size, step = load(context + RANK), load(context + WORLD), load(context + STEP)
    chunk = load(plan + CHUNK)
    right, left = around(rank + 1, world_size), around(rank - 1, world_size)
    longest = 0
    for peer in range(world_size):
        longest = max(longest, load(plan + EXTENTS + 8 * peer))
    copy(out + load(plan + OFFSETS + 8 * rank), x, load(plan + EXTENTS + 8 * rank))
    first = step
    done = 0
    while True:
        for hop in range(world_size):
            part = around(rank - hop, world_size)
            size = max(0, min(chunk, load(plan + EXTENTS + 8 * part) - done))
            place = out + load(plan + OFFSETS + 8 * part) + done
            if hop == 0:
                if step > first:
                    status = meet(context, right, step, word)
                    if status != DONE:
                        return status
                copy(_staging(context, rank, step), x + done, size)
                step = publish(context, step)
                continue
            if hop == 1 and done == 0:
                status = meet_all(context, step, word)
                if status != DONE:
                    return status
            if hop < world_size - 1:
                status = _meet_neighbours(context, step, word)
                if status != DONE:
                    return status
                target = _staging(context, rank, step)
                copy(target, _staging(context, left, step - 1), size)
                step = publish(context, step)
                copy(place, target, size)
            else:
                status = meet(context, left, step, word)
                if status != DONE:
                    return status
                copy(place, _staging(context, left, step - 1), size)
        done += chunk
        if done >= longest:
            break
    status = meet(context, right, step, word)
    if status != DONE:
        return status
    return finish(context, step)


ALL_REDUCE = Schedule(all_reduce)
REDUCE_SCATTER = Schedule(reduce_scatter)
ALL_GATHER = Schedule(all_gather)
