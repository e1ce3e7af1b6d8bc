"""Copy engines: rounds through places of the own window, with meetings of all ranks between.

A rank has three lanes, which wait for each other by events. One copies bytes of round i into place i % 4 of the own
window, once the meeting of round i - 2 has ended. One meets: it waits for that copy and for the rank's copies of round
i - 2 from the others, tells all ranks, and waits for them. One copies from the windows of the others after the meeting.
A call ends with a meeting after all copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from .explore import Kind
from .machine import Await, Fence, Finish, Machine, Program, Read, Start, Steps, Store
from .words import Input

EMPTY = "empty"


@dataclass(frozen=True)
class Rules:
    """The guards of the protocol. Each of them can be removed."""

    places: int = 4
    stages_after: int = 2  # a round is staged after the meeting of so many rounds before
    meets_after_staging: bool = True
    meets_after_copies: bool = True  # of the round before the one before
    ends_with_meeting: bool = True


def reached(rank: int, lane: str, number: int) -> Await:
    """Wait for an event of another lane of this rank."""
    return Await({(rank, lane): None}, lambda word: word >= number)


def stage(rank: int, calls: list[int], rules: Rules) -> Steps:
    first = 0
    for rounds in calls:
        yield reached(rank, "ended", first)
        for i in range(first, first + rounds):
            if i - first >= rules.stages_after:
                yield reached(rank, "met", i - rules.stages_after + 1)
            yield Store((rank, "window", (i - first) % rules.places), Input(rank, 0, i))
            yield Fence()
            yield Store((rank, "staged"), i + 1)
        first += rounds


def meet(rank: int, ranks: int, calls: list[int], rules: Rules) -> Steps:
    first, meetings = 0, 0
    others = [peer for peer in range(ranks) if peer != rank]
    for call, rounds in enumerate(calls):
        yield Start(call)
        for i in range(first, first + rounds + rules.ends_with_meeting):
            last = i == first + rounds
            if rules.meets_after_staging and not last:
                yield reached(rank, "staged", i + 1)
            behind = i if last else i - 1
            if behind > first and (rules.meets_after_copies or last):
                yield reached(rank, "copied", behind)
            meetings += 1
            for peer in others:
                yield Store((peer, "header", rank), meetings)
            yield Await({(rank, "header", peer): None for peer in others}, lambda word, n=meetings: word >= n)
            if not last:
                yield Store((rank, "met"), i + 1)
        if not rules.ends_with_meeting:
            yield reached(rank, "copied", first + rounds)
        first += rounds
        yield Finish(call)
        yield Store((rank, "ended"), first)


def copy(rank: int, ranks: int, calls: list[int], rules: Rules) -> Steps:
    first = 0
    for rounds in calls:
        for i in range(first, first + rounds):
            yield reached(rank, "met", i + 1)
            place = (i - first) % rules.places
            yield Read({(peer, "window", place): Input(peer, 0, i) for peer in range(ranks) if peer != rank})
            yield Store((rank, "copied"), i + 1)
        first += rounds


def model(ranks: int, calls: list[int], rules: Rules | None = None) -> Machine:
    rules = rules or Rules()
    programs = []
    for rank in range(ranks):
        programs += [
            Program(rank, "stage", lambda rank=rank: stage(rank, calls, rules)),
            Program(rank, "meet", lambda rank=rank: meet(rank, ranks, calls, rules)),
            Program(rank, "copy", lambda rank=rank: copy(rank, ranks, calls, rules)),
        ]
    words = dict.fromkeys(("staged", "met", "copied", "ended", "header"), 0)
    return Machine(programs, {"window": EMPTY, **words})


@pytest.mark.every(3)
@pytest.mark.parametrize(("ranks", "calls"), [(2, [5, 1]), (2, [0, 1]), (3, [1])])
def test_protocol_holds(ranks: int, calls: list[int], verify) -> None:
    verify(model(ranks, calls))


def test_three_places_are_not_enough(refute) -> None:
    refute(model(2, [5], Rules(places=3)), Kind.WRONG_VALUE)


def test_staging_a_round_earlier_overwrites_what_is_copied(refute) -> None:
    refute(model(2, [6], Rules(stages_after=3)), Kind.WRONG_VALUE)


def test_meeting_before_staging_copies_what_was_there(refute) -> None:
    refute(model(2, [1], Rules(meets_after_staging=False)), Kind.WRONG_VALUE)


@pytest.mark.full
def test_meeting_before_the_copies_lets_them_be_overwritten(refute) -> None:
    refute(model(2, [6], Rules(meets_after_copies=False)), Kind.WRONG_VALUE)


def test_without_a_last_meeting_the_next_call_overwrites_what_is_copied(refute) -> None:
    refute(model(2, [1, 1], Rules(ends_with_meeting=False)), Kind.WRONG_VALUE)


def test_without_a_last_meeting_a_call_without_copies_waits_for_nobody(refute) -> None:
    refute(model(2, [0], Rules(ends_with_meeting=False)), Kind.EARLY_FINISH)
