"""The times of forms that take turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from overlap_bench.config import OverlapConfig
from shotcast.collectives.communicator import Communicator
from shotcast.overlap.policy import Way, measure


def times_of(comm: Communicator, ways: Sequence[Way], config: OverlapConfig) -> dict[str, float]:
    """Return the time of each way in microseconds, repeated for long enough. Collective."""
    once = measure(comm, ways, 1)
    repeats = {name: max(1, math.ceil(config.seconds * 1e6 / time_us)) for name, time_us in once.items()}

    def sustained(way: Way) -> Callable[[], None]:
        def repeated() -> None:
            for _ in range(repeats[way.name]):
                way.run()

        return repeated

    times = measure(comm, [Way(way.name, sustained(way)) for way in ways], config.rounds)
    return {name: time_us / repeats[name] for name, time_us in times.items()}
