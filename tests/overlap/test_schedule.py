"""Schedules are checked, and their lanes wait for each other as seldom as their steps allow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from overlap_bench.own import prefetch

from shotcast.errors import ConfigError
from shotcast.overlap import schedule
from shotcast.overlap.schedule import Communicate, Compute, Order, Schedule, Step


def makespan_us(plan: Schedule, durations_us: Mapping[str, float], lanes: int = 1) -> float:
    """Return the time of a schedule whose steps take ``durations_us`` regardless of concurrent work."""
    order = plan.order(lanes)
    free = [0.0] * (lanes + 1)
    end: dict[str, float] = {}
    for step in plan.steps:
        lane = order.lanes[step.name]
        begin = max([free[lane], *(end[name] for name in step.after)])
        free[lane] = end[step.name] = begin + durations_us[step.name]
    return max(free)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    steps: list[Step] = []
    for number in range(draw(st.integers(1, 10))):
        before = [step.name for step in steps]
        after = tuple(draw(st.lists(st.sampled_from(before), unique=True, max_size=3))) if before else ()
        steps.append((Compute if draw(st.booleans()) else Communicate)(f"step {number}", after))
    return Schedule(tuple(steps))


def before(plan: Schedule, order: Order) -> dict[str, set[str]]:
    """Return the steps that are over when each step begins, by lanes and waits alone; "" is the end."""
    over: dict[str, set[str]] = {}
    newest: dict[int, str] = {}

    def known(names: list[str]) -> set[str]:
        return {name for one in names for name in (*over[one], one)}

    for step in plan.steps:
        lane = order.lanes[step.name]
        over[step.name] = known([*order.waits.get(step.name, ()), *([newest[lane]] if lane in newest else [])])
        newest[lane] = step.name
    over[""] = known([*order.last, *([newest[0]] if 0 in newest else [])])
    return over


@pytest.mark.full
@given(schedules(), st.integers(1, 3))
def test_waits_suffice_and_none_is_spare(plan: Schedule, lanes: int) -> None:
    order = plan.order(lanes)
    over = before(plan, order)
    needed = {step.name: set(step.after) for step in plan.steps} | {"": {step.name for step in plan.steps}}
    assert all(needed[name] <= over[name] for name in needed)
    for step, awaited in order.edges:
        fewer = {**order.waits, step: tuple(name for name in order.waits[step] if name != awaited)}
        less = before(plan, order._replace(waits=fewer))
        assert any(not needed[name] <= less[name] for name in needed), f"{step} need not wait for {awaited}"
    for name in order.last:
        less = before(plan, order._replace(last=tuple(other for other in order.last if other != name)))
        assert not needed[""] <= less[""]
    for step in plan.steps:
        lane = order.lanes[step.name]
        alone = lane > 0 and not over[step.name]
        assert (step.name in order.first) == alone


@given(schedules(), st.integers(1, 3))
def test_the_time_is_between_that_of_a_lane_and_that_of_all_steps(plan: Schedule, lanes: int) -> None:
    times = {step.name: 1.0 + number % 3 for number, step in enumerate(plan.steps)}
    total = makespan_us(plan, times, lanes)
    compute = sum(times[step.name] for step in plan.steps if isinstance(step, Compute))
    assert compute <= total <= sum(times.values())
    assert makespan_us(schedule.sequential(plan), times, lanes) == sum(times.values())


def test_a_chain_hides_all_but_the_last_communication() -> None:
    plan = schedule.chain(4)
    times = {step.name: 10.0 if isinstance(step, Compute) else 7.0 for step in plan.steps}
    assert makespan_us(plan, times) == 4 * 10 + 7
    assert plan.order().edges == tuple((f"communicate {i}", f"compute {i}") for i in range(4))
    assert plan.order().last == ("communicate 3",)


def test_lanes_carry_several_messages_at_once() -> None:
    plan = schedule.chain(4)
    times = {step.name: 1.0 if isinstance(step, Compute) else 4.0 for step in plan.steps}
    assert makespan_us(plan, times, 1) == 1 + 4 * 4
    assert makespan_us(plan, times, 4) == 4 + 4


def test_halves_of_a_batch_hide_each_other() -> None:
    plan = schedule.split(3)
    times = {step.name: 5.0 for step in plan.steps}
    assert makespan_us(plan, times) == 6 * 5 + 5
    assert plan.order().waits["compute 1.0"] == ("communicate 0.0",)


def test_buckets_are_used_in_their_order() -> None:
    updates = [Compute(f"update {i}", (f"communicate {i}",)) for i in range(3)]
    plan = Schedule((*schedule.chain(3).steps, *updates))
    assert [step.name for step in plan.steps][-3:] == ["update 0", "update 1", "update 2"]
    assert plan.order().last == ()


def test_inputs_are_fetched_ahead() -> None:
    plan = prefetch(3)
    times = {step.name: 10.0 if isinstance(step, Compute) else 7.0 for step in plan.steps}
    assert makespan_us(plan, times) == 7 + 3 * 10
    assert plan.order().first == {"communicate 0"}


@pytest.mark.parametrize(
    ("steps", "fault"),
    [
        ((Compute("a"), Communicate("a")), "two steps .* named 'a'"),
        ((Compute("a", ("b",)),), "needs 'b', which is no step"),
        ((Compute("a", ("b",)), Compute("b")), "needs 'b', which comes no earlier"),
        ((Compute("a", ("a",)),), "needs 'a', which comes no earlier"),
    ],
)
def test_a_wrong_schedule_is_refused(steps: tuple[Step, ...], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        Schedule(steps)


@pytest.mark.parametrize("build", [schedule.chain, schedule.split])
def test_builders_take_one_or_more(build: object) -> None:
    with pytest.raises(ConfigError, match="1 or more"):
        build(0)  # type: ignore[operator]
    with pytest.raises(ConfigError, match="1 lane"):
        schedule.chain(1).order(0)


def test_the_digest_tells_schedules_apart() -> None:
    plans = [schedule.chain(2), schedule.chain(3), prefetch(2), schedule.beside()]
    assert len({plan.digest for plan in plans}) == len(plans)
    assert dataclasses.replace(plans[0]).digest == plans[0].digest
