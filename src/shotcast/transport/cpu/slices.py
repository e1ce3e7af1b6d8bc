"""The partition of a chunk into the slices of the ranks, as compiled code computes it."""

from __future__ import annotations

from shotcast.device.cpu.lazy_numba import njit
from shotcast.wire import SLICE_ALIGN


@njit(error_model="numpy")
def slice_size(nbytes: int, world_size: int) -> int:
    """Return what :func:`shotcast.wire.slice_bytes` returns."""
    part = (nbytes + world_size - 1) // world_size
    return (part + SLICE_ALIGN - 1) // SLICE_ALIGN * SLICE_ALIGN


@njit(error_model="numpy")
def wrap_rank(rank: int, world_size: int) -> int:
    """Return ``rank`` modulo ``world_size``, for ranks from -world_size to 2 * world_size - 1."""
    if rank < 0:
        return rank + world_size
    if rank >= world_size:
        return rank - world_size
    return rank
