"""Folding, where nodes are no power of two: odd ones give their sums to even ones, and wait for the result."""

from __future__ import annotations

from shotcast.device.cpu.atomics import load
from shotcast.device.cpu.lazy_numba import njit
from shotcast.transport.cpu.layout import ITEMSIZE, NETWORK
from shotcast.transport.cpu.waiting import DONE
from shotcast.transport.network.frames import add_receipt, add_send, begin_transfer, transfer
from shotcast.transport.network.layout import ACCUMULATOR, NODE, NODES
from shotcast.transport.network.phases import add, first_slot
from shotcast.transport.network.tree import leaves

FOLD_STEP, UNFOLD_STEP = 1000, 1001
"""The steps of folding, as frames number them."""


@njit(error_model="numpy")
def is_folded(network: int) -> bool:
    """Return whether this node gives its sum to another."""
    node, nodes = load(network + NODE), load(network + NODES)
    return node & 1 == 1 and node < 2 * (nodes - leaves(nodes))


@njit(error_model="numpy")
def fold(context: int, plan: int, word: int, count: int) -> int:
    """Add the sums of folded nodes to those of the nodes before them. ``count``: elements of the slice."""
    network = load(context + NETWORK)
    node, nodes = load(network + NODE), load(network + NODES)
    if node >= 2 * (nodes - leaves(nodes)):
        return DONE
    accumulator, received = load(network + ACCUMULATOR), first_slot(network, plan)
    begin_transfer(network)
    if node & 1:
        add_send(context, network, word, node - 1, accumulator, 4 * count, FOLD_STEP)
        return transfer(context, network)
    add_receipt(context, network, word, node + 1, received, 4 * count, FOLD_STEP)
    status = transfer(context, network)
    if status == DONE:
        add(context, plan, accumulator, accumulator, received, count)
    return status


@njit(error_model="numpy")
def unfold(context: int, plan: int, word: int, result: int, count: int) -> int:
    """Give the result, ``count`` elements at ``result``, to the folded nodes."""
    network = load(context + NETWORK)
    node, nodes = load(network + NODE), load(network + NODES)
    if node >= 2 * (nodes - leaves(nodes)):
        return DONE
    nbytes = count * load(plan + ITEMSIZE)
    begin_transfer(network)
    if node & 1:
        add_receipt(context, network, word, node - 1, result, nbytes, UNFOLD_STEP)
    else:
        add_send(context, network, word, node + 1, result, nbytes, UNFOLD_STEP)
    return transfer(context, network)
