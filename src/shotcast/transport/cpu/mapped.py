"""Tensors in memory that all ranks map; calls publish where they are, along with their headers.

Ranks may therefore create and free tensors independently, and need not agree on the form of a call. As with headers,
even and odd epochs have separate words, since a rank may be one call ahead.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import load, store
from shotcast.device.cpu.lazy_numba import njit
from shotcast.transport.cpu.layout import EPOCH, HEAP, HEAP_END, NBYTES, PLACES, RANK, WORLD
from shotcast.transport.cpu.waiting import region

X, OUT = 0, 8
"""The tensors of a call, by the offset of their place."""
LEAST_BYTES = 128 << 10
"""Shorter messages are staged: they are in the cores' caches, and calls of one step would take a second one."""
PIECE_BYTES = 64 << 10
"""Bytes that a rank sums before it writes them to its peers from cache."""


@njit(error_model="numpy")
def _place_of(context: int, address: int) -> int:
    offset = address - region(context, load(context + RANK))
    return offset if load(context + HEAP) <= offset < load(context + HEAP_END) else 0


@njit(error_model="numpy")
def tell_places(context: int, plan: int, x: int, out: int) -> None:
    """Publish where the tensors of the next call are. Its header follows, with a release store."""
    epoch = load(context + EPOCH) + 1
    words = region(context, load(context + RANK)) + PLACES + 16 * (epoch & 1)
    long = load(plan + NBYTES) >= LEAST_BYTES
    store(words + X, _place_of(context, x) if long else 0)
    store(words + OUT, _place_of(context, out) if long else 0)


@njit(error_model="numpy")
def place(context: int, rank: int, tensor: int) -> int:
    """Look up where a rank's :data:`X` or :data:`OUT` of this call is in its region; 0 if it is not mapped.

    A peer's tensor is known once its header has been seen.
    """
    return load(region(context, rank) + PLACES + 16 * (load(context + EPOCH) & 1) + tensor)


@njit(error_model="numpy")
def is_mapped(context: int, rank: int) -> bool:
    """Check whether both tensors of a rank are mapped."""
    return place(context, rank, X) != 0 and place(context, rank, OUT) != 0


@njit(error_model="numpy")
def mapped_ranks(context: int) -> int:
    """Count the ranks with mapped tensors in this call. All headers must have been seen."""
    ranks = 0
    for rank in range(load(context + WORLD)):
        if is_mapped(context, rank):
            ranks += 1
    return ranks
