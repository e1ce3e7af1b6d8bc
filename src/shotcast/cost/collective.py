r"""The alpha-beta model of collectives: a latency per step, bytes over bandwidth, and local work.

.. math:: T = f + s\,a + S / b + R / m

A rank makes s steps, sends S bytes and takes in R bytes (reads, uses and clears them). f is the fixed cost of a call, a
the latency of a step, b the bandwidth in each direction and m the rate at which a rank takes in received bytes. The
description of each algorithm gives its s, S and R (:mod:`shotcast.collectives.algorithms`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class LinkCost:
    """The constants of a machine.

    Attributes:
        fixed_us: the fixed cost of a call.
        step_us: the latency of a step.
        bw_gbps: bandwidth between ranks in each direction, in 1e9 bytes a second.
        local_gbps: the rate at which a rank takes in received bytes, in 1e9 bytes a second.
    """

    fixed_us: float
    step_us: float
    bw_gbps: float
    local_gbps: float = math.inf

    def transfer_us(self, nbytes: float) -> float:
        """Return the microseconds that ``nbytes`` take on the wire."""
        return nbytes / (self.bw_gbps * 1e3)


NVLINK4 = LinkCost(fixed_us=0.988, step_us=0.857, bw_gbps=474.1, local_gbps=1386.0)
"""Hopper with 18 links, fitted by :func:`shotcast.cost.calibration.fit`.

The measurements are benchmarks/data/h200/all_reduce_bf16_x4.json and _x2.json. The root mean square error is 8%; a
choice by it costs at most 4% more than the fastest measured, from 1 KiB to 256 MiB.
"""
SHARED_MEMORY = LinkCost(fixed_us=1.0, step_us=3.0, bw_gbps=15.0)
"""Processes of one host. Only the order of the algorithms is meaningful.

With 4 ranks on 2 cores, two-shot overtakes one-shot between 16 and 64 KiB (benchmarks/data/cpu).
"""


class Work(NamedTuple):
    """The work of a rank in one call: its steps, the bytes it sends, and the bytes it takes in."""

    steps: int
    sent: float
    taken: float


def time_us(work: Work, link: LinkCost) -> float:
    """Return the predicted time of a call in microseconds, by the equation above."""
    local_us = work.taken / (link.local_gbps * 1e3)
    return link.fixed_us + work.steps * link.step_us + link.transfer_us(work.sent) + local_us
