"""Work that is done again and again, by the way that a measurement found the fastest for its shape."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

from shotcast.collectives.communicator import Communicator
from shotcast.overlap.policy import SEQUENTIAL, Decision, Way, decide

T = TypeVar("T")
AUTO = "auto"


class Adaptive:
    """Does work by one of several ways that give the same results.

    Args:
        comm: the ranks, which do the same work in the same order.
        way: ``auto`` to measure the ways when a shape is first met; else the name of one, which is taken where it
            exists, and the sequential one where it does not.

    Attributes:
        decisions: what was decided for each shape.
    """

    def __init__(self, comm: Communicator, way: str = AUTO):
        self._comm, self._way = comm, way
        self.decisions: dict[Hashable, Decision] = {}

    def run(
        self,
        shape: Hashable,
        ways: Mapping[str, Callable[[], T]],
        predict: Callable[[], Mapping[str, float]] = dict,
    ) -> T:
        """Do the work, by ways that can be repeated.

        Inside a graph capture nothing is measured: a shape that is not known is done one after the other.

        Args:
            shape: what the decision is for.
            ways: the sequential one first.
            predict: returns the times that models predict, in microseconds; called where a shape is first met.
        """
        if self._way != AUTO:
            return ways.get(self._way, ways[SEQUENTIAL])()
        decision = self.decisions.get(shape)
        if decision is None:
            if len(ways) == 1 or (self._comm.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                return ways[SEQUENTIAL]()
            times = predict()
            decision = decide(self._comm, [Way(name, run, times.get(name)) for name, run in ways.items()])
            self.decisions[shape] = decision
        return ways.get(decision.way, ways[SEQUENTIAL])()  # a smaller shape may have fewer ways
