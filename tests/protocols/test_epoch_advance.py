"""The way a call learns its epoch from device memory.

Every program of a grid reads the epoch and the generation, with the extent of the latest call that used slots, and
then counts itself in. There are several copies of these words: program p reads copy p % copies. If there are more
programs than copies, a program counts itself for its copy, and the last one of a copy counts the copy. The last of all
resets the count and writes all copies for the next call, while the others already wait for data. The next grid reads
them after the kernel boundary or, under programmatic dependent launch, after its own ``gdc_wait``.
"""

from __future__ import annotations

import functools
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

    last_advances: bool = True  # False: the first reader does
    read_then_count: bool = True  # False: a program counts itself in and reads then
    count_reset: bool = True
    copies_counted: bool = True  # False: the last program of any copy advances
    all_written: bool = True  # False: the last program writes its own copy alone
    waits: str = "all"  # "one does not": program 0 reads before gdc_wait; "idle call": call 1 returns without waiting


def program_of(
    call: int, program: int, programs: int, rules: Rules, extents: Extents = EXTENTS, copies: int = 2
) -> Steps:
    """One program of the grid of ``call``. It is launched at any time, as programmatic dependent launch permits."""
    idle = rules.waits == "idle call" and call == 1
    if call > 0 and not idle and not (rules.waits == "one does not" and program == 0):
        yield Await({(0, "ended", call - 1, p): True for p in range(programs)}, lambda word: word)  # gdc_wait

    if not idle:
        copy = program % copies
        by_copy = programs > copies
        counter = (0, "readers", copy) if by_copy else (0, "copies_read", 0)
        readers = len(range(copy, programs, copies)) if by_copy else programs
        counted = -1
        if not rules.read_then_count:
            counted = yield Add(counter, 1)
        epoch = yield Load((0, "epoch", copy))
        generation, extent = yield Load((0, "generation", copy))
        if rules.read_then_count:
            counted = yield Add(counter, 1)

        earlier = call - 1 if rules.waits == "idle call" and call > 1 else call  # the idle call counts no epoch
        slot_calls = [extent for extent in extents[:earlier] if extent is not None]
        if (epoch, generation) != (earlier, len(slot_calls) % 3):
            yield Fail(f"reads epoch {epoch}, generation {generation} in call {earlier}")
        if extent != (slot_calls[-1] if slot_calls else 0):
            yield Fail(f"clears {extent} words after call {call - 1}")
        last = counted == (readers - 1 if rules.last_advances else 0)
        if last and by_copy and rules.copies_counted:
            if rules.count_reset:
                yield Store(counter, 0)
            counted = yield Add((0, "copies_read", 0), 1)
            last = counted == (copies - 1 if rules.last_advances else 0)
        if last:
            if rules.count_reset:
                yield Store((0, "copies_read", 0), 0)
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
    **options: bool,
) -> Machine:
    rules = rules or Rules()

    def program(call: int, number: int) -> Program:
        steps = functools.partial(program_of, call, number, programs, rules, extents, copies)
        return Program(0, f"call {call} program {number}", steps)

    all_programs = [program(call, number) for call in range(calls) for number in range(programs)]
    initial_words = {"epoch": 0, "generation": (0, 0), "readers": 0, "copies_read": 0, "ended": False}
    return Machine(all_programs, initial_words, check_starts=False, **options)


@pytest.mark.parametrize(("programs", "calls", "copies"), [(1, 4, 1), (2, 4, 1), (2, 4, 2), (3, 3, 1), (3, 3, 2)])
def test_protocol_holds(programs: int, calls: int, copies: int, verify) -> None:
    verify(model(programs, calls, copies=copies))


def test_calls_without_slots_leave_generations_as_they_are(verify) -> None:
    verify(model(2, 5, extents=(3, None, 1, None, 2)))


@pytest.mark.parametrize(
    "rules",
    [
        Rules(last_advances=False),
        Rules(read_then_count=False),
        Rules(count_reset=False),
        Rules(copies_counted=False),
        Rules(all_written=False),
        Rules(waits="one does not"),
        Rules(waits="idle call"),
    ],
    ids=[
        "first reader advances",
        "count before reading",
        "count not reset",
        "last of a copy advances",
        "one copy written",
        "one does not wait",
        "idle call does not wait",
    ],
)
def test_without_a_guard_programs_of_a_call_disagree(rules: Rules, refute) -> None:
    refute(model(3 if not rules.copies_counted else 2, 3, rules), Kind.BROKEN_CLAIM)
