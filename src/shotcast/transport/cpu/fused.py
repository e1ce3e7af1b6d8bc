"""Reductions fused with residual add, norm and quantization of rows while they are in cache.

These are the schedules of :mod:`shotcast.transport.cpu.one_shot` and :mod:`shotcast.transport.cpu.two_shot`, with
:func:`shotcast.transport.cpu.norm.add_and_norm` in place of their last sum or copy. The sums and ``new_residual``
therefore have the same bits. A chunk may end anywhere in a row. The context's ROW says where the outputs are.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import load, store
from shotcast.device.cpu.compilation import CompiledSchedule
from shotcast.device.cpu.lazy_numba import njit
from shotcast.transport.cpu import one_shot as plain_one_shot
from shotcast.transport.cpu import two_shot as plain_two_shot
from shotcast.transport.cpu.host_call import HostCall, sums_and_norms
from shotcast.transport.cpu.layout import ITEMSIZE, SOURCES, WORLD
from shotcast.transport.cpu.norm import START_AT_MINUS_ZERO, START_AT_ZERO, add_and_norm, begin_rows
from shotcast.transport.cpu.one_shot import read_all
from shotcast.transport.cpu.staging import slice_size
from shotcast.transport.cpu.two_shot import NOWHERE, by_slices
from shotcast.transport.cpu.waiting import region


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
    """Sum and normalize all rows on every rank, reading each slice from the rank that reduced it. x: nbytes."""
    begin_rows(context)
    return by_slices(_norm_slices, NOWHERE, context, plan, x, out)


ONE_SHOT = HostCall(
    schedule=CompiledSchedule(one_shot), chunk=plain_one_shot.chunk_limits, arithmetic=sums_and_norms, norms=True
)
TWO_SHOT = HostCall(
    schedule=CompiledSchedule(two_shot), chunk=plain_two_shot.chunk_limits, arithmetic=sums_and_norms, norms=True
)
