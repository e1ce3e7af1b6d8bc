"""Work that is done again and again, by the way that a measurement found the fastest for its shape."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from shotcast.collectives.communicator import Communicator
from shotcast.overlap.controller import Controller
from shotcast.overlap.policy import AUTO, SEQUENTIAL, Decision, Way, decide

K = TypeVar("K")
T = TypeVar("T")
MOST_KEPT = 1024
"""The decisions, or calls, that are remembered at once: shapes may change without end."""


def bucket(rows: int) -> int:
    """Return the least power of two from ``rows`` on. One decision serves all numbers of rows up to it."""
    return 1 << max(rows - 1, 0).bit_length()


def remember(known: MutableMapping[K, T], key: K, value: T) -> T:
    """Add to what is known, and return it. The oldest is forgotten: the same on all ranks that do the same work."""
    if len(known) >= MOST_KEPT:
        del known[next(iter(known))]
    known[key] = value
    return value


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
        checked: Collection[str] = (),
    ) -> T:
        """Do the work, by ways that can be repeated.

        Inside a graph capture nothing is measured: a shape that is not known is done one after the other.

        The decision is for a ``shape``. The sequential way is the first. ``predict`` returns the times that models
        predict, in microseconds, where a shape is first met. Ways that are ``checked`` are not taken unless their
        results have the bits of the sequential one.
        """
        if self.way != AUTO:
            return ways.get(self.way, ways[SEQUENTIAL])()
        decision = self.decisions.get(shape)
        if decision is None:
            if len(ways) == 1 or (self._comm.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                return ways[SEQUENTIAL]()
            times = predict()
            choices = [Way(name, run, times.get(name)) for name, run in ways.items()]
            decision = decide(self._comm, choices, checked=checked)
            remember(self.decisions, shape, decision)
        return ways.get(decision.way, ways[SEQUENTIAL])()  # a smaller shape may have fewer ways


@dataclass(slots=True)
class Cache:
    """The state that a communicator keeps for one kind of products."""

    adaptive: Adaptive  # decides, by shape and dtype
    known: dict[Hashable, Any] = field(default_factory=dict)  # what was found out of the last shapes
    controller: Controller | None = None  # of the lanes of CPU ranks, once there is one

    @classmethod
    def of(cls, comm: Communicator, kind: str) -> Cache:
        """Return the cache of a communicator, which begins empty."""
        if kind not in comm._state_above:
            comm._state_above[kind] = cls(Adaptive(comm))
        found: Cache = comm._state_above[kind]
        return found

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what ``make`` returned when this key was first asked for."""
        found: T = self.known[key] if key in self.known else remember(self.known, key, make())
        return found
