"""How long a collective takes, by the alpha-beta model: a latency per step, and bytes over bandwidth.

For N ranks, a message of M bytes, a step latency a, a fixed cost f of the call and a bandwidth b each way:

    one-shot   T = f + a + (N-1) M / b              every rank sends M to N-1 peers at once
    two-shot   T = f + 2a + 2 (N-1)/N M / b         a slice to each owner, then a slice to everyone
    ring       T = f + (2N-2) (a + M / (N b))       2N-2 steps of one slice each

The all-gather and the reduce-scatter of M bytes in all take half of two-shot's, or ring's, steps and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Constants of a machine: ``fixed_us`` a call, ``step_us`` a step, ``bw_gbps`` (1e9 bytes a second, each way)."""

    fixed_us: float
    step_us: float
    bw_gbps: float

    def transfer_us(self, nbytes: float) -> float:
        return nbytes / (self.bw_gbps * 1e3)


NVLINK4 = LinkCost(fixed_us=1.3, step_us=1.2, bw_gbps=370.0)
"""Hopper, 18 links: an empty kernel in a graph 1.3 us; the rest from prototypes on 4 H200 (docs/algorithms.md)."""
SHARED_MEMORY = LinkCost(fixed_us=1.0, step_us=3.0, bw_gbps=15.0)
"""Processes of one host. Only the order of the algorithms is meant: with 4 ranks on 2 cores two-shot overtakes one-shot
between 16 and 64 KiB (benchmarks/data/cpu)."""


def collective_us(op: str, algorithm: str, nbytes: int, world_size: int, link: LinkCost) -> float:
    """Predicted time in microseconds.

    Args:
        op: ``all_reduce``, ``reduce_scatter``, ``all_gather``, ``all_to_all`` or ``broadcast``.
        algorithm: ``one_shot``, ``two_shot`` or ``ring``.
        nbytes: of the whole message (for the gather its output, for the scatter its input).
        world_size: ranks, from 1 up.
        link: the machine's constants.
    """
    others = world_size - 1
    share = nbytes / world_size
    sent: float
    if op == "all_reduce" and algorithm == "one_shot":
        steps, sent = 1, others * nbytes
    elif op == "all_reduce" and algorithm == "two_shot":
        steps, sent = 2, 2 * others * share
    elif algorithm == "ring":
        steps = others * (2 if op == "all_reduce" else 1)
        sent = steps * share
    elif op == "broadcast":
        steps, sent = 1, others * nbytes
    else:
        steps, sent = 1, others * share
    return link.fixed_us + steps * link.step_us + link.transfer_us(sent)
