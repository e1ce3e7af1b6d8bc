"""Calls without a result: a barrier, which also exchanges headers before a call of the vendor's library, and a swap."""

from __future__ import annotations

from shotcast.device.cpu.atomics import load
from shotcast.device.cpu.compilation import CompiledSchedule
from shotcast.transport.cpu.host_call import HostCall
from shotcast.transport.cpu.layout import NBYTES, NETWORK
from shotcast.transport.cpu.waiting import ABORTED, DONE, begin
from shotcast.transport.cpu.waiting import meet as meet_in_node
from shotcast.transport.network.frames import add_receipt, add_send, begin_transfer, transfer
from shotcast.transport.network.layout import NODE, NODES


def meet(context: int, plan: int, x: int, out: int) -> int:
    """Wait until every rank has begun this call. ``x`` and ``out`` are unused.

    A rank tells its peers after it has seen all ranks of its node, so a rank that hears from all nodes knows about all
    ranks.
    """
    word, _, _, step = begin(context, plan)
    status = meet_in_node(context, step, word) if word != 0 else ABORTED
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
    status = meet_in_node(context, step, word) if word != 0 else ABORTED
    if status != DONE:
        return status
    network, nbytes = load(context + NETWORK), load(plan + NBYTES)
    other = load(network + NODE) ^ 1
    begin_transfer(network)
    if other < load(network + NODES):
        add_send(context, network, word, other, x, nbytes, 0)
        add_receipt(context, network, word, other, out, nbytes, 0)
    return transfer(context, network)


BARRIER = HostCall(schedule=CompiledSchedule(meet), header_only=True)
SWAP = HostCall(schedule=CompiledSchedule(swap))
