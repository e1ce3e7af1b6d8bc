"""A call without data between nodes: a barrier, and the exchange of headers before a call of the vendor's library."""

from __future__ import annotations

from shotcast.device.cpu.atomics import load
from shotcast.device.cpu.compilation import Schedule
from shotcast.transport.cpu.layout import NETWORK, STEP
from shotcast.transport.cpu.waiting import ABORTED, DONE, await_all, begin, finish, publish
from shotcast.transport.network.frames import add_receipt, add_send, begin_transfer, transfer
from shotcast.transport.network.hosts_call import HostsCall
from shotcast.transport.network.layout import NODE, NODES


def meet(context: int, plan: int, x: int, out: int) -> int:
    """Return when every rank has begun this call. ``x`` and ``out`` are not used.

    A rank tells its peers after it has seen all ranks of its node, so whoever hears of all nodes knows of all ranks.
    """
    word = begin(context, plan)
    if word == 0:
        return ABORTED
    step = publish(context, load(context + STEP))
    status = await_all(context, step, word)
    if status != DONE:
        return status
    network = load(context + NETWORK)
    nodes, node = load(network + NODES), load(network + NODE)
    begin_transfer(network)
    for distance in range(1, nodes):
        add_send(context, network, word, (node + distance) % nodes, 0, 0, 0)
    for distance in range(1, nodes):
        add_receipt(context, network, word, (node + distance) % nodes, 0, 0, 0)
    status = transfer(context, network)
    return status if status != DONE else finish(context, step)


BARRIER = HostsCall(schedule=Schedule(meet), header_only=True)
