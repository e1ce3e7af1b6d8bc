"""The controller: runs schedules on lanes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shotcast.collectives.communicator import Communicator
from shotcast.errors import ConfigError
from shotcast.overlap.lanes import Lanes
from shotcast.overlap.schedule import COMPUTE_LANE, Compute, Schedule, Step

Computation = Callable[[], Any]
Communication = Callable[[Communicator], Any]


def numbered(
    count: int, compute: Callable[[int], Any], communicate: Callable[[int, Communicator], Any]
) -> tuple[dict[str, Computation], dict[str, Communication]]:
    """Return the work of the steps ``compute i`` and ``communicate i``, for i below ``count``, for a controller."""
    return (
        {f"compute {number}": functools.partial(compute, number) for number in range(count)},
        {f"communicate {number}": functools.partial(communicate, number) for number in range(count)},
    )


class Controller:
    """Runs schedules on lanes.

    Every rank must run the same schedules in the same order. On GPUs a step consists of the work it enqueues. Results
    of steps are kept until the computation has waited for all communication, so their memory is not reused too early.
    Other tensors that both lanes use must live until :meth:`run` returns.

    Args:
        lanes: where the steps run.
    """

    def __init__(self, lanes: Lanes):
        self.lanes = lanes

    def run(
        self, schedule: Schedule, computations: Mapping[str, Computation], communications: Mapping[str, Communication]
    ) -> dict[str, Any]:
        """Run the steps of a schedule and return what each returned, by name.

        Args:
            schedule: the same on all ranks.
            computations: the work of each :class:`Compute` step.
            communications: the work of each :class:`Communicate` step, called with the communicator of its lane.

        Raises:
            ConfigError: a step has no work.
            Exception: the error of a step. No step begins after it.
        """
        for step in schedule.steps:
            if step.name not in (computations if isinstance(step, Compute) else communications):
                raise ConfigError(f"step {step.name!r} of the schedule has no work")
        lanes = self.lanes
        order = schedule.order(lanes.count)
        awaited = {name for _, name in order.edges} | set(order.last)
        results: dict[str, Any] = {}
        lanes.begin()
        error: BaseException | None = None
        try:
            events = {name: lanes.event() for name in awaited}
            began = lanes.event()
            if order.first:
                lanes.record(COMPUTE_LANE, began)

            def give(step: Step) -> None:
                name, lane = step.name, order.lanes[step.name]

                def work() -> None:
                    if isinstance(step, Compute):
                        results[name] = computations[name]()
                    else:
                        results[name] = communications[name](lanes.communicators[lane - 1])
                        lanes.share(results[name])

                if name in order.first:
                    lanes.wait(lane, began)
                for other in order.waits.get(name, ()):
                    lanes.wait(lane, events[other])
                lanes.call(lane, work)
                if name in events:
                    lanes.record(lane, events[name])

            # lanes that take communication ahead get all of it first
            for step in sorted(schedule.steps, key=lambda step: lanes.ahead and isinstance(step, Compute)):
                give(step)
            for name in order.last:
                lanes.wait(COMPUTE_LANE, events[name])
        except BaseException as caught:
            error = caught
            raise
        finally:
            lanes.finish(error)
        return results
