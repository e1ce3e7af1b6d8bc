"""The way a call learns its epoch from device memory.

Every program of a grid reads the epoch and the generation, with the extent of the latest call that used slots, and
then counts itself. There are several copies of these words: program p reads and counts in copy p % copies. One program,
the keeper, waits until all others have counted themselves. It resets the counts and writes all copies for the next
call, while the others already wait for data. The next grid reads them after the kernel boundary or, under programmatic
dependent launch, after its own ``gdc_wait``. The keeper is program 0; where programs run one after the other, it is the
last one.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from .explore import Kind
from .machine import Add, Await, Fail, Fence, Load, Machine, Program, Steps, Store

EXTENTS = (3, 1, 2, 5)
"""The extents by call, all different, so that a program that reads another call's is caught."""
Extents = Sequence[int | None]
"""The extent of each call; None: the call uses no slots, and leaves all generations as they are."""


@dataclass(frozen=True)
class Rules:
    """The guards of the protocol. Each of them can be removed."""

    all_counted: bool = True  # False: the keeper waits for all but one
    read_then_count: bool = True  # False: a program counts itself and reads then
    count_reset: bool = True
    copies_counted: bool = True  # False: the keeper looks at its own copy alone
    all_written: bool = True  # False: the keeper writes its own copy alone
    waits: str = "all"  # "one does not": program 0 reads before gdc_wait; "idle call": call 1 returns without waiting


def program_of(
    call: int,
    program: int,
    programs: int,
    rules: Rules,
    extents: Extents = EXTENTS,
    copies: int = 2,
    keeper: int = 0,
) -> Steps:
    """One program of the grid of ``call``. It is launched at any time, as programmatic dependent launch permits."""
    idle = rules.waits == "idle call" and call == 1
    if call > 0 and not idle and not (rules.waits == "one does not" and program == 0):
        yield Await({(0, "ended", call - 1, p): True for p in range(programs)}, lambda word: word)  # gdc_wait

    if not idle:
        copy = program % copies
        if not rules.read_then_count and program != keeper:
            yield Add((0, "readers", copy), 1)
        epoch = yield Load((0, "epoch", copy))
        generation, extent = yield Load((0, "generation", copy))
        if rules.read_then_count and program != keeper:
            yield Add((0, "readers", copy), 1)

        earlier = call - 1 if rules.waits == "idle call" and call > 1 else call  # the idle call counts no epoch
        slot_calls = [extent for extent in extents[:earlier] if extent is not None]
        if (epoch, generation) != (earlier, len(slot_calls) % 3):
            yield Fail(f"reads epoch {epoch}, generation {generation} in call {earlier}")
        if extent != (slot_calls[-1] if slot_calls else 0):
            yield Fail(f"clears {extent} words after call {call - 1}")
        if program == keeper:
            counted = [len([p for p in range(at, programs, copies) if p != keeper]) for at in range(copies)]
            if not rules.all_counted:
                counted = [max(0, count - 1) for count in counted]
            looked = {(0, "readers", at): counted[at] for at in range(copies) if rules.copies_counted or at == copy}
            for place, count in looked.items():
                yield Await({place: None}, functools.partial(operator.le, count))
            for written in range(copies):
                if rules.count_reset:
                    yield Store((0, "readers", written), 0)
            for written in range(copies) if rules.all_written else (copy,):
                if extents[call] is not None:
                    yield Store((0, "generation", written), ((generation + 1) % 3, extents[call]))
                yield Store((0, "epoch", written), epoch + 1)
    yield Fence()  # the end of a grid makes its stores visible
    yield Store((0, "ended", call, program), True)


def model(
    programs: int,
    calls: int,
    rules: Rules | None = None,
    extents: Extents = EXTENTS,
    copies: int = 2,
    keeper: int = 0,
    **options: bool,
) -> Machine:
    rules = rules or Rules()

    def program(call: int, number: int) -> Program:
        steps = functools.partial(program_of, call, number, programs, rules, extents, copies, keeper % programs)
        return Program(0, f"call {call} program {number}", steps)

    all_programs = [program(call, number) for call in range(calls) for number in range(programs)]
    initial_words = {"epoch": 0, "generation": (0, 0), "readers": 0, "ended": False}
    return Machine(all_programs, initial_words, check_starts=False, **options)


@pytest.mark.parametrize("keeper", [0, -1], ids=["program 0", "the last program"])
@pytest.mark.parametrize(("programs", "calls", "copies"), [(1, 4, 1), (2, 4, 1), (2, 4, 2), (3, 3, 1), (3, 3, 2)])
def test_protocol_holds(programs: int, calls: int, copies: int, keeper: int, verify) -> None:
    verify(model(programs, calls, copies=copies, keeper=keeper))


def test_calls_without_slots_leave_generations_as_they_are(verify) -> None:
    verify(model(2, 5, extents=(3, None, 1, None, 2)))


@pytest.mark.parametrize(
    "rules",
    [
        Rules(all_counted=False),
        Rules(read_then_count=False),
        Rules(count_reset=False),
        Rules(copies_counted=False),
        Rules(all_written=False),
        Rules(waits="one does not"),
        Rules(waits="idle call"),
    ],
    ids=[
        "one not counted",
        "count before reading",
        "count not reset",
        "one copy counted",
        "one copy written",
        "one does not wait",
        "idle call does not wait",
    ],
)
def test_without_a_guard_programs_of_a_call_disagree(rules: Rules, refute) -> None:
    refute(model(2, 3, rules), Kind.BROKEN_CLAIM)
