"""A call without data between nodes: a barrier, and the exchange of headers before a call of the vendor's library."""

from __future__ import annotations

from shotcast.device.cpu.atomics import load
from shotcast.device.cpu.compilation import Schedule
from shotcast.transport.cpu.layout import NETWORK
from shotcast.transport.cpu.waiting import ABORTED, DONE, begin
from shotcast.transport.cpu.waiting import meet as meet_in_node
from shotcast.transport.network.frames import add_receipt, add_send, begin_transfer, transfer
from shotcast.transport.network.hosts_call import HostsCall
from shotcast.transport.network.layout import NODE, NODES


def meet(context: int, plan: int, x: int, out: int) -> int:
    """Return when every rank has begun this call. ``x`` and ``out`` are not used.

    A rank tells its peers after it has seen all ranks of its node, so whoever hears of all nodes knows of all ranks.
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


BARRIER = HostsCall(schedule=Schedule(meet), header_only=True)
