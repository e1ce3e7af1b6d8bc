"""Repeated work, run in whichever mode measured fastest for its shape."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

from shotcast.collectives.communicator import Communicator
from shotcast.overlap.policy import AUTO, SEQUENTIAL, Decision, Way, decide

T = TypeVar("T")
MOST_KEPT = 1024
"""The number of decisions to remember, since there may be any number of shapes."""


def bucket(rows: int) -> int:
    """Round ``rows`` up to a power of two. One decision serves all numbers of rows in a bucket."""
    return 1 << max(rows - 1, 0).bit_length()


class Adaptive:
    """Runs work in one of several modes that give the same results.

    With ``auto`` the modes are measured when a shape first occurs; otherwise ``way`` names one, with the sequential one
    as a fallback. ``decisions`` holds the decisions for recent shapes.
    """

    def __init__(self, comm: Communicator, way: str = AUTO):
        self._comm, self.way = comm, way
        self.decisions: dict[Hashable, Decision] = {}

    def run(self, shape: Hashable, ways: Mapping[str, Callable[[], T]]) -> T:
        """Do the work in one of ``ways``, which must be repeatable.

        Nothing is measured inside a graph capture: unknown shapes run sequentially.

        Decisions are made per ``shape``. The sequential mode comes first.
        """
        if self.way != AUTO:
            return ways.get(self.way, ways[SEQUENTIAL])()
        decision = self.decisions.get(shape)
        if decision is None:
            if len(ways) == 1 or (self._comm.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                return ways[SEQUENTIAL]()
            decision = decide(self._comm, [Way(name, run) for name, run in ways.items()])
            if len(self.decisions) >= MOST_KEPT:  # the oldest is forgotten: the same on all ranks that do the same work
                del self.decisions[next(iter(self.decisions))]
            self.decisions[shape] = decision
        return ways.get(decision.way, ways[SEQUENTIAL])()  # a smaller shape may have fewer ways
