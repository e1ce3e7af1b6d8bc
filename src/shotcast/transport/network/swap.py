"""A step in which each node swaps data with one other: what a step of recursive doubling costs."""

from __future__ import annotations

from shotcast.device.cpu.atomics import load
from shotcast.device.cpu.compilation import Schedule
from shotcast.transport.cpu.layout import NBYTES, NETWORK, STEP
from shotcast.transport.cpu.waiting import ABORTED, DONE, await_all, begin, finish, publish
from shotcast.transport.network.frames import add_receipt, add_send, begin_transfer, transfer
from shotcast.transport.network.hosts_call import HostsCall
from shotcast.transport.network.layout import NODE, NODES


def swap(context: int, plan: int, x: int, out: int) -> int:
    """Send nbytes at x to the peer on the neighboring node, node xor 1, and receive as many from there into out.

    If there is no such node, nothing is sent.
    """
    word = begin(context, plan)
    if word == 0:
        return ABORTED
    step = publish(context, load(context + STEP))
    status = await_all(context, step, word)
    if status != DONE:
        return status
    network, nbytes = load(context + NETWORK), load(plan + NBYTES)
    other = load(network + NODE) ^ 1
    begin_transfer(network)
    if other < load(network + NODES):
        add_send(context, network, word, other, x, nbytes, 0)
        add_receipt(context, network, word, other, out, nbytes, 0)
    status = transfer(context, network)
    return status if status != DONE else finish(context, step)


SWAP = HostsCall(schedule=Schedule(swap))
