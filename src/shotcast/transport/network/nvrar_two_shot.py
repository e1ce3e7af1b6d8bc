"""Two-shot between nodes: a part of the slice to each peer, which adds up, then the sums to all. Two network steps.

This is MultiShot once more, between nodes. It sends 2 (H - 1) / H of the slice, as a ring or halving does, in two steps
for any number of nodes. The second step carries the sums in the dtype of the call.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import load, store
from shotcast.device.cpu.compilation import Schedule
from shotcast.device.cpu.lazy_numba import njit
from shotcast.transport.cpu.host_call import for_all_ranks
from shotcast.transport.cpu.layout import ITEMSIZE, NETWORK
from shotcast.transport.cpu.waiting import DONE
from shotcast.transport.network.frames import add_receipt, add_send, begin_transfer, transfer
from shotcast.transport.network.hosts_call import HostsCall, partial_sums
from shotcast.transport.network.layout import ACCUMULATOR, NODE, NODES, POINTERS
from shotcast.transport.network.nvrar_pairs import add_nodes
from shotcast.transport.network.phases import all_reduce_by, first_slot

_ALIGN = 16
"""Parts begin at multiples of this many elements."""


@njit(error_model="numpy")
def part_of_each(count: int, nodes: int) -> int:
    """Return the elements of the part of each node; the last parts may be shorter or empty."""
    return ((count + nodes - 1) // nodes + _ALIGN - 1) // _ALIGN * _ALIGN


@njit(error_model="numpy")
def exchange(context: int, plan: int, word: int, result: int, count: int) -> int:
    """Add up the sums of all nodes into ``result``, where ``count`` elements of each are in its accumulator."""
    network = load(context + NETWORK)
    nodes, node = load(network + NODES), load(network + NODE)
    accumulator, received = load(network + ACCUMULATOR), first_slot(network, plan)
    part, itemsize = part_of_each(count, nodes), load(plan + ITEMSIZE)
    low, high = min(node * part, count), min((node + 1) * part, count)
    begin_transfer(network)
    for distance in range(1, nodes):
        peer = (node + distance) % nodes
        first, last = min(peer * part, count), min((peer + 1) * part, count)
        add_send(context, network, word, peer, accumulator + 4 * first, 4 * (last - first), 0)
    for distance in range(1, nodes):
        peer = (node + distance) % nodes
        place = received + 4 * peer * part
        store(network + POINTERS + 8 * peer, place)
        add_receipt(context, network, word, peer, place, 4 * (high - low), 0)
    store(network + POINTERS + 8 * node, accumulator + 4 * low)
    status = transfer(context, network)
    if status != DONE:
        return status
    add_nodes(context, plan, result + itemsize * low, high - low)
    begin_transfer(network)
    for distance in range(1, nodes):
        peer = (node + distance) % nodes
        add_send(context, network, word, peer, result + itemsize * low, itemsize * (high - low), 1)
    for distance in range(1, nodes):
        peer = (node + distance) % nodes
        first, last = min(peer * part, count), min((peer + 1) * part, count)
        add_receipt(context, network, word, peer, result + itemsize * first, itemsize * (last - first), 1)
    return transfer(context, network)


def all_reduce(context: int, plan: int, x: int, out: int) -> int:
    """out = x_0 + ... + x_{N-1} on every rank. x, out: nbytes; they may be the same."""
    return all_reduce_by(exchange, context, plan, x, out)


ALL_REDUCE = HostsCall(
    schedule=Schedule(all_reduce), chunk=for_all_ranks, arithmetic=partial_sums, slots=lambda nodes, slice_bytes: 1
)
