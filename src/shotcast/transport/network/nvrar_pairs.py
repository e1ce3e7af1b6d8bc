"""All-pairs exchange: every node sends its sum to every other one, and each adds up all of them. One network step.

It has the least latency, and sends H - 1 times the slice.
"""

from __future__ import annotations

from numba import njit

from shotcast.device.cpu.atomics import load, store
from shotcast.device.cpu.compilation import Schedule
from shotcast.transport.cpu.layout import NETWORK, SLOT
from shotcast.transport.cpu.waiting import ABORTED, DONE, begin
from shotcast.transport.network.frames import add_receipt, add_send, begin_transfer, transfer
from shotcast.transport.network.hosts_call import HostsCall, chunk_of_slices, partial_sums
from shotcast.transport.network.layout import ACCUMULATOR, NODE, NODES, POINTERS
from shotcast.transport.network.phases import (
    add,
    add_rounded,
    first_slot,
    gather_in_node,
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


def all_reduce(context: int, plan: int, x: int, out: int) -> int:
    """out = x_0 + ... + x_{N-1} on every rank. x, out: nbytes; they may be the same."""
    word = begin(context, plan)
    if word == 0:
        return ABORTED
    status = reduce_in_node(context, plan, word, x)
    if status != DONE:
        return status
    network = load(context + NETWORK)
    nodes, node, count = load(network + NODES), load(network + NODE), slice_count(context, plan)
    begin_transfer(network)
    for distance in range(1, nodes):
        add_send(context, network, word, (node + distance) % nodes, load(network + ACCUMULATOR), 4 * count, 0)
    for distance in range(1, nodes):
        peer = (node + distance) % nodes
        slot = first_slot(network, plan) + peer * load(plan + SLOT)
        store(network + POINTERS + 8 * peer, slot)
        add_receipt(context, network, word, peer, slot, 4 * count, 0)
    store(network + POINTERS + 8 * node, load(network + ACCUMULATOR))
    status = transfer(context, network)
    if status != DONE:
        return status
    add_nodes(context, plan, out + slice_start(context, plan), count)
    return gather_in_node(context, plan, word, out)


ALL_REDUCE = HostsCall(
    schedule=Schedule(all_reduce),
    chunk=chunk_of_slices,
    arithmetic=partial_sums,
    slots=lambda nodes, slice_bytes: nodes,
)
