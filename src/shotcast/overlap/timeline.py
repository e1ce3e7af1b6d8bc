"""Timelines: when each step of a schedule ran, and how much communication was hidden by computation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shotcast.overlap.schedule import COMPUTE_LANE


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
    def durations_us(self) -> dict[str, float]:
        """The time of each step."""
        return {span.name: span.us for span in self.spans}

    @property
    def compute_us(self) -> float:
        """The time during which a computation ran."""
        return sum(end - begin for begin, end in _union(span for span in self.spans if span.lane == COMPUTE_LANE))

    @property
    def communication_us(self) -> float:
        """The time during which a communication ran, with or without a computation."""
        return sum(end - begin for begin, end in _union(span for span in self.spans if span.lane != COMPUTE_LANE))

    @property
    def hidden_us(self) -> float:
        """The time during which both ran."""
        compute = _union(span for span in self.spans if span.lane == COMPUTE_LANE)
        communication = _union(span for span in self.spans if span.lane != COMPUTE_LANE)
        return sum(max(0.0, min(b, d) - max(a, c)) for a, b in compute for c, d in communication)


def _union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return the time covered by spans, as disjoint intervals."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted((span.begin_us, span.end_us) for span in spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined
