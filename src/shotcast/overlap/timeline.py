"""Timelines: when each step of a schedule ran, and how much communication was hidden by computation."""

from __future__ import annotations

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
