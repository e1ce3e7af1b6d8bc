"""A step in which each node swaps data with one other: what a step of recursive doubling costs."""

from __future__ import annotations

from shotcast.device.cpu.atomics import load
from shotcast.device.cpu.compilation import Schedule
from shotcast.transport.cpu.layout import NBYTES, NETWORK
from shotcast.transport.cpu.waiting import ABORTED, DONE, begin, meet
from shotcast.transport.network.frames import add_receipt, add_send, begin_transfer, transfer
from shotcast.transport.network.hosts_call import HostsCall
from shotcast.transport.network.layout import NODE, NODES


def swap(context: int, plan: int, x: int, out: int) -> int:
    """Send nbytes at x to the peer on the neighboring node, node xor 1, and receive as many from there into out.

    If there is no such node, nothing is sent.
    """
    word, _, _, step = begin(context, plan)
    status = meet(context, step, word) if word != 0 else ABORTED
    if status != DONE:
        return status
    network, nbytes = load(context + NETWORK), load(plan + NBYTES)
    other = load(network + NODE) ^ 1
    begin_transfer(network)
    if other < load(network + NODES):
        add_send(context, network, word, other, x, nbytes, 0)
        add_receipt(context, network, word, other, out, nbytes, 0)
    return transfer(context, network)


SWAP = HostsCall(schedule=Schedule(swap))
