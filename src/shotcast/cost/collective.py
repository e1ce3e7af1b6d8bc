"""How long a collective takes, by the alpha-beta model: a latency per step, bytes over bandwidth, and local work.

For N ranks, a message of M bytes, a step latency a, a fixed cost f of the call, a bandwidth b each way and a rate m at
which a rank takes in what has arrived (reads it, uses it, clears it):

    one-shot   T = f + a + (N-1) M / b + N M / m             every rank sends M to N-1 peers at once, and adds up N M
    two-shot   T = f + 2a + 2 (N-1)/N M / b + M / m          a slice to each owner, then a slice to everyone
    in FP8     T = f + 2a + 2 (N-1)/N R M / b + M / m        R = 33/32 bytes an element, for the item's; not calibrated
    ring       T = f + (2N-2) (a + M / (N b)) + 3/2 M / m    2N-2 steps of one slice each
    multimem   T = f + 3a + (N+1)/N M / b + 2 M / m      staging and a flag, a load that the switch sums, a store to all

In multimem the switch reads a slice of M/N from every rank, itself included, for each of the N owners, and the result
goes back to its owner; then it takes M/N from each owner to every rank, itself included. So a rank sends M + M/N and
receives M/N + M. (That the own copy takes the wire as well: measured on 4 H20 by a user, forums.developer.nvidia.com
topic 356726.) With N = 2 it sends more than two-shot, from N = 4 on less. The equation is not calibrated.

The all-gather and the reduce-scatter of M bytes in all take half of two-shot's, or ring's, steps and bytes sent, and
take in M. (Two-shot and ring take in M twice. As measured, one pass of two-shot hides under the transfers of the other,
and half of one in the ring, whose steps wait for each other: that sets them apart where N = 2.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Constants of a machine.

    Attributes:
        fixed_us: a call.
        step_us: a step.
        bw_gbps: between ranks, each way; 1e9 bytes a second.
        local_gbps: at which a rank takes in what has arrived.
    """

    fixed_us: float
    step_us: float
    bw_gbps: float
    local_gbps: float = math.inf

    def transfer_us(self, nbytes: float) -> float:
        return nbytes / (self.bw_gbps * 1e3)


NVLINK4 = LinkCost(fixed_us=0.988, step_us=0.857, bw_gbps=474.1, local_gbps=1386.0)
"""Hopper, 18 links: :func:`shotcast.cost.calibration.fit` of benchmarks/data/h200/all_reduce_bf16_x4.json and _x2.json.
Off by 8% in the mean square; a choice by it costs at most 4% more than the fastest measured, 1 KiB to 256 MiB."""
SHARED_MEMORY = LinkCost(fixed_us=1.0, step_us=3.0, bw_gbps=15.0)
"""Processes of one host. Only the order of the algorithms is meant: with 4 ranks on 2 cores two-shot overtakes one-shot
between 16 and 64 KiB (benchmarks/data/cpu)."""


class Work(NamedTuple):
    """What a rank does in one call: steps, bytes it sends, bytes it takes in."""

    steps: int
    sent: float
    taken: float


def work(op: str, algorithm: str, nbytes: int, world_size: int, itemsize: int = 2) -> Work:
    """Terms of the equations above; arguments as of :func:`collective_us`."""
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
    """Predicted time in microseconds.

    Args:
        op: ``all_reduce``, ``reduce_scatter``, ``all_gather``, ``all_to_all`` or ``broadcast``.
        algorithm: ``one_shot``, ``two_shot``, ``ring`` or (all_reduce) ``two_shot_fp8`` or ``multimem``.
        nbytes: of the whole message (for the gather its output, for the scatter its input).
        world_size: ranks, from 1 up.
        link: the machine's constants.
        itemsize: bytes of an element, which matter where it is sent as FP8.
    """
    steps, sent, taken = work(op, algorithm, nbytes, world_size, itemsize)
    return link.fixed_us + steps * link.step_us + link.transfer_us(sent) + taken / (link.local_gbps * 1e3)
