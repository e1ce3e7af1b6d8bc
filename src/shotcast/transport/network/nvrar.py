"""NVRAR: recursive doubling between the peers of all nodes, between a reduce-scatter and an all-gather inside nodes.

In step s, the node of leaf v exchanges its sum with that of leaf v xor 2^s, so after log2 H steps each node has the sum
of all H. The algorithm is that of "LLM Inference Beyond a Single Node" (arXiv 2511.09557); nodes may be any number.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import load
from shotcast.device.cpu.compilation import Schedule
from shotcast.device.cpu.lazy_numba import njit
from shotcast.transport.cpu.host_call import for_all_ranks
from shotcast.transport.cpu.layout import NETWORK
from shotcast.transport.cpu.waiting import DONE
from shotcast.transport.network.fold import fold, is_folded, unfold
from shotcast.transport.network.frames import add_receipt, add_send, begin_transfer, transfer
from shotcast.transport.network.hosts_call import HostsCall, partial_sums
from shotcast.transport.network.layout import ACCUMULATOR, NODE, NODES
from shotcast.transport.network.phases import add, add_rounded, all_reduce_by, first_slot, rounded
from shotcast.transport.network.tree import leaf_of, leaves, node_of


@njit(error_model="numpy")
def _double(context: int, plan: int, word: int, result: int, count: int) -> int:
    """Exchange sums by recursive doubling; the last of them is rounded into ``result``."""
    network = load(context + NETWORK)
    nodes = load(network + NODES)
    width = leaves(nodes)
    pairs = nodes - width
    leaf = leaf_of(load(network + NODE), pairs)
    accumulator, received = load(network + ACCUMULATOR), first_slot(network, plan)
    distance, step = 1, 0
    while distance < width:
        peer = node_of(leaf ^ distance, pairs)
        begin_transfer(network)
        add_send(context, network, word, peer, accumulator, 4 * count, step)
        add_receipt(context, network, word, peer, received, 4 * count, step)
        status = transfer(context, network)
        if status != DONE:
            return status
        low, high = accumulator, received
        if leaf & distance:
            low, high = received, accumulator
        distance *= 2
        step += 1
        if distance < width:
            add(context, plan, accumulator, low, high, count)
        else:
            add_rounded(context, plan, result, low, high, count)
    if width == 1:
        rounded(context, plan, result, accumulator, count)
    return DONE


@njit(error_model="numpy")
def exchange(context: int, plan: int, word: int, result: int, count: int) -> int:
    """Add up the sums of all nodes into ``result``, where ``count`` elements of each are in its accumulator."""
    status = fold(context, plan, word, count)
    if status == DONE and not is_folded(load(context + NETWORK)):
        status = _double(context, plan, word, result, count)
    return status if status != DONE else unfold(context, plan, word, result, count)


def all_reduce(context: int, plan: int, x: int, out: int) -> int:
    """out = x_0 + ... + x_{N-1} on every rank. x, out: nbytes; they may be the same."""
    return all_reduce_by(exchange, context, plan, x, out)


ALL_REDUCE = HostsCall(
    schedule=Schedule(all_reduce), chunk=for_all_ranks, arithmetic=partial_sums, slots=lambda nodes, slice_bytes: 1
)
