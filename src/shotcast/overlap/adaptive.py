"""Work that is done again and again, by the way that a measurement found the fastest for its shape."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

from shotcast.collectives.communicator import Communicator
from shotcast.overlap.policy import AUTO, SEQUENTIAL, Decision, Way, decide

T = TypeVar("T")
MOST_KEPT = 1024
"""The decisions that are remembered at once: shapes may change without end."""


def bucket(rows: int) -> int:
    """Return the least power of two from ``rows`` on. One decision serves all numbers of rows up to it."""
    return 1 << max(rows - 1, 0).bit_length()


class Adaptive:
    """Does work by one of several ways that give the same results.

    With ``auto`` the ways are measured when a shape is first met; else ``way`` is the name of one, which is taken where
    it exists, and the sequential one where it does not. ``decisions`` has those of the last shapes.
    """

    def __init__(self, comm: Communicator, way: str = AUTO):
        self._comm, self.way = comm, way
        self.decisions: dict[Hashable, Decision] = {}

    def run(
        self,
        shape: Hashable,
        ways: Mapping[str, Callable[[], T]],
        predict: Callable[[], Mapping[str, float]] = dict,
    ) -> T:
        """Do the work, by ways that can be repeated.

        Inside a graph capture nothing is measured: a shape that is not known is done one after the other.

        The decision is for a ``shape``. The sequential way is the first. ``predict`` returns the times that models
        predict, in microseconds, where a shape is first met.
        """
        if self.way != AUTO:
            return ways.get(self.way, ways[SEQUENTIAL])()
        decision = self.decisions.get(shape)
        if decision is None:
            if len(ways) == 1 or (self._comm.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                return ways[SEQUENTIAL]()
            times = predict()
            choices = [Way(name, run, times.get(name)) for name, run in ways.items()]
            decision = decide(self._comm, choices)
            if len(self.decisions) >= MOST_KEPT:  # the oldest is forgotten: the same on all ranks that do the same work
                del self.decisions[next(iter(self.decisions))]
            self.decisions[shape] = decision
        return ways.get(decision.way, ways[SEQUENTIAL])()  # a smaller shape may have fewer ways
