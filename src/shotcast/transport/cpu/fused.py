"""Reductions fused with residual add, norm and quantization of rows while they are in cache.

These are the schedules of :mod:`shotcast.transport.cpu.one_shot` and :mod:`shotcast.transport.cpu.two_shot`, with
:func:`shotcast.transport.cpu.norm.add_and_norm` in place of their last sum or copy. The sums and ``new_residual``
therefore have the same bits. A chunk may end anywhere in a row. The context's ROW says where the outputs are.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import copy, load, store
from shotcast.device.cpu.compilation import CompiledSchedule
from shotcast.device.cpu.lazy_numba import njit
from shotcast.transport.cpu import one_shot as plain_one_shot
from shotcast.transport.cpu import two_shot as plain_two_shot
from shotcast.transport.cpu.host_call import HostCall, for_all_ranks, sums_and_norms
from shotcast.transport.cpu.layout import (
    DYNAMIC,
    GATHER_CHUNK,
    HIDDEN,
    ITEMSIZE,
    NBYTES,
    NORMED,
    QUANTIZED,
    ROW,
    SCALE,
    SOURCES,
    STEP,
    WORLD,
)
from shotcast.transport.cpu.norm import START_AT_MINUS_ZERO, START_AT_ZERO, add_and_norm, begin_rows
from shotcast.transport.cpu.one_shot import read_all, read_blocks
from shotcast.transport.cpu.staging import generation, slice_size, wrap_rank
from shotcast.transport.cpu.two_shot import NOWHERE, by_slices
from shotcast.transport.cpu.waiting import ABORTED, DONE, await_all, begin, finish, publish, region


@njit(error_model="numpy")
def _norm(context: int, plan: int, _target: int, count: int) -> None:
    """Sum ``count`` elements of all sources and apply the norm to the sum."""
    add_and_norm(context, plan, START_AT_ZERO, load(context + WORLD), count)


def one_shot(context: int, plan: int, x: int, out: int) -> int:
    """Sum and normalize all rows on every rank, reading the staging of all ranks. x: nbytes."""
    begin_rows(context)
    return read_all(_norm, -1, context, plan, x, out)


@njit(error_model="numpy")
def _norm_slices(context: int, plan: int, staging: int, _out: int, size: int, _root: int) -> None:
    """Normalize the slices of a chunk in column order, as rows require: from rank 0 on, this rank's slice included."""
    world_size, itemsize = load(context + WORLD), load(plan + ITEMSIZE)
    part = slice_size(size, world_size)
    for peer in range(world_size):
        low, high = min(peer * part, size), min((peer + 1) * part, size)
        store(context + SOURCES, region(context, peer) + staging)
        add_and_norm(context, plan, START_AT_MINUS_ZERO, 1, (high - low) // itemsize)


def two_shot(context: int, plan: int, x: int, out: int) -> int:
    """Sum and normalize all rows on every rank, reading each slice of a chunk from the rank that reduced it. x:
    nbytes."""
    begin_rows(context)
    return by_slices(_norm_slices, NOWHERE, context, plan, x, out)


def reduce_scatter(context: int, plan: int, x: int, out: int) -> int:
    """Sum and normalize the rows of block ``rank``. x: N blocks, nbytes in all."""
    begin_rows(context)
    word = begin(context, plan)[0]
    return read_blocks(_norm, False, context, plan, word, x, out) if word != 0 else ABORTED


@njit(error_model="numpy")
def _copy_part(staging: int, to_staging: bool, part: int, offset: int, length: int, low: int, high: int) -> int:
    """Copy the portion of one part of an outcome that lies in bytes ``low`` to ``high`` of the outcome.

    The copy goes to ``staging`` if ``to_staging``, else from it. The part is at address ``part`` and is ``length``
    bytes long, starting at byte ``offset`` of the outcome. Returns the part's end in the outcome.
    """
    first, last = max(low, offset), min(high, offset + length)
    if last > first:
        if to_staging:
            copy(staging + first - low, part + first - offset, last - first)
        else:
            copy(part + first - offset, staging + first - low, last - first)
    return offset + length


def reduce_scatter_all_gather(context: int, plan: int, x: int, _out: int) -> int:
    """Sum and normalize the rows of block ``rank``, then gather the outcomes of all blocks. x: N blocks, nbytes in all.

    The context's ROW says where the outputs of all ranks begin; the residuals belong to this rank.
    """
    word, rank, world_size, _ = begin(context, plan)
    if word == 0:
        return ABORTED
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
    begin_rows(context)
    status = read_blocks(_norm, False, context, plan, word, x, 0)
    if status != DONE:
        return status

    chunk, step, done = load(plan + GATHER_CHUNK), load(context + STEP), 0
    while done < outcome and world_size > 1:
        staging = generation(context, step)
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
    schedule=CompiledSchedule(one_shot), chunk=plain_one_shot.chunk_limits, arithmetic=sums_and_norms, norms=True
)
TWO_SHOT = HostCall(
    schedule=CompiledSchedule(two_shot), chunk=plain_two_shot.chunk_limits, arithmetic=sums_and_norms, norms=True
)
REDUCE_SCATTER = HostCall(
    schedule=CompiledSchedule(reduce_scatter), chunk=for_all_ranks, arithmetic=sums_and_norms, norms=True
)
REDUCE_SCATTER_ALL_GATHER = HostCall(
    schedule=CompiledSchedule(reduce_scatter_all_gather), chunk=for_all_ranks, arithmetic=sums_and_norms, norms=True
)
