"""Two-shot (MultiShot) all-reduce: reduce-scatter, then all-gather, in two steps for any number of ranks.

To reduce its slice, each rank reads N - 1 slices of 1/N of the message, and then N - 1 reduced slices. That is 2 (N -
1) / N of the message, as in a ring, but with 2 synchronizations instead of 2N - 2.

Sums are accumulated in rank order in float32 and rounded once, so they match one-shot bit for bit.

If all tensors are in memory that all ranks map, nothing is staged: each rank reads its slice from all of them and
writes the sum to all of them. Only its rank touches a slice, so the call may be in place.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import call_arithmetic, copy, load, store
from shotcast.device.cpu.compilation import CompiledSchedule
from shotcast.device.cpu.lazy_numba import HostFunction, njit
from shotcast.transport.cpu.host_call import ChunkLimits, HostCall, reductions
from shotcast.transport.cpu.layout import ARITHMETIC, RANK, SOURCES, WORLD
from shotcast.transport.cpu.mapped import OUT, PIECE_BYTES, X, is_mapped, mapped_ranks, place, tell_places
from shotcast.transport.cpu.staging import generation, set_sources, sizes, slice_size, wrap_rank
from shotcast.transport.cpu.waiting import ABORTED, DONE, await_all, begin, finish, is_stopped, meet, publish, region
from shotcast.wire import CallPlan

EVERYWHERE, NOWHERE = -1, -2
"""Special values of a root: with EVERYWHERE every rank gets the sum, with NOWHERE only results computed from it."""


@njit(error_model="numpy")
def by_slices(take: HostFunction, root: int, context: int, plan: int, x: int, out: int) -> int:
    """Let each rank sum its slice of each chunk, then collect all slices with ``take``, as :func:`take_slices` does.

    A generation holds this rank's reduced slice of the previous chunk, then its contribution to this chunk. Step k
    publishes both, so C chunks take C + 1 steps rather than 2 C.
    """
    word, rank, world_size, step = begin(context, plan)
    if word == 0:
        return ABORTED
    nbytes, chunk, itemsize = sizes(plan)
    function = load(plan + ARITHMETIC)
    contribution = slice_size(chunk, world_size)
    own = region(context, rank)
    first, start, previous_start, previous_size = step, 0, 0, 0
    mapped = root == EVERYWHERE and is_mapped(context, rank)
    while True:
        staging = generation(context, step)
        size = min(chunk, nbytes - start)
        part = slice_size(size, world_size)
        low, high = min(rank * part, size), min((rank + 1) * part, size)
        if size > 0 and not (mapped and step == first):
            copy(own + staging + contribution, x + start, low)
            copy(own + staging + contribution + high, x + start + high, size - high)
        step = publish(context, step)
        status = await_all(context, step, word)
        if status != DONE:
            return status

        if root == EVERYWHERE and step == first + 1:
            ranks = mapped_ranks(context)
            if ranks == world_size:
                return _in_mapped_tensors(context, plan, word, step, out)
            if ranks > 0:
                continue  # these ranks staged nothing, as all ranks know, so all stage it again

        if high > low:
            set_sources(context, staging + contribution + low, x + start + low)
            # Every peer has published this step, so it has read the other generation, which may be written now.
            result = own + generation(context, step)
            target = out + start + low if root == EVERYWHERE or rank == root else result
            call_arithmetic(function, target, context + SOURCES, world_size, (high - low) // itemsize)
            if root == EVERYWHERE:
                copy(result, target, high - low)

        if previous_size > 0:
            take(context, plan, staging, out + previous_start, previous_size, root)
        if size == 0:
            return finish(context, step)
        previous_start, previous_size = start, size
        start += size


@njit(error_model="numpy")
def take_slices(context: int, plan: int, staging: int, out: int, size: int, root: int) -> None:
    """Copy the peers' slices of a chunk of ``size`` bytes, each at ``staging`` in its rank's region, to ``out``."""
    rank, world_size = load(context + RANK), load(context + WORLD)
    part = slice_size(size, world_size)
    for distance in range(1, world_size if root == EVERYWHERE or rank == root else 1):
        peer = wrap_rank(rank + distance, world_size)
        low, high = min(peer * part, size), min((peer + 1) * part, size)
        copy(out + low, region(context, peer) + staging, high - low)


def all_reduce(context: int, plan: int, x: int, out: int) -> int:
    """out = x_0 + ... + x_{N-1} on every rank. x, out: nbytes; they may be the same."""
    tell_places(context, plan, x, out)
    return by_slices(take_slices, EVERYWHERE, context, plan, x, out)


@njit(error_model="numpy")
def _in_mapped_tensors(context: int, plan: int, word: int, step: int, out: int) -> int:
    """Sum this rank's slice, and write it to all ranks. All have begun the call, so their tensors are available."""
    rank, world_size = load(context + RANK), load(context + WORLD)
    nbytes, _, itemsize = sizes(plan)
    function = load(plan + ARITHMETIC)
    part = slice_size(nbytes, world_size)
    low, high = min(rank * part, nbytes), min((rank + 1) * part, nbytes)
    while low < high:
        if is_stopped(context):
            return ABORTED  # a rank that has given up may have reused its tensor
        size = min(PIECE_BYTES, high - low)
        for peer in range(world_size):
            store(context + SOURCES + 8 * peer, region(context, peer) + place(context, peer, X) + low)
        call_arithmetic(function, out + low, context + SOURCES, world_size, size // itemsize)
        for distance in range(1, world_size):
            peer = wrap_rank(rank + distance, world_size)
            copy(region(context, peer) + place(context, peer, OUT) + low, out + low, size)
        low += size
    return meet(context, step, word)


def chunk_limits(plan: CallPlan, world_size: int, capacity: int) -> ChunkLimits:
    """Compute the limits of a step: a chunk and a slice of it, with room for slices that are rounded up."""
    return ChunkLimits((capacity - 64) * world_size // (world_size + 1), 256 << 10)


ALL_REDUCE = HostCall(schedule=CompiledSchedule(all_reduce), chunk=chunk_limits, arithmetic=reductions)
