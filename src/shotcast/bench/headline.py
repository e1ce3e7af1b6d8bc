"""The sentences that end a benchmark: how much faster own algorithms are than others, where that is no accident."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shotcast.bench import implementations
from shotcast.bench.report import Row
from shotcast.units import format_size

SMALLEST = 1.05
"""Ratios below this one are not named."""
OWN = ("one_shot", "two_shot")


@dataclass(frozen=True, slots=True)
class _Gain:
    algorithm: str
    sizes: tuple[int, int]
    ratio: float


def sentences(rows: Sequence[Row]) -> str:
    """Return a line for each of ring, NCCL (the best form) and Gloo over which one-shot or two-shot gains.

    A ratio is named where a repetition and a neighboring size bear it out: it is what the slowest round of the own
    algorithm has over the fastest round of the other, and the smaller one of two neighboring sizes. Of all pairs of
    sizes, the one where it is largest is named. There is no line for ratios below :data:`SMALLEST`, for a single size,
    and for rows whose rounds are not known.
    """
    others: dict[str, Callable[[str], bool]] = {
        "ring": lambda name: name == "ring",
        "the best NCCL": implementations.is_nccl,
        "Gloo": lambda name: name == "gloo",
    }
    lines = []
    for label, is_other in others.items():
        gain = _largest(rows, is_other)
        if gain is not None and gain.ratio >= SMALLEST:
            first, last = (format_size(nbytes) for nbytes in gain.sizes)
            # rounded down, so that no line claims more than was measured
            ratio = f"{int(gain.ratio * 10) / 10:.1f}" if gain.ratio >= 1.1 else f"{int(gain.ratio * 100) / 100:.2f}"
            lines.append(
                f"{rows[0].world_size} ranks: {gain.algorithm} is at least {ratio} times as fast as {label} at "
                f"{first} and {last}"
            )
    return "\n".join(lines)


def _largest(rows: Sequence[Row], is_other: Callable[[str], bool]) -> _Gain | None:
    timed = [row for row in rows if row.measure == "call" and row.lowest_us and row.highest_us]
    by_size = [
        (nbytes, [row for row in timed if row.nbytes == nbytes]) for nbytes in sorted({row.nbytes for row in rows})
    ]
    gains = [
        _Gain(
            algorithm,
            (first, second),
            min(_ratio(of_first, algorithm, is_other), _ratio(of_second, algorithm, is_other)),
        )
        for (first, of_first), (second, of_second) in itertools.pairwise(by_size)
        for algorithm in OWN
    ]
    return max(gains, key=lambda gain: gain.ratio, default=None)


def _ratio(rows: Sequence[Row], algorithm: str, is_other: Callable[[str], bool]) -> float:
    """Return the fastest round of the others over the slowest of ``algorithm``, 0 where either was not measured."""
    own = [row.highest_us for row in rows if row.algorithm == algorithm and row.highest_us]
    others = [row.lowest_us for row in rows if is_other(row.algorithm) and row.lowest_us]
    return min(others) / max(own) if own and others else 0.0
