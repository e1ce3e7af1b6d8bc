"""The checker itself: it must find the errors planted here."""

from __future__ import annotations

import pytest

from .explore import Kind, TooManyStatesError, explore
from .machine import Add, Await, Barrier, Fail, Fence, Load, Machine, Program, Read, Steps, Store


class Counters:
    """Two counters that each run up to ``top``, in any order. ``trap`` is a state whose only step leads to itself."""

    def __init__(self, top: int = 3, forbidden: tuple[int, int] | None = None, trap: tuple[int, int] | None = None):
        self.top, self.forbidden, self.trap = top, forbidden, trap

    def initial(self) -> tuple[int, int]:
        return 0, 0

    def steps(self, state: tuple[int, int]) -> list[tuple[str, tuple[int, int]]]:
        x, y = state
        if state == self.trap:
            return [("turn in place", state)]
        return [("x", (x + 1, y))] * (x < self.top) + [("y", (x, y + 1))] * (y < self.top)

    def fault(self, state: tuple[int, int]) -> tuple[Kind, str] | None:
        return (Kind.BROKEN_CLAIM, f"reached {state}") if state == self.forbidden else None

    def is_final(self, state: tuple[int, int]) -> bool:
        return state == (self.top, self.top)


def test_all_states_are_visited() -> None:
    result = explore(Counters(top=9))
    assert (result.states, result.steps, result.violation) == (100, 180, None)


def test_a_forbidden_state_is_found_on_a_shortest_way() -> None:
    violation = explore(Counters(forbidden=(2, 1))).violation
    assert violation is not None
    assert (violation.kind, len(violation.trace)) == (Kind.BROKEN_CLAIM, 3)


def test_turning_forever_is_not_an_end() -> None:
    violation = explore(Counters(trap=(1, 2))).violation
    assert violation is not None
    assert violation.kind is Kind.NO_END
    assert "(1, 2)" in violation.message


def test_too_many_states_are_an_error() -> None:
    with pytest.raises(TooManyStatesError):
        explore(Counters(top=9), max_states=99)


def machine(*bodies: object, reduced: bool = True) -> Machine:
    programs = [Program(rank, "", body) for rank, body in enumerate(bodies)]  # type: ignore[arg-type]
    return Machine(programs, {"data": 0, "flag": 0}, check_starts=False, reduced=reduced)


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("fenced", [True, False])
def test_data_may_land_after_its_flag_unless_fenced(fenced: bool, reduced: bool) -> None:
    def sender() -> Steps:
        yield Store((1, "data"), 7)
        if fenced:
            yield Fence()
        yield Store((1, "flag"), 1)

    def receiver() -> Steps:
        yield Await({(1, "flag"): 1}, arrived=bool)
        yield Read({(1, "data"): 7})

    violation = explore(machine(sender, receiver, reduced=reduced)).violation
    assert fenced == (violation is None)
    if violation:
        assert violation.kind is Kind.WRONG_VALUE
        assert "flag" in str(violation)


@pytest.mark.parametrize("reduced", [True, False])
def test_stores_of_one_program_to_one_address_land_in_order(reduced: bool) -> None:
    def sender() -> Steps:
        yield Store((1, "data"), 1)
        yield Store((1, "data"), 2)

    def receiver() -> Steps:
        first = yield Load((1, "data"))
        second = yield Load((1, "data"))
        if first > second:
            yield Fail(f"{second} after {first}")

    assert explore(machine(sender, receiver, reduced=reduced)).violation is None


@pytest.mark.parametrize("reduced", [True, False])
def test_a_planted_race_is_found(reduced: bool) -> None:
    """Two ranks increment one word without an atomic."""

    def load_and_store(rank: int) -> Steps:
        old = yield Load((0, "data"))
        yield Store((0, "data"), old + 1)
        yield Fence()
        done = yield Add((0, "flag"), 1)
        if done == 1:
            total = yield Load((0, "data"))
            if total != 2:
                yield Fail(f"the total is {total}")

    violation = explore(machine(lambda: load_and_store(0), lambda: load_and_store(1), reduced=reduced)).violation
    assert violation is not None
    assert violation.kind is Kind.BROKEN_CLAIM
    assert "total is 1" in violation.message


@pytest.mark.parametrize("reduced", [True, False])
def test_a_planted_deadlock_is_found(reduced: bool) -> None:
    """Each rank waits for the other's word before it sends its own."""

    def rank(me: int) -> Steps:
        yield Await({(me, "flag"): 1}, arrived=bool)
        yield Store((1 - me, "flag"), 1)

    violation = explore(machine(lambda: rank(0), lambda: rank(1), reduced=reduced)).violation
    assert violation is not None
    assert (violation.kind, violation.trace) == (Kind.DEADLOCK, ())


@pytest.mark.parametrize("reduced", [True, False])
def test_a_barrier_orders_no_stores(reduced: bool) -> None:
    def sender() -> Steps:
        yield Store((1, "data"), 7)
        yield Barrier("b", ("rank 0", "rank 1"))

    def receiver() -> Steps:
        yield Barrier("b", ("rank 0", "rank 1"))
        yield Read({(1, "data"): 7})

    violation = explore(machine(sender, receiver, reduced=reduced)).violation
    assert violation is not None
    assert violation.kind is Kind.WRONG_VALUE


@pytest.mark.parametrize("reduced", [True, False])
def test_a_word_overwritten_before_it_is_read_is_found(reduced: bool) -> None:
    def sender() -> Steps:
        yield Store((1, "data"), 1)
        yield Fence()
        yield Store((1, "data"), 2)

    def receiver() -> Steps:
        yield Await({(1, "data"): 1}, arrived=bool)

    violation = explore(machine(sender, receiver, reduced=reduced)).violation
    assert violation is not None
    assert violation.kind is Kind.WRONG_VALUE
