"""Chains: communicate each result while computing the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shotcast.collectives.communicator import Communicator
from shotcast.errors import ConfigError
from shotcast.overlap import schedule
from shotcast.overlap.controller import Communication, Computation, Controller, numbered
from shotcast.overlap.lanes import HIGH, LOW, Lanes, StreamLanes, lanes_of
from shotcast.overlap.policy import AUTO, PLAIN, SEQUENTIAL, Decision, Way, agree_on, decide
from shotcast.overlap.torch_private import leave_sms

PRIORITY, LIBRARY = "priority", "library"


def way_on(sms: int) -> str:
    """Return the name of the mode whose communication uses this many SMs."""
    return f"{sms} SMs" if sms else "copy engines"


def in_place_sum(comm: Communicator, x: torch.Tensor, sms: int | None = None, algorithm: str = "auto") -> torch.Tensor:
    """Sum ``x`` over the ranks, in place, on at most ``sms`` SMs of a GPU."""
    return comm.all_reduce(x, out=x, algorithm=algorithm, sms=sms)


class Chain:
    """A series of computations, each of whose results is communicated during the next computation.

    Created by :func:`chain`. Every rank must call it equally often and in the same order. It can be captured in a CUDA
    graph after its first call.

    Attributes:
        decision: how it runs and why; None until the first call, and if ``way`` is given.
    """

    def __init__(
        self,
        communicators: Communicator | Sequence[Communicator],
        computations: Sequence[Callable[[], Any]],
        communicate: Callable[..., Any],
        way: str,
        sms: Sequence[int],
    ):
        self._lanes: dict[str, Lanes] = {PLAIN: lanes_of(communicators, LOW)}
        self._comm = self._lanes[PLAIN].communicators[0]
        self._sms: dict[str, int] = {}
        if self._comm.device.type == "cuda":
            urgent = self._lanes[PRIORITY] = StreamLanes(self._comm, HIGH)
            self._sms = {way_on(budget): budget for budget in sms}
            self._lanes |= dict.fromkeys(self._sms, urgent)
        self._lanes[LIBRARY] = self._lanes[PLAIN]
        if way not in (names := (AUTO, SEQUENTIAL, *self._lanes)):
            raise ConfigError(f"a chain runs by one of {', '.join(names)}, not {way!r}")
        self._computations, self._communicate = tuple(computations), communicate
        for computation in self._computations:
            if not callable(computation):
                raise ConfigError(f"a computation of a chain is called without arguments; {computation!r} cannot be")
        self._plan = schedule.chain(len(self._computations))
        self._way, self._agreed = way, False
        self.decision: Decision | None = None

    def __call__(self) -> list[Any]:
        """Run the chain once and return what each communication returned. The first call also decides how."""
        if not self._agreed:
            if self._comm.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise ConfigError("a chain is decided on at its first call; make one before a graph capture")
            agree_on(self._comm, self._plan, self._way, tuple(self._lanes), self._lanes[PLAIN].count)
            self._agreed = True
        if self._way == AUTO:
            self.decision = decide(self._comm, self.ways(), checked=(LIBRARY,))
            self._way = self.decision.way
        return self._run(self._way)

    def ways(self) -> list[Way]:
        """Return the modes to measure, the sequential one first.

        The library is included if it gives the same bits: two ranks add in one order, and round once.
        """
        same_bits = self._communicate is in_place_sum and self._comm.world_size == 2
        names = [SEQUENTIAL, *(name for name in self._lanes if name != LIBRARY or same_bits)]
        return [Way(name, lambda name=name: self._run(name)) for name in names]  # type: ignore[misc]

    def close(self) -> None:
        """End the threads of the chain, but leave the communicators open."""
        for lanes in self._lanes.values():
            lanes.close()

    def _works(self, way: str) -> tuple[dict[str, Computation], dict[str, Communication]]:
        found: dict[int, Any] = {}
        budget = self._sms.get(way)
        arguments: dict[str, Any] = {} if budget is None else {"sms": budget}
        if way == LIBRARY:
            arguments["algorithm"] = "vendor"

        def compute(number: int) -> Any:
            with leave_sms(budget or 0, self._comm.device):
                found[number] = self._computations[number]()
            return found[number]

        def communicate(number: int, comm: Communicator) -> Any:
            return self._communicate(comm, found[number], **arguments)

        return numbered(len(self._computations), compute, communicate)

    def _run(self, way: str) -> list[Any]:
        if way == SEQUENTIAL:  # on the caller's stream or thread alone: nothing is handed over
            return [self._communicate(self._comm, compute()) for compute in self._computations]
        results = Controller(self._lanes[way]).run(self._plan, *self._works(way))
        return [results[f"communicate {number}"] for number in range(len(self._computations))]


def chain(
    communicators: Communicator | Sequence[Communicator],
    computations: Sequence[Callable[[], Any]],
    communicate: Callable[..., Any] = in_place_sum,
    way: str = AUTO,
    sms: Sequence[int] = (),
) -> Chain:
    """Return a chain: computation i+1 runs while the result of computation i is communicated.

    The first call of the chain decides how it runs: it calls all computations several times, in turn and overlapped,
    and selects the faster mode; ``decision`` says why. Without ``sms``, every mode gives the same bits.

    Args:
        communicators: the communicator of the ranks; several on CPU ranks, to have that many messages in flight at once
            (:meth:`Communicator.split`).
        computations: each returns the data to communicate next. None may depend on the result of another one's
            communication.
        communicate: called with a communicator and the result of a computation; an all-reduce in place by default.
        sms: on GPUs, SM limits for communication, each of which is a mode (``24 SMs``, or ``copy engines`` for 0):
            communication is called with ``sms=24``, and products of the vendor's library leave that many SMs free, so
            they may round differently.
        way: ``auto``; or, without measuring, ``sequential``, ``plain``, ``priority`` (a stream of it) or ``library``:
            ``communicate`` is called with ``algorithm="vendor"``, so that NCCL or Gloo runs it. ``auto`` also measures
            that if two ranks sum in place, which gives the same bits.

    Raises:
        ConfigError: there is no computation, or no such mode; at the first call, the ranks' chains differ in length.
    """
    return Chain(communicators, computations, communicate, way, sms)
