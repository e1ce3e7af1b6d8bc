"""All-gather and broadcast between nodes: one network step, and copies inside each node. Also calls without a result.

A rank sends its part to its peers, and receives their parts at their final positions. The ranks of a node gather the
rest from each other. Every rank always exchanges a frame with each of its peers, if only a header, so no rank finishes
before all have begun.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import copy, load
from shotcast.device.cpu.compilation import CompiledSchedule
from shotcast.device.cpu.lazy_numba import njit
from shotcast.transport.cpu.host_call import ChunkLimits, HostCall
from shotcast.transport.cpu.layout import CHUNK, NBYTES, NETWORK, PARTS, RANK, ROOT, ROOT_NODE, STEP, WORLD
from shotcast.transport.cpu.staging import generation, wrap_rank
from shotcast.transport.cpu.waiting import ABORTED, DONE, await_all, begin, finish, meet, publish, region
from shotcast.transport.network.frames import add_receipt, add_send, begin_transfer, transfer
from shotcast.transport.network.layout import NODE, NODES
from shotcast.wire import CallPlan


@njit(error_model="numpy")
def _offset_of(plan: int, local: int, ranks: int, node: int) -> int:
    """Compute the offset in bytes of a rank's part in the whole."""
    return load(plan + PARTS + 16 * (node * ranks + local))


@njit(error_model="numpy")
def _size_of(plan: int, local: int, ranks: int, node: int) -> int:
    """Compute the bytes of a rank's part."""
    return load(plan + PARTS + 16 * (node * ranks + local) + 8)


@njit(error_model="numpy")
def _gather_of_node(context: int, plan: int, word: int, out: int, node: int) -> int:
    """Gather the parts of one node's ranks; each part is in the ``out`` of one rank of this node."""
    rank, ranks = load(context + RANK), load(context + WORLD)
    longest = 0
    for peer in range(ranks):
        longest = max(longest, _size_of(plan, peer, ranks, node))
    chunk, own, step, done = load(plan + CHUNK), region(context, rank), load(context + STEP), 0
    while done < longest:
        staging = generation(context, step)
        size = min(chunk, _size_of(plan, rank, ranks, node) - done)
        if size > 0:
            copy(own + staging, out + _offset_of(plan, rank, ranks, node) + done, size)
        step = publish(context, step)
        status = await_all(context, step, word)
        if status != DONE:
            return status
        for distance in range(1, ranks):
            peer = wrap_rank(rank + distance, ranks)
            size = min(chunk, _size_of(plan, peer, ranks, node) - done)
            if size > 0:
                copy(out + _offset_of(plan, peer, ranks, node) + done, region(context, peer) + staging, size)
        done += chunk
    return finish(context, step)


def all_gather(context: int, plan: int, x: int, out: int) -> int:
    """out = the parts of all ranks, in their order; x is the part of this rank."""
    word, rank, ranks, step = begin(context, plan)
    status = meet(context, step, word) if word != 0 else ABORTED
    if status != DONE:
        return status
    network = load(context + NETWORK)
    nodes, node = load(network + NODES), load(network + NODE)
    copy(out + _offset_of(plan, rank, ranks, node), x, _size_of(plan, rank, ranks, node))
    begin_transfer(network)
    for distance in range(1, nodes):
        add_send(context, network, word, (node + distance) % nodes, x, _size_of(plan, rank, ranks, node), 0)
    for distance in range(1, nodes):
        peer = (node + distance) % nodes
        place = out + _offset_of(plan, rank, ranks, peer)
        add_receipt(context, network, word, peer, place, _size_of(plan, rank, ranks, peer), 0)
    status = transfer(context, network)
    if ranks > 1:
        for peer in range(nodes):
            if status == DONE:
                status = _gather_of_node(context, plan, word, out, peer)
    return status


def broadcast(context: int, plan: int, x: int, out: int) -> int:
    """Copy the root's x to out on every rank. x, out: nbytes; they may be the same."""
    word, rank, ranks, step = begin(context, plan)
    status = meet(context, step, word) if word != 0 else ABORTED
    if status != DONE:
        return status
    network = load(context + NETWORK)
    nodes, node = load(network + NODES), load(network + NODE)
    nbytes, root, root_node = load(plan + NBYTES), load(plan + ROOT), load(plan + ROOT_NODE)
    begin_transfer(network)
    for distance in range(1, nodes):
        size = nbytes if rank == root and node == root_node else 0
        add_send(context, network, word, (node + distance) % nodes, x, size, 0)
    for distance in range(1, nodes):
        peer = (node + distance) % nodes
        size = nbytes if rank == root and peer == root_node else 0
        add_receipt(context, network, word, peer, out, size, 0)
    status = transfer(context, network)
    if status != DONE:
        return status
    if rank == root and node == root_node:
        copy(out, x, nbytes)
    chunk, step, done = load(plan + CHUNK), load(context + STEP), 0
    while done < nbytes and ranks > 1:
        staging, size = generation(context, step), min(chunk, nbytes - done)
        if rank == root:
            copy(region(context, rank) + staging, out + done, size)
        step = publish(context, step)
        status = await_all(context, step, word)
        if status != DONE:
            return status
        if rank != root:
            copy(out + done, region(context, root) + staging, size)
        done += size
    return finish(context, step)


def barrier(context: int, plan: int, x: int, out: int) -> int:
    """Wait until every rank has begun this call. ``x`` and ``out`` are unused.

    A rank tells its peers after it has seen all ranks of its node, so a rank that hears from all nodes knows about all
    ranks.
    """
    word, _, _, step = begin(context, plan)
    status = meet(context, step, word) if word != 0 else ABORTED
    if status != DONE:
        return status
    network = load(context + NETWORK)
    nodes, node = load(network + NODES), load(network + NODE)
    begin_transfer(network)
    for distance in range(1, nodes):
        add_send(context, network, word, (node + distance) % nodes, 0, 0, 0)
    for distance in range(1, nodes):
        add_receipt(context, network, word, (node + distance) % nodes, 0, 0, 0)
    return transfer(context, network)


def swap(context: int, plan: int, x: int, out: int) -> int:
    """Send nbytes at x to the peer on the neighboring node, node xor 1, and receive as many from it into out.

    This has the cost of one step of recursive doubling. If there is no such node, nothing is sent.
    """
    word, _, _, step = begin(context, plan)
    status = meet(context, step, word) if word != 0 else ABORTED
    if status != DONE:
        return status
    network, nbytes = load(context + NETWORK), load(plan + NBYTES)
    other = load(network + NODE) ^ 1
    begin_transfer(network)
    if other < load(network + NODES):
        add_send(context, network, word, other, x, nbytes, 0)
        add_receipt(context, network, word, other, out, nbytes, 0)
    return transfer(context, network)


def chunk_limits(plan: CallPlan, world_size: int, capacity: int) -> ChunkLimits:
    """Compute the limits of a step that stages one part."""
    return ChunkLimits(capacity, 512 << 10)


ALL_GATHER = HostCall(schedule=CompiledSchedule(all_gather), chunk=chunk_limits)
BROADCAST = HostCall(schedule=CompiledSchedule(broadcast), chunk=chunk_limits)
BARRIER = HostCall(schedule=CompiledSchedule(barrier), header_only=True)
SWAP = HostCall(schedule=CompiledSchedule(swap))
