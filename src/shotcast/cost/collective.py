"""The cost of collectives by the alpha-beta model: a latency for each step, bytes over bandwidth, and local work.

There are N ranks, a message of M bytes, a step latency a, a fixed cost f of the call, a bandwidth b in each direction
and a rate m at which a rank takes in received bytes (it reads, uses and clears them):

    one-shot   T = f + a + (N-1) M / b + N M / m             every rank sends M to N-1 peers at once, and adds up N M
    two-shot   T = f + 2a + 2 (N-1)/N M / b + M / m          a slice to each owner, then a slice to everyone
    in FP8     T = f + 2a + 2 (N-1)/N R M / b + M / m        R = 33/32 bytes an element, for the item's; not calibrated
    ring       T = f + (2N-2) (a + M / (N b)) + 3/2 M / m    2N-2 steps of one slice each
    multimem   T = f + 3a + (N+1)/N M / b + 2 M / m      staging and a flag, a load that the switch sums, a store to all

In multimem the switch reads a slice of M/N from every rank, the owner included, for each of the N owners, and returns
the result to the owner; then it carries M/N from each owner to every rank, the owner included. So a rank sends M + M/N
and receives M/N + M. (A user measured on 4 H20 that the own copy uses the link as well: forums.developer.nvidia.com,
topic 356726.) It sends more than two-shot with N = 2, and less from N = 4 on. The equation is not calibrated.

An all-gather or reduce-scatter of M bytes in total has half the steps and sent bytes of two-shot, or of the ring, and
takes in M. (Two-shot and ring take in M twice. Measurements show that one pass of two-shot is hidden by the transfers
of the other, but only half a pass of the ring, whose steps wait for each other; this tells them apart with N = 2.)
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


def work(op: str, algorithm: str, nbytes: int, world_size: int, itemsize: int = 2) -> Work:
    """Return the terms of the equations above; the arguments are those of :func:`collective_us`."""
    others = world_size - 1
    share = nbytes / world_size
    if op == "all_reduce" and algorithm == "one_shot":
        return Work(1, others * nbytes, world_size * nbytes)
    if op == "all_reduce" and algorithm == "two_shot":
        return Work(2, 2 * others * share, nbytes)
    if op == "all_reduce" and algorithm == "two_shot_fp8":
        return Work(2, 2 * others * share * (33 / 32 / itemsize), nbytes)
    if op == "all_reduce" and algorithm == "multimem":
        return Work(3, nbytes + share, 2 * nbytes)
    if algorithm == "ring":
        if op == "all_reduce":
            return Work(2 * others, 2 * others * share, 1.5 * nbytes)
        return Work(others, others * share, nbytes)
    if op == "broadcast":
        return Work(1, others * nbytes, nbytes)
    return Work(1, others * share, nbytes)


def collective_us(op: str, algorithm: str, nbytes: int, world_size: int, link: LinkCost, itemsize: int = 2) -> float:
    """Predict the time of a collective in microseconds.

    Args:
        op: ``all_reduce``, ``reduce_scatter``, ``all_gather``, ``all_to_all`` or ``broadcast``.
        algorithm: ``one_shot``, ``two_shot``, ``ring`` or (all_reduce) ``two_shot_fp8`` or ``multimem``.
        nbytes: of the whole message: the output of a gather, the input of a scatter.
        world_size: the number of ranks, at least 1.
        link: the constants of the machine.
        itemsize: bytes of an element, which matter if it is sent as FP8.
    """
    steps, sent, taken = work(op, algorithm, nbytes, world_size, itemsize)
    return link.fixed_us + steps * link.step_us + link.transfer_us(sent) + taken / (link.local_gbps * 1e3)
