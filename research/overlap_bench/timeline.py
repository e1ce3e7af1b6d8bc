"""Timelines: when each step of a schedule ran, and how much communication was hidden by computation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shotcast.overlap import schedule
from shotcast.overlap.chains import Chain
from shotcast.overlap.controller import Communication, Computation, Controller
from shotcast.overlap.lanes import StreamLanes
from shotcast.overlap.policy import PLAIN, SEQUENTIAL
from shotcast.overlap.schedule import COMPUTE_LANE, Schedule


@dataclass(frozen=True, slots=True)
class Span:
    """The time of one step, in microseconds from the start of the schedule; ``lane`` 0 computes."""

    name: str
    lane: int
    begin_us: float
    end_us: float

    @property
    def us(self) -> float:
        """The time of the step."""
        return self.end_us - self.begin_us


@dataclass(frozen=True, slots=True)
class Timeline:
    """The times of all steps of one run of a schedule, on one rank."""

    spans: tuple[Span, ...]

    @property
    def compute_us(self) -> float:
        """The time during which a computation ran."""
        return sum(end - begin for begin, end in self._busy(computing=True))

    @property
    def communication_us(self) -> float:
        """The time during which a communication ran, with or without a computation."""
        return sum(end - begin for begin, end in self._busy(computing=False))

    @property
    def hidden_us(self) -> float:
        """The time during which both ran."""
        return sum(
            max(0.0, min(end, other_end) - max(begin, other_begin))
            for begin, end in self._busy(computing=True)
            for other_begin, other_end in self._busy(computing=False)
        )

    def _busy(self, computing: bool) -> list[tuple[float, float]]:
        """Return the time of computations or of communications, as disjoint intervals."""
        spans = (span for span in self.spans if (span.lane == COMPUTE_LANE) == computing)
        joined: list[tuple[float, float]] = []
        for begin, end in sorted((span.begin_us, span.end_us) for span in spans):
            if joined and begin <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((begin, end))
        return joined


def timed(
    controller: Controller,
    plan: Schedule,
    computations: Mapping[str, Computation],
    communications: Mapping[str, Communication],
) -> Timeline:
    """Run a schedule once, wait for its end, and return when each step ran."""
    on_gpu = isinstance(controller.lanes, StreamLanes)
    stamps: dict[str, tuple[Any, Any]] = {}

    def stamp() -> Any:
        if not on_gpu:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()  # on the stream of the lane
        return event

    def stamped(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            begin = stamp()
            result = work(*given)
            stamps[name] = begin, stamp()
            return result

        return run

    works = [{name: stamped(name, work) for name, work in some.items()} for some in (computations, communications)]
    controller.run(plan, *works)
    if on_gpu:
        torch.cuda.synchronize()
    first = stamps[plan.steps[0].name][0]

    def time_us(stamp: Any) -> float:
        return float(first.elapsed_time(stamp)) * 1e3 if on_gpu else (stamp - first) / 1e3

    times = {name: (time_us(begin), time_us(end)) for name, (begin, end) in stamps.items()}
    earliest = min(begin for begin, _ in times.values())
    lanes = plan.order(controller.lanes.count).lanes
    return Timeline(
        tuple(Span(name, lanes[name], begin - earliest, end - earliest) for name, (begin, end) in times.items())
    )


def timed_chain(chain: Chain, way: str) -> Timeline:
    """Run a chain once in the way called ``way``, wait for its end, and return when each step ran."""
    lanes = chain._lanes[PLAIN if way == SEQUENTIAL else way]
    plan = schedule.sequential(chain._plan) if way == SEQUENTIAL else chain._plan
    return timed(Controller(lanes), plan, *chain._works(way))
