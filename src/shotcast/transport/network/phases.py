"""The phases of an all-reduce inside a node: before the exchange between nodes, and after it.

Rank l of each node owns slice l of the message. First it sums the node's contributions to its slice, in rank order and
in float32, without rounding. Its peers on the other nodes exchange the same slice. The ranks of the node then gather
the slices.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import call_arithmetic, copy, load, store
from shotcast.device.cpu.lazy_numba import HostFunction, njit
from shotcast.transport.cpu import layout
from shotcast.transport.cpu.staging import generation, set_sources, sizes, slice_size, wrap_rank
from shotcast.transport.cpu.waiting import ABORTED, DONE, await_all, begin, finish, publish, region
from shotcast.transport.network.layout import ACCUMULATOR, OPERANDS


@njit(error_model="numpy")
def slice_start(context: int, plan: int) -> int:
    """Compute the offset in bytes of this rank's slice in the message."""
    nbytes = load(plan + layout.NBYTES)
    return min(load(context + layout.RANK) * slice_size(nbytes, load(context + layout.WORLD)), nbytes)


@njit(error_model="numpy")
def slice_count(context: int, plan: int) -> int:
    """Count the elements in this rank's slice."""
    nbytes = load(plan + layout.NBYTES)
    part = slice_size(nbytes, load(context + layout.WORLD))
    return (min((load(context + layout.RANK) + 1) * part, nbytes) - slice_start(context, plan)) // load(
        plan + layout.ITEMSIZE
    )


@njit(error_model="numpy")
def first_slot(network: int, plan: int) -> int:
    """Compute the address of the first slot for a slice from another node."""
    return load(network + ACCUMULATOR) + load(plan + layout.SLOT)


@njit(error_model="numpy")
def reduce_in_node(context: int, plan: int, word: int, x: int) -> int:
    """Reduce the node's contributions to this rank's slice into the accumulator; sums are in float32."""
    rank, world_size = load(context + layout.RANK), load(context + layout.WORLD)
    accumulator = load(load(context + layout.NETWORK) + ACCUMULATOR)
    start, count = slice_start(context, plan), slice_count(context, plan)
    function = load(plan + layout.PARTIAL)
    if world_size == 1:
        store(context + layout.SOURCES, x)
        call_arithmetic(function, accumulator, context + layout.SOURCES, 1, count)
        return DONE
    nbytes, piece, itemsize = sizes(plan)
    partial_bytes = load(plan + layout.PARTIAL_BYTES)
    part = slice_size(nbytes, world_size)
    own, step, offset = region(context, rank), load(context + layout.STEP), 0
    while True:
        staging = generation(context, step)
        for distance in range(1, world_size):
            owner = wrap_rank(rank + distance, world_size)
            low = min(owner * part + offset, nbytes)
            high = min(owner * part + min(offset + piece, part), nbytes)
            copy(own + staging + owner * piece, x + low, high - low)
        step = publish(context, step)
        status = await_all(context, step, word)
        if status != DONE:
            return status
        size = max(0, min(piece, count * itemsize - offset))
        set_sources(context, staging + rank * piece, x + start + offset)
        target = accumulator + offset // itemsize * partial_bytes
        call_arithmetic(function, target, context + layout.SOURCES, world_size, size // itemsize)
        offset += piece
        if offset >= part:
            return finish(context, step)


@njit(error_model="numpy")
def gather(context: int, plan: int, word: int, own_slice: int, out: int, root: int) -> int:
    """Gather the slices of the node's ranks in ``out`` on ``root`` (-1 for all ranks); each rank has its own slice."""
    rank, world_size = load(context + layout.RANK), load(context + layout.WORLD)
    if world_size == 1:
        return DONE
    nbytes, piece = load(plan + layout.NBYTES), load(plan + layout.CHUNK) * world_size
    part = slice_size(nbytes, world_size)
    step, offset = load(context + layout.STEP), 0
    while offset < part:
        staging = generation(context, step)
        low = min(rank * part + offset, nbytes)
        high = min(rank * part + min(offset + piece, part), nbytes)
        if rank != root:
            copy(region(context, rank) + staging, own_slice + offset, high - low)
        step = publish(context, step)
        status = await_all(context, step, word)
        if status != DONE:
            return status
        for distance in range(1, world_size if root < 0 or rank == root else 1):
            peer = wrap_rank(rank + distance, world_size)
            low = min(peer * part + offset, nbytes)
            high = min(peer * part + min(offset + piece, part), nbytes)
            copy(out + low, region(context, peer) + staging, high - low)
        offset += piece
    return finish(context, step)


@njit(error_model="numpy")
def all_reduce_by(exchange: HostFunction, context: int, plan: int, x: int, out: int) -> int:
    """out = x_0 + ... + x_{N-1} on every rank. x, out: nbytes; they may be the same.

    ``exchange(context, plan, word, result, count)`` adds the sums of all nodes into ``result``; this node's sum is the
    ``count`` elements in the accumulator.
    """
    word = begin(context, plan)[0]
    if word == 0:
        return ABORTED
    status = reduce_in_node(context, plan, word, x)
    result = out + slice_start(context, plan)
    if status == DONE:
        status = exchange(context, plan, word, result, slice_count(context, plan))
    if status == DONE:
        status = gather(context, plan, word, result, out, -1)
    return status


@njit(error_model="numpy")
def _sum_up(context: int, function: int, target: int, first: int, second: int, terms: int, count: int) -> None:
    network = load(context + layout.NETWORK)
    store(network + OPERANDS, first)
    store(network + OPERANDS + 8, second)
    call_arithmetic(function, target, network + OPERANDS, terms, count)


@njit(error_model="numpy")
def add(context: int, plan: int, target: int, first: int, second: int, count: int) -> None:
    """Store first + second at ``target``, which may be one of them; all are in the form that nodes exchange."""
    _sum_up(context, load(plan + layout.ADD_PARTIAL), target, first, second, 2, count)


@njit(error_model="numpy")
def add_rounded(context: int, plan: int, out: int, first: int, second: int, count: int) -> None:
    """Store first + second, given in the form that nodes exchange, at ``out`` in the dtype of the call."""
    _sum_up(context, load(plan + layout.ROUND), out, first, second, 2, count)


@njit(error_model="numpy")
def rounded(context: int, plan: int, out: int, source: int, count: int) -> None:
    """Store float32 values at ``out`` in the dtype of the call."""
    _sum_up(context, load(plan + layout.ROUND), out, source, 0, 1, count)
