"""Reductions whose rows go through residual add, norm and quantization while they are in the cache.

These are the schedules of :mod:`shotcast.transport.cpu.one_shot` and :mod:`shotcast.transport.cpu.two_shot`, with
:func:`shotcast.transport.cpu.norm.add_and_norm` instead of their last sum or copy. So the sums, and ``new_residual``,
have the same bits. A chunk may end anywhere in a row. The context's ROW says where the outputs are.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import call_arithmetic, copy, load, store
from shotcast.device.cpu.compilation import Schedule
from shotcast.device.cpu.lazy_numba import njit
from shotcast.transport.cpu import one_shot as plain_one_shot
from shotcast.transport.cpu import two_shot as plain_two_shot
from shotcast.transport.cpu.host_call import HostCall, for_all_ranks, sums_and_norms
from shotcast.transport.cpu.layout import (
    ARITHMETIC,
    CHUNK,
    CONTROL_BYTES,
    DYNAMIC,
    GATHER_CHUNK,
    GENERATION,
    HIDDEN,
    ITEMSIZE,
    NBYTES,
    NORMED,
    QUANTIZED,
    RANK,
    ROW,
    SCALE,
    SOURCES,
    STEP,
    WORLD,
)
from shotcast.transport.cpu.norm import START_AT_MINUS_ZERO, START_AT_ZERO, add_and_norm, begin_rows
from shotcast.transport.cpu.slices import slice_size, wrap_rank
from shotcast.transport.cpu.waiting import ABORTED, DONE, await_all, begin, finish, publish, region


def one_shot(context: int, plan: int, x: int, _out: int) -> int:
    """Sum and norm all rows on every rank, each from the staging of all ranks. x: nbytes."""
    word = begin(context, plan)
    if word == 0:
        return ABORTED
    rank, world_size, step = load(context + RANK), load(context + WORLD), load(context + STEP)
    nbytes, chunk, itemsize = load(plan + NBYTES), load(plan + CHUNK), load(plan + ITEMSIZE)
    generation_bytes = load(context + GENERATION)
    begin_rows(context)
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
        add_and_norm(context, plan, START_AT_ZERO, world_size, size // itemsize)
        done += size
        if done >= nbytes:
            return finish(context, step)


def two_shot(context: int, plan: int, x: int, _out: int) -> int:
    """Sum and norm all rows on every rank, each slice of a chunk from the rank that has reduced it. x: nbytes.

    A generation holds this rank's reduced slice of the previous chunk, then its contribution to this chunk.
    """
    word = begin(context, plan)
    if word == 0:
        return ABORTED
    rank, world_size, step = load(context + RANK), load(context + WORLD), load(context + STEP)
    nbytes, chunk, itemsize = load(plan + NBYTES), load(plan + CHUNK), load(plan + ITEMSIZE)
    function = load(plan + ARITHMETIC)
    generation_bytes = load(context + GENERATION)
    contribution = slice_size(chunk, world_size)
    own = region(context, rank)
    begin_rows(context)
    start, previous_size = 0, 0
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
            # Every peer has published this step, so it has read the other generation, which may be written now.
            result = own + CONTROL_BYTES + (step & 1) * generation_bytes
            call_arithmetic(function, result, context + SOURCES, world_size, (high - low) // itemsize)

        # Rows need the slices in the order of columns: from rank 0 on, this rank's own among them.
        part = slice_size(previous_size, world_size)
        for peer in range(world_size):
            low, high = min(peer * part, previous_size), min((peer + 1) * part, previous_size)
            store(context + SOURCES, region(context, peer) + staging)
            add_and_norm(context, plan, START_AT_MINUS_ZERO, 1, (high - low) // itemsize)

        if size == 0:
            return finish(context, step)
        previous_size = size
        start += size


@njit(error_model="numpy")
def _reduce_block(context: int, plan: int, x: int, step: int, word: int) -> int:
    """Sum and norm the rows of block ``rank``. Returns the next step, or minus the status if it failed."""
    rank, world_size = load(context + RANK), load(context + WORLD)
    block, itemsize, chunk = load(plan + NBYTES) // world_size, load(plan + ITEMSIZE), load(plan + CHUNK)
    generation_bytes = load(context + GENERATION)
    begin_rows(context)
    done = 0
    while True:
        size = min(chunk, block - done)
        staging = CONTROL_BYTES + (step & 1) * generation_bytes
        for peer in range(world_size):
            if peer != rank:
                copy(region(context, rank) + staging + peer * chunk, x + peer * block + done, size)
        step = publish(context, step)
        status = await_all(context, step, word)
        if status != DONE:
            return -status
        for peer in range(world_size):
            store(context + SOURCES + 8 * peer, region(context, peer) + staging + rank * chunk)
        store(context + SOURCES + 8 * rank, x + rank * block + done)
        add_and_norm(context, plan, START_AT_ZERO, world_size, size // itemsize)
        done += size
        if done >= block:
            return step


def reduce_scatter(context: int, plan: int, x: int, _out: int) -> int:
    """Sum and norm the rows of block ``rank``. x: N blocks, nbytes in all."""
    word = begin(context, plan)
    if word == 0:
        return ABORTED
    step = _reduce_block(context, plan, x, load(context + STEP), word)
    return -step if step < 0 else finish(context, step)


@njit(error_model="numpy")
def _copy_part(staging: int, to_staging: bool, part: int, offset: int, length: int, low: int, high: int) -> int:
    """Copy one part of an outcome, as far as it lies in bytes ``low`` to ``high`` of the outcome.

    It is copied to ``staging`` if ``to_staging``, else from there. The part lies at address ``part`` and is ``length``
    bytes from byte ``offset`` of the outcome on. Returns its end in the outcome.
    """
    first, last = max(low, offset), min(high, offset + length)
    if last > first:
        if to_staging:
            copy(staging + first - low, part + first - offset, last - first)
        else:
            copy(part + first - offset, staging + first - low, last - first)
    return offset + length


def reduce_scatter_all_gather(context: int, plan: int, x: int, _out: int) -> int:
    """Sum and norm the rows of block ``rank``, then gather the outcomes of all blocks. x: N blocks, nbytes in all.

    The context's ROW says where the outputs of all ranks begin; the residuals are those of this rank.
    """
    word = begin(context, plan)
    if word == 0:
        return ABORTED
    rank, world_size = load(context + RANK), load(context + WORLD)
    itemsize, hidden = load(plan + ITEMSIZE), load(plan + HIDDEN)
    elements = load(plan + NBYTES) // world_size // itemsize
    row = context + ROW
    normed, quantized, scales = load(row + NORMED), load(row + QUANTIZED), load(row + SCALE)
    # The outcome of a rank is its normed elements, quantized elements and scales, end to end; each may be empty.
    norm_bytes, quantized_bytes, scale_bytes = elements * itemsize, elements, 4 * (elements // hidden)
    if normed == 0:
        norm_bytes = 0
    if quantized == 0:
        quantized_bytes = 0
    if load(row + DYNAMIC) == 0:
        scale_bytes = 0
    outcome = norm_bytes + quantized_bytes + scale_bytes
    store(row + NORMED, normed + rank * norm_bytes)
    store(row + QUANTIZED, quantized + rank * quantized_bytes)
    store(row + SCALE, scales + rank * scale_bytes)
    step = _reduce_block(context, plan, x, load(context + STEP), word)
    if step < 0:
        return -step

    chunk, generation_bytes = load(plan + GATHER_CHUNK), load(context + GENERATION)
    done = 0
    while done < outcome and world_size > 1:
        staging = CONTROL_BYTES + (step & 1) * generation_bytes
        end_byte = min(outcome, done + chunk)
        for distance in range(world_size):
            peer = wrap_rank(rank + distance, world_size)
            if distance == 1:
                step = publish(context, step)
                status = await_all(context, step, word)
                if status != DONE:
                    return status
            peer_staging, to_staging = region(context, peer) + staging, peer == rank
            end = _copy_part(peer_staging, to_staging, normed + peer * norm_bytes, 0, norm_bytes, done, end_byte)
            end = _copy_part(
                peer_staging, to_staging, quantized + peer * quantized_bytes, end, quantized_bytes, done, end_byte
            )
            _copy_part(peer_staging, to_staging, scales + peer * scale_bytes, end, scale_bytes, done, end_byte)
        done = end_byte
    return finish(context, step)


ONE_SHOT = HostCall(
    schedule=Schedule(one_shot), chunk=plain_one_shot.chunk_limits, arithmetic=sums_and_norms, norms=True
)
TWO_SHOT = HostCall(
    schedule=Schedule(two_shot), chunk=plain_two_shot.chunk_limits, arithmetic=sums_and_norms, norms=True
)
REDUCE_SCATTER = HostCall(schedule=Schedule(reduce_scatter), chunk=for_all_ranks, arithmetic=sums_and_norms, norms=True)
REDUCE_SCATTER_ALL_GATHER = HostCall(
    schedule=Schedule(reduce_scatter_all_gather), chunk=for_all_ranks, arithmetic=sums_and_norms, norms=True
)
