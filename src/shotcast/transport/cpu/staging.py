"""The staging area of a step, the sources of its sums, and the slices of a chunk."""

from __future__ import annotations

from shotcast.device.cpu.atomics import load, store
from shotcast.device.cpu.lazy_numba import njit
from shotcast.transport.cpu.layout import CHUNK, CONTROL_BYTES, GENERATION, ITEMSIZE, NBYTES, RANK, SOURCES, WORLD
from shotcast.transport.cpu.waiting import region
from shotcast.wire import SLICE_ALIGN


@njit(error_model="numpy")
def sizes(plan: int) -> tuple[int, int, int]:
    """Return the bytes of the message, of a pipeline step and of an element."""
    return load(plan + NBYTES), load(plan + CHUNK), load(plan + ITEMSIZE)


@njit(error_model="numpy")
def generation(context: int, step: int) -> int:
    """Compute the offset in a rank's region at which it stages step ``step``."""
    return CONTROL_BYTES + (step & 1) * load(context + GENERATION)


@njit(error_model="numpy")
def set_sources(context: int, offset: int, own: int) -> None:
    """Set the sources of a sum: the regions of all peers at ``offset``, and address ``own`` for this rank."""
    for peer in range(load(context + WORLD)):
        store(context + SOURCES + 8 * peer, region(context, peer) + offset)
    store(context + SOURCES + 8 * load(context + RANK), own)


@njit(error_model="numpy")
def slice_size(nbytes: int, world_size: int) -> int:
    """Compute the same value as :func:`shotcast.wire.slice_bytes`."""
    part = (nbytes + world_size - 1) // world_size
    return (part + SLICE_ALIGN - 1) // SLICE_ALIGN * SLICE_ALIGN


@njit(error_model="numpy")
def wrap_rank(rank: int, world_size: int) -> int:
    """Reduce ``rank`` modulo ``world_size``, for ranks from -world_size to 2 * world_size - 1."""
    if rank < 0:
        return rank + world_size
    if rank >= world_size:
        return rank - world_size
    return rank
