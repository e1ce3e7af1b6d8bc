"""Halving and doubling between nodes: each step exchanges half of what the step before left, then the way back.

In step s, the nodes of leaves v and v xor 2^s halve the range that both still have, and each adds up its half. After
log2 H steps each node has the sum of one range, and the ranges are gathered in the opposite order. It takes 2 log2 H
network steps and sends 2 (1 - 1/H) of the slice, to log2 H peers.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import load, store
from shotcast.device.cpu.compilation import Schedule
from shotcast.device.cpu.lazy_numba import njit
from shotcast.transport.cpu.host_call import for_all_ranks
from shotcast.transport.cpu.layout import ITEMSIZE, NETWORK
from shotcast.transport.cpu.waiting import DONE
from shotcast.transport.network.fold import fold, is_folded, unfold
from shotcast.transport.network.frames import add_receipt, add_send, begin_transfer, transfer
from shotcast.transport.network.hosts_call import HostsCall, partial_sums
from shotcast.transport.network.layout import ACCUMULATOR, NODE, NODES, RANGES
from shotcast.transport.network.phases import add, all_reduce_by, first_slot, rounded
from shotcast.transport.network.tree import leaf_of, leaves, node_of

_ALIGN = 16
"""Ranges are divided at multiples of this many elements."""


@njit(error_model="numpy")
def _middle(low: int, high: int) -> int:
    return min(high, low + ((high - low + 1) // 2 + _ALIGN - 1) // _ALIGN * _ALIGN)


@njit(error_model="numpy")
def _halve(context: int, plan: int, word: int, result: int, count: int) -> int:
    """Add up ranges by halving, and gather them in ``result`` by doubling."""
    network = load(context + NETWORK)
    nodes = load(network + NODES)
    width = leaves(nodes)
    pairs = nodes - width
    leaf, itemsize = leaf_of(load(network + NODE), pairs), load(plan + ITEMSIZE)
    accumulator, received = load(network + ACCUMULATOR), first_slot(network, plan)
    low, high, distance, step = 0, count, 1, 0
    while distance < width:
        store(network + RANGES + 16 * step, low)
        store(network + RANGES + 16 * step + 8, high)
        peer, middle = node_of(leaf ^ distance, pairs), _middle(low, high)
        begin_transfer(network)
        if leaf & distance:
            add_send(context, network, word, peer, accumulator + 4 * low, 4 * (middle - low), step)
            low = middle
        else:
            add_send(context, network, word, peer, accumulator + 4 * middle, 4 * (high - middle), step)
            high = middle
        add_receipt(context, network, word, peer, received, 4 * (high - low), step)
        status = transfer(context, network)
        if status != DONE:
            return status
        own = accumulator + 4 * low
        if leaf & distance:
            add(context, plan, own, received, own, high - low)
        else:
            add(context, plan, own, own, received, high - low)
        distance *= 2
        step += 1
    rounded(context, plan, result + itemsize * low, accumulator + 4 * low, high - low)
    while distance > 1:
        distance //= 2
        step -= 1
        peer = node_of(leaf ^ distance, pairs)
        first, last = load(network + RANGES + 16 * step), load(network + RANGES + 16 * step + 8)
        begin_transfer(network)
        add_send(context, network, word, peer, result + itemsize * low, itemsize * (high - low), 100 + step)
        if leaf & distance:
            add_receipt(context, network, word, peer, result + itemsize * first, itemsize * (low - first), 100 + step)
            low = first
        else:
            add_receipt(context, network, word, peer, result + itemsize * high, itemsize * (last - high), 100 + step)
            high = last
        status = transfer(context, network)
        if status != DONE:
            return status
    return DONE


@njit(error_model="numpy")
def exchange(context: int, plan: int, word: int, result: int, count: int) -> int:
    """Add up the sums of all nodes into ``result``, where ``count`` elements of each are in its accumulator."""
    status = fold(context, plan, word, count)
    if status == DONE and not is_folded(load(context + NETWORK)):
        status = _halve(context, plan, word, result, count)
    return status if status != DONE else unfold(context, plan, word, result, count)


def all_reduce(context: int, plan: int, x: int, out: int) -> int:
    """out = x_0 + ... + x_{N-1} on every rank. x, out: nbytes; they may be the same."""
    return all_reduce_by(exchange, context, plan, x, out)


ALL_REDUCE = HostsCall(
    schedule=Schedule(all_reduce), chunk=for_all_ranks, arithmetic=partial_sums, slots=lambda nodes, slice_bytes: 1
)
