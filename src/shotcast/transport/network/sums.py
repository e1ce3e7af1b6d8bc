"""Sums over CPU ranks on several nodes: calls that use :mod:`.exchanges`, with or without residual add and norm.

A reduce sends its slices only to the root's node. Reductions whose order does not matter (integers and extrema) are
computed in the dtype itself, others in float32. Fused calls gather the sum in private memory and normalize it there in
the same compiled call, so the results match separate sum and norm calls bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

from shotcast import wire
from shotcast.device.cpu.atomics import call_arithmetic, load, store
from shotcast.device.cpu.compilation import Arithmetic, CompiledSchedule
from shotcast.device.cpu.lazy_numba import HostFunction, njit
from shotcast.device.cpu.reductions import PARTIAL_SUMS, ROUNDED_SUMS, SUMS
from shotcast.errors import UnsupportedError
from shotcast.transport.cpu import layout
from shotcast.transport.cpu.host_call import HostCall, check_sum, for_all_ranks, reductions, sums, sums_and_norms
from shotcast.transport.cpu.norm import START_AT_MINUS_ZERO, add_and_norm, begin_rows
from shotcast.transport.cpu.staging import slice_size
from shotcast.transport.cpu.waiting import ABORTED, DONE, begin
from shotcast.transport.network import exchanges
from shotcast.transport.network.layout import ACCUMULATOR, NODE, NODES, POINTERS
from shotcast.transport.network.phases import (
    all_reduce_by,
    first_slot,
    gather,
    reduce_in_node,
    rounded,
    slice_count,
    slice_start,
)
from shotcast.wire import SIXTEEN_BITS, CallPlan, in_one_step


def partial_sums(plan: CallPlan) -> dict[int, Arithmetic]:
    """Look up the sums over nodes, by word of the plan record. Raises UnsupportedError if there are none."""
    check_sum(plan, PARTIAL_SUMS)
    return {
        layout.PARTIAL: PARTIAL_SUMS[plan.dtype],
        layout.ADD_PARTIAL: SUMS["float32"],
        layout.ROUND: ROUNDED_SUMS[plan.dtype],
    }


def node_reductions(plan: CallPlan) -> dict[int, Arithmetic]:
    """Look up the arithmetic of sums over nodes in float32, or of a reduction in the dtype itself. Raises
    UnsupportedError for a dtype without that reduction.
    """
    if plan.reduction == "sum" and plan.dtype in PARTIAL_SUMS:
        return partial_sums(plan)
    (arithmetic,) = reductions(plan).values()
    return dict.fromkeys((layout.PARTIAL, layout.ADD_PARTIAL, layout.ROUND), arithmetic)


def partial_bytes(plan: CallPlan) -> int:
    """Return the bytes of an element as nodes exchange it; sums of floats are in float32."""
    return 4 if plan.reduction == "sum" and plan.dtype in PARTIAL_SUMS else wire.DTYPES[plan.dtype]


def doubling(context: int, plan: int, x: int, out: int) -> int:
    return all_reduce_by(exchanges.doubling, context, plan, x, out)


def halving(context: int, plan: int, x: int, out: int) -> int:
    return all_reduce_by(exchanges.halving, context, plan, x, out)


def all_pairs(context: int, plan: int, x: int, out: int) -> int:
    return all_reduce_by(exchanges.all_pairs, context, plan, x, out)


def two_shot(context: int, plan: int, x: int, out: int) -> int:
    return all_reduce_by(exchanges.two_shot, context, plan, x, out)


def reduce(context: int, plan: int, x: int, out: int) -> int:
    """out = x_0 + ... + x_{N-1} on the root. x, out: nbytes; they may be the same. The other ranks have no out."""
    word, rank, _, _ = begin(context, plan)
    if word == 0:
        return ABORTED
    status = reduce_in_node(context, plan, word, x)
    if status != DONE:
        return status
    network, count = load(context + layout.NETWORK), slice_count(context, plan)
    root, root_node = load(plan + layout.ROOT), load(plan + layout.ROOT_NODE)
    status = exchanges.send_sums(root_node, context, plan, word, count)
    if status != DONE or load(network + NODE) != root_node:
        return status
    result = first_slot(network, plan) + load(network + NODES) * load(plan + layout.SLOT)
    if rank == root:
        result = out + slice_start(context, plan)
    exchanges.add_nodes(context, plan, result, count)
    return gather(context, plan, word, result, out, root)


def _one_slot(nodes: int, slice_bytes: int) -> int:
    return 1


DOUBLING = HostCall(schedule=CompiledSchedule(doubling), chunk=for_all_ranks, arithmetic=partial_sums, slots=_one_slot)
HALVING = HostCall(schedule=CompiledSchedule(halving), chunk=for_all_ranks, arithmetic=partial_sums, slots=_one_slot)
TWO_SHOT = HostCall(schedule=CompiledSchedule(two_shot), chunk=for_all_ranks, arithmetic=partial_sums, slots=_one_slot)
ALL_PAIRS = HostCall(
    schedule=CompiledSchedule(all_pairs),
    chunk=for_all_ranks,
    arithmetic=node_reductions,
    slots=lambda nodes, slice_bytes: nodes,
)
REDUCE = HostCall(
    schedule=CompiledSchedule(reduce),
    chunk=for_all_ranks,
    arithmetic=node_reductions,
    slots=lambda nodes, slice_bytes: nodes + 1,
)


# --- with residual and norm -------------------------------------------------------------------------------------------


@njit(error_model="numpy")
def _norm_sums_of(exchange: HostFunction, context: int, plan: int, x: int) -> int:
    """Sum and normalize all rows on every rank. x: nbytes; the context's ROW says where the outputs are."""
    total = load(load(context + layout.NETWORK) + ACCUMULATOR) + load(plan + layout.TOTAL)
    status = all_reduce_by(exchange, context, plan, x, total)
    if status == DONE:
        begin_rows(context)
        store(context + layout.SOURCES, total)
        add_and_norm(context, plan, START_AT_MINUS_ZERO, 1, load(plan + layout.NBYTES) // load(plan + layout.ITEMSIZE))
    return status


def normed_doubling(context: int, plan: int, x: int, _out: int) -> int:
    return _norm_sums_of(exchanges.doubling, context, plan, x)


def normed_halving(context: int, plan: int, x: int, _out: int) -> int:
    return _norm_sums_of(exchanges.halving, context, plan, x)


def normed_all_pairs(context: int, plan: int, x: int, _out: int) -> int:
    return _norm_sums_of(exchanges.all_pairs, context, plan, x)


def normed_two_shot(context: int, plan: int, x: int, _out: int) -> int:
    return _norm_sums_of(exchanges.two_shot, context, plan, x)


def _sums_and_norms(plan: CallPlan) -> dict[int, Arithmetic]:
    return partial_sums(plan) | sums_and_norms(plan)


NORMED_DOUBLING = replace(DOUBLING, schedule=CompiledSchedule(normed_doubling), arithmetic=_sums_and_norms, norms=True)
NORMED_HALVING = replace(HALVING, schedule=CompiledSchedule(normed_halving), arithmetic=_sums_and_norms, norms=True)
NORMED_ALL_PAIRS = replace(
    ALL_PAIRS, schedule=CompiledSchedule(normed_all_pairs), arithmetic=_sums_and_norms, norms=True
)
NORMED_TWO_SHOT = replace(TWO_SHOT, schedule=CompiledSchedule(normed_two_shot), arithmetic=_sums_and_norms, norms=True)


# --- in 16 bits -------------------------------------------------------------------------------------------------------

_IN_ORDER = 3
"""The largest number of nodes whose tree order is node order, so that one addition of all sums has the same bits."""

_in_one_step = njit(error_model="numpy")(in_one_step)


def _slots_that_arrive(nodes: int, whole: bool) -> int:
    """Compute the slots of the nodes' rounded sums: half a slot for each whole sum, or half of each part."""
    return (nodes + 1) // 2 if whole else 1


_slots_of = njit(error_model="numpy")(_slots_that_arrive)


@njit(error_model="numpy")
def _add_rounded_nodes(context: int, plan: int, result: int, wide: int, count: int) -> None:
    """Add the rounded sums of all nodes, whose addresses are in POINTERS, and round the sum into ``result``.

    ``wide`` is room for all of them in float32, which more than three nodes need.
    """
    network = load(context + layout.NETWORK)
    nodes, pointers = load(network + NODES), network + POINTERS
    if nodes <= _IN_ORDER:
        call_arithmetic(load(plan + layout.ARITHMETIC), result, pointers, nodes, count)
        return
    for node in range(nodes):
        widened = wide + 4 * count * node
        call_arithmetic(load(plan + layout.PARTIAL), widened, pointers + 8 * node, 1, count)
        store(pointers + 8 * node, widened)
    exchanges.add_nodes(context, plan, result, count)


@njit(error_model="numpy")
def _exchange_rounded(context: int, plan: int, word: int, own: int, result: int, count: int) -> int:
    """Add the rounded sums of all nodes into ``result``, which may be ``own``.

    ``own`` holds the ``count`` elements of this node's sum.
    """
    network, itemsize = load(context + layout.NETWORK), load(plan + layout.ITEMSIZE)
    nodes, node = load(network + NODES), load(network + NODE)
    whole = _in_one_step(nodes, slice_size(load(plan + layout.NBYTES), load(context + layout.WORLD)))
    part = count if whole else exchanges.part_of_each(count, nodes)
    stride = 0 if whole else part
    low, high = min(node * stride, count), min(node * stride + part, count)
    arrived = first_slot(network, plan) + load(plan + layout.SLOT)
    status = exchanges.send_parts(context, word, own, arrived, itemsize, stride, part, count)
    if status != DONE:
        return status
    wide = arrived + load(plan + layout.SLOT) * _slots_of(nodes, whole)
    _add_rounded_nodes(context, plan, result + itemsize * low, wide, high - low)
    return DONE if whole else exchanges.share_parts(context, word, result, itemsize, part, count)


def in_16_bits(context: int, plan: int, x: int, out: int) -> int:
    """out = x_0 + ... + x_{N-1} on every rank. x, out: nbytes; they may be the same."""
    word, _, world_size, _ = begin(context, plan)
    if word == 0:
        return ABORTED
    network, result = load(context + layout.NETWORK), out + slice_start(context, plan)
    own, count = x, slice_count(context, plan)  # with one rank per node, a node's sum is the rank's x
    if world_size > 1:
        status = reduce_in_node(context, plan, word, x)
        if status != DONE:
            return status
        own = first_slot(network, plan)
        rounded(context, plan, own, load(network + ACCUMULATOR), count)
    status = _exchange_rounded(context, plan, word, own, result, count)
    return status if status != DONE else gather(context, plan, word, result, out, -1)


def _rounded_sums(plan: CallPlan) -> dict[int, Arithmetic]:
    """Look up the sums over nodes, and the addition of rounded sums. Raises UnsupportedError unless in 16 bits."""
    if plan.dtype not in SIXTEEN_BITS:
        raise UnsupportedError(f"{plan.algorithm} adds up {' and '.join(SIXTEEN_BITS)}, not {plan.dtype}")
    return partial_sums(plan) | sums(plan)


def _rounded_slots(nodes: int, slice_bytes: int) -> int:
    """Compute the slots for the local rounded sum, the arriving ones and, if needed, all of them in float32."""
    whole = in_one_step(nodes, slice_bytes)
    wide = (nodes if whole else 1) if nodes > _IN_ORDER else 0
    return 1 + _slots_that_arrive(nodes, whole) + wide


IN_16_BITS = HostCall(
    schedule=CompiledSchedule(in_16_bits), chunk=for_all_ranks, arithmetic=_rounded_sums, slots=_rounded_slots
)
