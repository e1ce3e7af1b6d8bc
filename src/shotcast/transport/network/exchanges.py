"""Exchanges between nodes that add the sums of all nodes, and the tree that fixes the order of the additions.

An ``exchange(context, plan, word, result, count)`` begins with ``count`` elements of this node's sum in its
accumulator, and ends with the sum of all nodes, rounded to the dtype of the call, at ``result``.
:mod:`shotcast.collectives.algorithms.nvrar` says what each exchange sends and when it wins.

If the number of nodes is not a power of two, doubling and halving fold: odd nodes give their sums to even nodes and
wait for the result. The tree is the one in :func:`shotcast.hardware.nodes.folded`.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import load, store
from shotcast.device.cpu.lazy_numba import HostFunction, njit
from shotcast.transport.cpu.layout import ITEMSIZE, NETWORK, PARTIAL_BYTES, SLOT
from shotcast.transport.cpu.waiting import DONE
from shotcast.transport.network.frames import add_receipt, add_send, begin_transfer, transfer
from shotcast.transport.network.layout import ACCUMULATOR, NODE, NODES, POINTERS, RANGES
from shotcast.transport.network.phases import add, add_rounded, first_slot, rounded

FOLD_STEP, UNFOLD_STEP = 1000, 1001
"""Step numbers of folding in frames."""
_ALIGN = 16
"""Ranges and parts are divided at multiples of this many elements."""


# --- the tree ---------------------------------------------------------------------------------------------------------


@njit(error_model="numpy")
def leaves(nodes: int) -> int:
    """Count the leaves of the tree: the largest power of two up to ``nodes``."""
    count = 1
    while 2 * count <= nodes:
        count *= 2
    return count


@njit(error_model="numpy")
def leaf_of(node: int, pairs: int) -> int:
    """Map a node to its leaf, after folding ``pairs`` pairs, of which the even node holds the leaf."""
    return node // 2 if node < 2 * pairs else node - pairs


@njit(error_model="numpy")
def node_of(leaf: int, pairs: int) -> int:
    """Map a leaf to the node that holds it."""
    return 2 * leaf if leaf < pairs else leaf + pairs


@njit(error_model="numpy")
def add_nodes(context: int, plan: int, result: int, count: int) -> None:
    """Sum the slices of all nodes, whose addresses are in POINTERS, and round the sum into ``result``.

    The slices are overwritten. There must be at least two.
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


# --- doubling and halving ---------------------------------------------------------------------------------------------


@njit(error_model="numpy")
def _fold(context: int, plan: int, word: int, count: int) -> int:
    """Add the sums of folded nodes to the sums of the nodes before them."""
    network = load(context + NETWORK)
    node, accumulator, received = load(network + NODE), load(network + ACCUMULATOR), first_slot(network, plan)
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
def _unfold(context: int, plan: int, word: int, result: int, count: int) -> int:
    """Give the result to the folded nodes."""
    network, nbytes = load(context + NETWORK), count * load(plan + ITEMSIZE)
    node = load(network + NODE)
    begin_transfer(network)
    if node & 1:
        add_receipt(context, network, word, node - 1, result, nbytes, UNFOLD_STEP)
    else:
        add_send(context, network, word, node + 1, result, nbytes, UNFOLD_STEP)
    return transfer(context, network)


@njit(error_model="numpy")
def _folded(between_leaves: HostFunction, context: int, plan: int, word: int, result: int, count: int) -> int:
    """Exchange between the nodes that hold leaves; the other nodes fold before it and unfold after it."""
    network = load(context + NETWORK)
    node, nodes = load(network + NODE), load(network + NODES)
    folds, status = node < 2 * (nodes - leaves(nodes)), DONE
    if folds:
        status = _fold(context, plan, word, count)
    if status == DONE and not (folds and node & 1):
        status = between_leaves(context, plan, word, result, count)
    return _unfold(context, plan, word, result, count) if folds and status == DONE else status


@njit(error_model="numpy")
def _double(context: int, plan: int, word: int, result: int, count: int) -> int:
    """Exchange sums by recursive doubling, and round the last one into ``result``."""
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
def doubling(context: int, plan: int, word: int, result: int, count: int) -> int:
    """Add the sums of all nodes by recursive doubling."""
    return _folded(_double, context, plan, word, result, count)


@njit(error_model="numpy")
def _middle(low: int, high: int) -> int:
    return min(high, low + ((high - low + 1) // 2 + _ALIGN - 1) // _ALIGN * _ALIGN)


@njit(error_model="numpy")
def _halve(context: int, plan: int, word: int, result: int, count: int) -> int:
    """Sum ranges by halving, and gather them in ``result`` by doubling."""
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
def halving(context: int, plan: int, word: int, result: int, count: int) -> int:
    """Add the sums of all nodes by recursive halving, and gather them by doubling."""
    return _folded(_halve, context, plan, word, result, count)


# --- all pairs and two-shot -------------------------------------------------------------------------------------------


@njit(error_model="numpy")
def send_sums(root_node: int, context: int, plan: int, word: int, count: int) -> int:
    """Send this node's sum to all other nodes (only to ``root_node`` unless it is -1), and receive theirs.

    The addresses of all sums are then in POINTERS. Every rank exchanges a frame with each of its peers, if only a
    header.
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
def all_pairs(context: int, plan: int, word: int, result: int, count: int) -> int:
    """Send each node's sum to all other nodes, and add all sums."""
    status = send_sums(-1, context, plan, word, count)
    if status == DONE:
        add_nodes(context, plan, result, count)
    return status


@njit(error_model="numpy")
def part_of_each(count: int, nodes: int) -> int:
    """Count the elements in each node's part; the last parts may be shorter or empty."""
    return ((count + nodes - 1) // nodes + _ALIGN - 1) // _ALIGN * _ALIGN


@njit(error_model="numpy")
def send_parts(
    context: int, word: int, own: int, arrived: int, itemsize: int, stride: int, part: int, count: int
) -> int:
    """Send each node its part of the ``count`` elements at ``own``, and receive this node's part from all nodes.

    The part of node i is the ``part`` elements from i * ``stride``, clipped to ``count``; with a stride of 0, all parts
    start at 0. Parts arrive back to back at ``arrived``, and their addresses are then in POINTERS.
    """
    network = load(context + NETWORK)
    nodes, node = load(network + NODES), load(network + NODE)
    low, high = min(node * stride, count), min(node * stride + part, count)
    begin_transfer(network)
    for distance in range(1, nodes):
        peer = (node + distance) % nodes
        first, last = min(peer * stride, count), min(peer * stride + part, count)
        add_send(context, network, word, peer, own + itemsize * first, itemsize * (last - first), 0)
    for distance in range(1, nodes):
        peer = (node + distance) % nodes
        place = arrived + itemsize * part * peer
        store(network + POINTERS + 8 * peer, place)
        add_receipt(context, network, word, peer, place, itemsize * (high - low), 0)
    store(network + POINTERS + 8 * node, own + itemsize * low)
    return transfer(context, network)


@njit(error_model="numpy")
def share_parts(context: int, word: int, result: int, itemsize: int, part: int, count: int) -> int:
    """Send this node's part of ``result`` to all other nodes, and receive theirs."""
    network = load(context + NETWORK)
    nodes, node = load(network + NODES), load(network + NODE)
    low, high = min(node * part, count), min((node + 1) * part, count)
    begin_transfer(network)
    for distance in range(1, nodes):
        peer = (node + distance) % nodes
        add_send(context, network, word, peer, result + itemsize * low, itemsize * (high - low), 1)
    for distance in range(1, nodes):
        peer = (node + distance) % nodes
        first, last = min(peer * part, count), min((peer + 1) * part, count)
        add_receipt(context, network, word, peer, result + itemsize * first, itemsize * (last - first), 1)
    return transfer(context, network)


@njit(error_model="numpy")
def two_shot(context: int, plan: int, word: int, result: int, count: int) -> int:
    """Send one part of each node's sum to each other node, which adds its parts and sends their sum to all."""
    network, itemsize = load(context + NETWORK), load(plan + ITEMSIZE)
    nodes, node = load(network + NODES), load(network + NODE)
    part = part_of_each(count, nodes)
    low, high = min(node * part, count), min((node + 1) * part, count)
    status = send_parts(context, word, load(network + ACCUMULATOR), first_slot(network, plan), 4, part, part, count)
    if status != DONE:
        return status
    add_nodes(context, plan, result + itemsize * low, high - low)
    return share_parts(context, word, result, itemsize, part, count)
