"""Schedules run on lanes: every wait is there and needed, errors end a run, and lanes really run at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from emulated_streams import EmulatedStreams
from overlap_bench.own import prefetch

from shotcast.errors import ClosedError, ConfigError
from shotcast.overlap import schedule
from shotcast.overlap.controller import Controller
from shotcast.overlap.lanes import Lanes, StreamLanes, ThreadLanes
from shotcast.overlap.schedule import Communicate, Compute, Schedule

PLANS = {
    "chain": schedule.chain(3),
    "prefetch": prefetch(3),
    "split": schedule.split(2),
    "buckets": Schedule((*schedule.chain(2).steps, *(Compute(f"update {i}", (f"communicate {i}",)) for i in range(2)))),
    "beside": schedule.beside(),
    "gather and scatter": schedule.gather_and_scatter(),
}


class Rank:
    """A stand-in for a communicator; the race is within one rank."""

    def __init__(self, kind: str):
        self.device = torch.device(kind)


class Data:
    """The values of steps: each takes the values of the steps that it needs, and has one of its own.

    A step that begins too early finds nothing there, and so its value is wrong, as is that of all who need it.
    """

    def __init__(self, plan: Schedule):
        self.plan = plan
        self.values: dict[str, int] = {}

    def compute(self, name: str) -> None:
        step = next(step for step in self.plan.steps if step.name == name)
        self.values[name] = 1 + sum(self.values.get(other, -1000) for other in step.after)

    @property
    def right(self) -> bool:
        other = Data(self.plan)
        for step in self.plan.steps:
            other.compute(step.name)
        return self.values == other.values


class Waits:
    """Lets lanes leave out one wait of a run, and counts all."""

    def __init__(self, lanes: Lanes, left_out: int | None = None):
        self.made, self._left_out, self._wait = 0, left_out, lanes.wait
        lanes.wait = self.wait  # type: ignore[method-assign]

    def wait(self, lane: int, event: Any) -> None:
        self.made += 1
        if self.made - 1 != self._left_out:
            self._wait(lane, event)


def on_streams(plan: Schedule, order: tuple[int, int], left_out: int | None) -> tuple[bool, int]:
    """Run a plan on emulated streams, of which the first of ``order`` goes on as long as it can."""
    streams, data = EmulatedStreams(), Data(plan)
    lanes = StreamLanes(Rank("cpu"), streams=streams)  # type: ignore[arg-type]
    waits = Waits(lanes, left_out)
    streams.enqueue(lambda: data.values.setdefault("before", 1))  # what the caller enqueued before

    def work(name: str) -> Callable[..., None]:
        def late() -> None:
            if "before" in data.values:
                data.compute(name)

        return lambda *communicator: streams.enqueue(late)

    works = {step.name: work(step.name) for step in plan.steps}
    Controller(lanes).run(plan, works, works)
    seen: list[bool] = []

    def after() -> None:
        del data.values["before"]
        seen.append(data.right)

    streams.enqueue(after)  # what the caller enqueues next sees all results
    streams.run(order)
    return seen[0], waits.made


@pytest.mark.parametrize("name", PLANS)
def test_streams_wait_for_each_other_as_much_as_they_must(name: str) -> None:
    """Results are right whatever stream is late; without any one of the waits some are wrong."""
    plan = PLANS[name]
    orders = ((0, 1), (1, 0))
    for order in orders:
        right, made = on_streams(plan, order, None)
        assert right
    for left_out in range(made):
        assert not all(on_streams(plan, order, left_out)[0] for order in orders), f"wait {left_out} is not needed"


class DelayedLanes(ThreadLanes):
    """Threads of which one lane is late with each of its steps."""

    def __init__(self, lanes: int, late: int, delay_s: float):
        super().__init__([Rank("cpu")] * lanes)  # type: ignore[list-item]
        self._late, self._delay_s = late, delay_s

    def call(self, lane: int, work: Callable[[], Any]) -> None:
        def delayed() -> None:
            if lane == self._late:
                time.sleep(self._delay_s)
            work()

        super().call(lane, delayed)


def on_threads(plan: Schedule, count: int, late: int, left_out: int | None, delay_s: float = 0.002) -> tuple[bool, int]:
    lanes, data = DelayedLanes(count, late, delay_s), Data(plan)
    waits = Waits(lanes, left_out)

    def work(name: str) -> Callable[..., None]:
        return lambda *communicator: data.compute(name)

    works = {step.name: work(step.name) for step in plan.steps}
    try:
        Controller(lanes).run(plan, works, works)
        return data.right, waits.made
    finally:
        lanes.close()


@pytest.mark.every(4)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", PLANS)
def test_threads_wait_for_each_other_as_much_as_they_must(name: str, count: int) -> None:
    """The waits that end a run, and those for what came before it, are made by its begin and end on threads."""
    plan = PLANS[name]
    order = plan.order(count)
    for late in range(count + 1):
        right, made = on_threads(plan, count, late, None)
        assert right
    assert made == len(order.edges) + len(order.first) + len(order.last)
    spare = {left_out for left_out in range(made) if not found_missing(plan, count, left_out)}
    assert made - len(spare) == len(order.edges)


def found_missing(plan: Schedule, count: int, left_out: int) -> bool:
    """Return whether results are wrong without a wait. A loaded machine may need a longer delay to show it."""
    delays = (0.002, 0.05)
    return any(
        not on_threads(plan, count, late, left_out, delay_s)[0] for delay_s in delays for late in range(count + 1)
    )


@contextmanager
def threads(count: int = 1) -> Iterator[Controller]:
    lanes = ThreadLanes([Rank("cpu")] * count)  # type: ignore[list-item]
    try:
        yield Controller(lanes)
    finally:
        lanes.close()


def test_both_lanes_run_at_once() -> None:
    """Each step waits until one of the other lane has begun, which only a second thread can do."""
    meeting = threading.Barrier(2)
    plan = Schedule((Compute("a"), Communicate("b")))
    with threads() as controller:
        controller.run(plan, {"a": lambda: meeting.wait(100)}, {"b": lambda comm: meeting.wait(100)})


def test_results_come_back_by_name() -> None:
    with threads() as controller:
        found = controller.run(
            schedule.chain(1), {"compute 0": lambda: 1}, {"communicate 0": lambda comm: comm.device.type}
        )
    assert found == {"compute 0": 1, "communicate 0": "cpu"}


@pytest.mark.parametrize("at", ["compute 0", "communicate 0", "compute 1", "communicate 1"])
def test_an_error_ends_the_run_and_lanes_go_on(at: str) -> None:
    plan = schedule.split(2, parts=1)
    begun: list[str] = []

    def work(name: str) -> Callable[..., None]:
        def run(*comm: Any) -> None:
            begun.append(name)
            if name == at == begun[-1] and fails:
                raise ValueError(name)

        return run

    works = {
        name: work(old)
        for name, old in zip(
            (step.name for step in plan.steps),
            ("compute 0", "communicate 0", "compute 1", "communicate 1"),
            strict=True,
        )
    }
    with threads() as controller:
        fails = True
        with pytest.raises(ValueError, match=at):
            controller.run(plan, works, works)
        assert begun[-1] == at
        fails = False
        controller.run(plan, works, works)


def test_a_step_without_work_and_a_nested_run_are_refused() -> None:
    plan = schedule.chain(1)
    with threads() as controller:
        with pytest.raises(ConfigError, match="'communicate 0' of the schedule has no work"):
            controller.run(plan, {"compute 0": lambda: None}, {})
        comm: dict[str, Callable[..., Any]] = {"communicate 0": lambda comm: None}
        with pytest.raises(ConfigError, match="not nested"):
            controller.run(plan, {"compute 0": lambda: controller.run(plan, {"compute 0": lambda: 1}, comm)}, comm)
    with pytest.raises(ClosedError):
        controller.run(plan, {"compute 0": lambda: None}, comm)


def test_the_other_thread_has_the_modes_of_autograd() -> None:
    seen: list[tuple[bool, bool]] = []
    cast: list[torch.dtype] = []

    def communicate(comm: Any) -> None:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        cast.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)

    with threads() as controller:
        for mode in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
            with mode:
                controller.run(schedule.chain(1), {"compute 0": lambda: 1}, {"communicate 0": communicate})
        with torch.autocast("cpu", torch.bfloat16):
            controller.run(schedule.chain(1), {"compute 0": lambda: 1}, {"communicate 0": communicate})
    assert seen[:3] == [(True, False), (False, False), (False, True)]
    assert cast == [torch.float32] * 3 + [torch.bfloat16]


def test_threads_end_with_their_lanes() -> None:
    before = set(threading.enumerate())
    with threads(3):
        started = set(threading.enumerate()) - before
        assert len(started) == 3
    for thread in started:
        thread.join(100)
        assert not thread.is_alive()


def test_a_lane_outlives_work_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("no average")

    with threads() as controller:
        controller.lanes._workers[0].queue.put(fail)  # type: ignore[attr-defined]
        controller.run(schedule.chain(1), {"compute 0": lambda: 1}, {"communicate 0": lambda comm: 2})
    assert "no average" in caplog.text


def test_one_hardware_queue_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    StreamLanes(Rank("cpu"), streams=EmulatedStreams())  # type: ignore[arg-type]
    assert not caplog.records
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    StreamLanes(Rank("cpu"), streams=EmulatedStreams())  # type: ignore[arg-type]
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one hardware queue" in caplog.text
