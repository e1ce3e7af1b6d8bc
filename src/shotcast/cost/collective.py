r"""The alpha-beta model of collectives: a latency per step, bytes over bandwidth, and local work.

.. math:: T = f + s\,a + S / b + R / m + C / c

A rank makes s steps, sends S bytes, takes in R bytes (reads, uses and clears them) and converts C values to or from
FP8. f is the fixed cost of a call, a the latency of a step, b the bandwidth in each direction, m the rate at which a
rank takes in received bytes and c the rate at which it converts. The description of each algorithm gives its s, S, R
and C (:mod:`shotcast.collectives.algorithms`).
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


class Work(NamedTuple):
    """The work of a rank in one call: its steps, the bytes it sends and takes in, and the values it converts."""

    steps: int
    sent: float
    taken: float
    converted: float = 0.0


def time_us(work: Work, link: LinkCost) -> float:
    """Return the predicted time of a call in microseconds, by the equation above."""
    local_us = work.taken / (link.local_gbps * 1e3) + work.converted / (link.converted_per_ns * 1e3)
    return link.fixed_us + work.steps * link.step_us + link.transfer_us(work.sent) + local_us
