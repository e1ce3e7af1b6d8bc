"""NVRAR in 16 bits: each node's sum is sent rounded to float16 or bfloat16, half the bytes of float32.

Each node rounds its sum once, even for its own use, so every node that adds them gets the same bits. The sums are added
in float32, in the tree, and rounded once more. For a short slice, or between two nodes, every node sends its sums to
all others in one network step. Otherwise each node adds a part of the slice and sends it to all: two steps, and 2 (H -
1) / H of the slice for any number of nodes.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import call_arithmetic, load, store
from shotcast.device.cpu.compilation import Arithmetic, Schedule
from shotcast.device.cpu.lazy_numba import njit
from shotcast.errors import UnsupportedError
from shotcast.transport.cpu.host_call import for_all_ranks, sums
from shotcast.transport.cpu.layout import ARITHMETIC, ITEMSIZE, NBYTES, NETWORK, PARTIAL, SLOT, WORLD
from shotcast.transport.cpu.slices import slice_size
from shotcast.transport.cpu.waiting import ABORTED, DONE, begin
from shotcast.transport.network.frames import add_receipt, add_send, begin_transfer, transfer
from shotcast.transport.network.hosts_call import HostsCall, partial_sums
from shotcast.transport.network.layout import ACCUMULATOR, NODE, NODES, POINTERS
from shotcast.transport.network.nvrar_pairs import add_nodes
from shotcast.transport.network.nvrar_two_shot import part_of_each
from shotcast.transport.network.phases import first_slot, gather, reduce_in_node, rounded, slice_count, slice_start
from shotcast.wire import SIXTEEN_BITS, CallPlan, in_one_step

_IN_ORDER = 3
"""The most nodes whose tree is their order, so that one addition of all of them has its bits."""

_in_one_step = njit(error_model="numpy")(in_one_step)


def _slots_that_arrive(nodes: int, whole: bool) -> int:
    """Return the slots that the rounded sums of all nodes take: half of one each, or of a part each."""
    return (nodes + 1) // 2 if whole else 1


_slots_of = njit(error_model="numpy")(_slots_that_arrive)


@njit(error_model="numpy")
def _add_rounded_nodes(context: int, plan: int, result: int, wide: int, count: int) -> None:
    """Add up the rounded sums of all nodes, whose addresses are in POINTERS, and round the sum into ``result``.

    ``wide``: room for all of them in float32, which more than three need.
    """
    network = load(context + NETWORK)
    nodes, pointers = load(network + NODES), network + POINTERS
    if nodes <= _IN_ORDER:
        call_arithmetic(load(plan + ARITHMETIC), result, pointers, nodes, count)
        return
    for node in range(nodes):
        widened = wide + 4 * count * node
        call_arithmetic(load(plan + PARTIAL), widened, pointers + 8 * node, 1, count)
        store(pointers + 8 * node, widened)
    add_nodes(context, plan, result, count)


@njit(error_model="numpy")
def _exchange(context: int, plan: int, word: int, own: int, result: int, count: int) -> int:
    """Add up the rounded sums of all nodes, ``count`` of this one at ``own``, into ``result``; it may be ``own``."""
    network = load(context + NETWORK)
    nodes, node, itemsize = load(network + NODES), load(network + NODE), load(plan + ITEMSIZE)
    whole = _in_one_step(nodes, slice_size(load(plan + NBYTES), load(context + WORLD)))
    part = count if whole else part_of_each(count, nodes)
    low = 0 if whole else min(node * part, count)
    high = count if whole else min(low + part, count)
    arrived = first_slot(network, plan) + load(plan + SLOT)
    begin_transfer(network)
    for distance in range(1, nodes):
        peer = (node + distance) % nodes
        first = 0 if whole else min(peer * part, count)
        last = count if whole else min(first + part, count)
        add_send(context, network, word, peer, own + itemsize * first, itemsize * (last - first), 0)
    for distance in range(1, nodes):
        peer = (node + distance) % nodes
        place = arrived + itemsize * part * peer
        store(network + POINTERS + 8 * peer, place)
        add_receipt(context, network, word, peer, place, itemsize * (high - low), 0)
    store(network + POINTERS + 8 * node, own + itemsize * low)
    status = transfer(context, network)
    if status != DONE:
        return status
    wide = arrived + load(plan + SLOT) * _slots_of(nodes, whole)
    _add_rounded_nodes(context, plan, result + itemsize * low, wide, high - low)
    if whole:
        return DONE
    begin_transfer(network)
    for distance in range(1, nodes):
        peer = (node + distance) % nodes
        add_send(context, network, word, peer, result + itemsize * low, itemsize * (high - low), 1)
    for distance in range(1, nodes):
        peer = (node + distance) % nodes
        first = min(peer * part, count)
        last = min(first + part, count)
        add_receipt(context, network, word, peer, result + itemsize * first, itemsize * (last - first), 1)
    return transfer(context, network)


def all_reduce(context: int, plan: int, x: int, out: int) -> int:
    """out = x_0 + ... + x_{N-1} on every rank. x, out: nbytes; they may be the same."""
    word, _, world_size, _ = begin(context, plan)
    if word == 0:
        return ABORTED
    network, result = load(context + NETWORK), out + slice_start(context, plan)
    own, count = x, slice_count(context, plan)  # the sum of a node of one rank is the rank's x
    if world_size > 1:
        status = reduce_in_node(context, plan, word, x)
        if status != DONE:
            return status
        own = first_slot(network, plan)
        rounded(context, plan, own, load(network + ACCUMULATOR), count)
    status = _exchange(context, plan, word, own, result, count)
    return status if status != DONE else gather(context, plan, word, result, out, -1)


def _arithmetic(plan: CallPlan) -> dict[int, Arithmetic]:
    """Return the arithmetic of sums over nodes, and the addition of rounded ones.

    Raises UnsupportedError for a dtype of other than 16 bits.
    """
    if plan.dtype not in SIXTEEN_BITS:
        raise UnsupportedError(f"{plan.algorithm} adds up {' and '.join(SIXTEEN_BITS)}, not {plan.dtype}")
    return partial_sums(plan) | sums(plan)


def _slots(nodes: int, slice_bytes: int) -> int:
    """Return the slots of the local rounded sums, of those that arrive, and of all in float32 where that is needed."""
    whole = in_one_step(nodes, slice_bytes)
    wide = (nodes if whole else 1) if nodes > _IN_ORDER else 0
    return 1 + _slots_that_arrive(nodes, whole) + wide


ALL_REDUCE = HostsCall(schedule=Schedule(all_reduce), chunk=for_all_ranks, arithmetic=_arithmetic, slots=_slots)
