r"""The alpha-beta model of collectives: a latency per step, bytes over bandwidth, and local work.

.. math:: T = f + s\,a + S / b + R / m + C / c + s_n\,a_n + S_n / b_n

A rank makes s steps, sends S bytes, takes in R bytes (reads, uses and clears them) and converts C values to or from
FP8. f is the fixed cost of a call, a the latency of a step, b the bandwidth in each direction, m the rate at which a
rank takes in received bytes and c the rate at which it converts. Over several nodes, :math:`s_n` of its steps and
:math:`S_n` of its bytes go over the network between them, which has the latency :math:`a_n` and, for each rank, the
bandwidth :math:`b_n` in each direction; s and S count those within nodes alone. The description of each algorithm gives
its s, S, R, C, :math:`s_n` and :math:`S_n` (:mod:`shotcast.collectives.algorithms`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from shotcast.wire import NodeShape


@dataclass(frozen=True, slots=True)
class LinkCost:
    """The constants of a machine.

    Attributes:
        fixed_us: the fixed cost of a call.
        step_us: the latency of a step.
        bw_gbps: bandwidth between ranks in each direction, in 1e9 bytes a second.
        local_gbps: the rate at which a rank takes in received bytes, in 1e9 bytes a second.
        converted_per_ns: the values that a rank converts to or from FP8 in a nanosecond.
    """

    fixed_us: float
    step_us: float
    bw_gbps: float
    local_gbps: float = math.inf
    converted_per_ns: float = math.inf

    def transfer_us(self, nbytes: float) -> float:
        """Return the microseconds that ``nbytes`` take on the wire."""
        return nbytes / (self.bw_gbps * 1e3)


NVLINK4 = LinkCost(fixed_us=0.988, step_us=0.857, bw_gbps=474.1, local_gbps=1386.0)
"""Hopper with 18 links, fitted by :func:`shotcast.cost.calibration.fit`.

The measurements are benchmarks/data/h200/all_reduce_bf16_x4.json and _x2.json. The root mean square error is 8%; a
choice by it costs at most 4% more than the fastest measured, from 1 KiB to 256 MiB.
"""
SHARED_MEMORY = LinkCost(fixed_us=1.0, step_us=3.0, bw_gbps=15.0, converted_per_ns=7.0)
"""Processes of one host. Only the order of the algorithms is meaningful.

With 4 ranks on 2 cores, two-shot overtakes one-shot between 16 and 64 KiB (benchmarks/data/cpu). A core converts a
value in about the time in which it copies two bytes: with 2 ranks on 2 cores, an all-reduce by FP8 takes 1.4 to 5 times
as long as two-shot (tests/cost/test_cost.py). GPUs convert while they wait for memory.
"""


class NetworkCost(NamedTuple):
    """The constants of the network between nodes.

    Attributes:
        step_us: the time from a rank's send to the arrival at a rank of another node.
        bw_gbps: bandwidth of each rank in each direction, in 1e9 bytes a second. Where bytes travel in cells, beside as
            many of a flag, it is half of the wire's.
    """

    step_us: float
    bw_gbps: float


NO_NETWORK = NetworkCost(0.0, math.inf)
INFINIBAND = NetworkCost(step_us=5.0, bw_gbps=45.0)
"""GPUs with an NDR adapter each, as published; not measured here."""


class Work(NamedTuple):
    """The work of a rank in one call.

    Attributes:
        steps: steps within its node.
        sent: bytes sent to ranks of its node.
        taken: bytes taken in.
        converted: values converted to or from FP8.
        network_steps: steps over the network between nodes.
        network_sent: bytes sent to ranks of other nodes.
    """

    steps: int
    sent: float
    taken: float
    converted: float = 0.0
    network_steps: int = 0
    network_sent: float = 0.0

    def over(self, shape: NodeShape) -> Work:
        """Return this work, in which a rank treats all others alike, with what of it goes over the network.

        Each of its steps waits for the network, and of what it sends the part that is for other nodes goes over it.
        """
        if shape.nodes == 1:
            return self
        others = (shape.world_size - shape.ranks_per_node) / (shape.world_size - 1)
        network = self.sent * others
        return self._replace(steps=0, sent=self.sent - network, network_steps=self.steps, network_sent=network)


def time_us(work: Work, link: LinkCost, network: NetworkCost = NO_NETWORK) -> float:
    """Return the predicted time of a call in microseconds, by the equation above."""
    local_us = work.taken / (link.local_gbps * 1e3) + work.converted / (link.converted_per_ns * 1e3)
    network_us = work.network_steps * network.step_us + work.network_sent / (network.bw_gbps * 1e3)
    return link.fixed_us + work.steps * link.step_us + link.transfer_us(work.sent) + local_us + network_us
