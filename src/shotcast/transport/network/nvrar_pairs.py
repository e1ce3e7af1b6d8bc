"""All-pairs exchange: every node sends its sum to every other one, and each adds up all of them. One network step.

It has the least latency, and sends H - 1 times the slice. A reduce sends its slices to the root's node alone.

Sums are in float32. Reductions whose order does not matter, those of integers and extrema, are in the dtype itself.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import load, store
from shotcast.device.cpu.compilation import Schedule
from shotcast.device.cpu.lazy_numba import njit
from shotcast.transport.cpu.host_call import for_all_ranks
from shotcast.transport.cpu.layout import NETWORK, PARTIAL_BYTES, ROOT, ROOT_NODE, SLOT
from shotcast.transport.cpu.waiting import ABORTED, DONE, begin
from shotcast.transport.network.frames import add_receipt, add_send, begin_transfer, transfer
from shotcast.transport.network.hosts_call import HostsCall, node_reductions
from shotcast.transport.network.layout import ACCUMULATOR, NODE, NODES, POINTERS
from shotcast.transport.network.phases import (
    add,
    add_rounded,
    all_reduce_by,
    first_slot,
    gather,
    reduce_in_node,
    slice_count,
    slice_start,
)
from shotcast.transport.network.tree import leaves, node_of


@njit(error_model="numpy")
def add_nodes(context: int, plan: int, result: int, count: int) -> None:
    """Add up the slices of all nodes, whose addresses are in POINTERS, and round the sum into ``result``.

    The slices are overwritten. There are at least two.
    """
    network = load(context + NETWORK)
    nodes = load(network + NODES)
    width = leaves(nodes)
    pairs = nodes - width
    pointers = network + POINTERS
    for leaf in range(pairs):
        even, odd = load(pointers + 16 * leaf), load(pointers + 16 * leaf + 8)
        add(context, plan, even, even, odd, count)
    for leaf in range(width):  # in ascending order, so no pointer is overwritten before it is read
        store(pointers + 8 * leaf, load(pointers + 8 * node_of(leaf, pairs)))
    while width > 2:
        width //= 2
        for leaf in range(width):
            low, high = load(pointers + 16 * leaf), load(pointers + 16 * leaf + 8)
            add(context, plan, low, low, high, count)
            store(pointers + 8 * leaf, low)
    add_rounded(context, plan, result, load(pointers), load(pointers + 8), count)


@njit(error_model="numpy")
def _send_to(root_node: int, context: int, plan: int, word: int, count: int) -> int:
    """Send the sum of this node to the others or, unless it is -1, to ``root_node`` alone, and receive theirs.

    Every rank exchanges a frame with each of its peers, if only a header, so no rank finishes before all have begun.
    """
    network = load(context + NETWORK)
    nodes, node, nbytes = load(network + NODES), load(network + NODE), load(plan + PARTIAL_BYTES) * count
    begin_transfer(network)
    for distance in range(1, nodes):
        peer = (node + distance) % nodes
        size = nbytes if root_node < 0 or peer == root_node else 0
        add_send(context, network, word, peer, load(network + ACCUMULATOR), size, 0)
    for distance in range(1, nodes):
        peer = (node + distance) % nodes
        slot = first_slot(network, plan) + peer * load(plan + SLOT)
        store(network + POINTERS + 8 * peer, slot)
        add_receipt(context, network, word, peer, slot, nbytes if root_node < 0 or node == root_node else 0, 0)
    store(network + POINTERS + 8 * node, load(network + ACCUMULATOR))
    return transfer(context, network)


@njit(error_model="numpy")
def exchange(context: int, plan: int, word: int, result: int, count: int) -> int:
    """Add up the sums of all nodes into ``result``, where ``count`` elements of each are in its accumulator."""
    status = _send_to(-1, context, plan, word, count)
    if status == DONE:
        add_nodes(context, plan, result, count)
    return status


def all_reduce(context: int, plan: int, x: int, out: int) -> int:
    """out = x_0 + ... + x_{N-1} on every rank. x, out: nbytes; they may be the same."""
    return all_reduce_by(exchange, context, plan, x, out)


def reduce(context: int, plan: int, x: int, out: int) -> int:
    """out = x_0 + ... + x_{N-1} on the root. x, out: nbytes; they may be the same, and others have no out."""
    word, rank, _, _ = begin(context, plan)
    if word == 0:
        return ABORTED
    status = reduce_in_node(context, plan, word, x)
    if status != DONE:
        return status
    network, count = load(context + NETWORK), slice_count(context, plan)
    root, root_node = load(plan + ROOT), load(plan + ROOT_NODE)
    status = _send_to(root_node, context, plan, word, count)
    if status != DONE or load(network + NODE) != root_node:
        return status
    result = first_slot(network, plan) + load(network + NODES) * load(plan + SLOT)
    if rank == root:
        result = out + slice_start(context, plan)
    add_nodes(context, plan, result, count)
    return gather(context, plan, word, result, out, root)


ALL_REDUCE = HostsCall(
    schedule=Schedule(all_reduce),
    chunk=for_all_ranks,
    arithmetic=node_reductions,
    slots=lambda nodes, slice_bytes: nodes,
)
REDUCE = HostsCall(
    schedule=Schedule(reduce),
    chunk=for_all_ranks,
    arithmetic=node_reductions,
    slots=lambda nodes, slice_bytes: nodes + 1,
)
