"""Few SMs in place: ranks say where their tensors lie, and read and write each other's if all lie where all map them.

A program tells all ranks the places of this rank's tensors, then that it has begun (:mod:`.test_window`), and waits
until all have. Its own region then has the places of all ranks, so all take the same way. In place, it reads its slice
of all ranks' tensors, writes the sum into all of them, and meets its namesakes again. Otherwise the message passes
through the window; here the program has no chunk of it, which is how it goes on soonest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from .explore import Kind
from .machine import Await, Fence, KernelBoundary, Machine, Program, Read, Start, Steps, Store
from .words import ZERO, Call, HeaderRules, Input, Sum, header_programs

STEPS = 10
HEADERS = HeaderRules()


@dataclass(frozen=True)
class Rules:
    """The guards of the protocol. Each of them can be removed."""

    enters: bool = True  # ranks wait for each other before they look where the tensors lie
    meets: bool = True  # and at the end of a call in place
    fenced: bool = True  # progress is stored after a fence
    rows: int = 2  # of places, by epoch parity
    everybody: bool = True  # False: a rank goes by the place of its own tensor alone
    headers: HeaderRules = HEADERS


def data_program(rank: int, ranks: int, calls: Sequence[Call], rules: Rules) -> Steps:
    """``sizes`` of a call are 1 for each rank whose tensor all ranks map, 0 for others."""
    for number, call in enumerate(calls):
        epoch = number + 1
        for part in range(ranks):  # the kernel before has written the tensor
            yield Store((rank, "tensor", part), Input(rank, epoch, part))
        yield Fence()
        yield Start(number)
        yield from run(rank, ranks, epoch, call, rules)
        yield KernelBoundary(number)
        wanted = [Sum(ranks, epoch, part) if all(call.sizes) else Input(rank, epoch, part) for part in range(ranks)]
        yield Read({(rank, "tensor", part): word for part, word in enumerate(wanted)})


def run(rank: int, ranks: int, epoch: int, call: Call, rules: Rules) -> Steps:
    def say(steps: int) -> Steps:
        if rules.fenced:
            yield Fence()
        for peer in range(ranks):
            yield Store((peer, "progress", rank), epoch * STEPS + steps)

    def wait(steps: int) -> Await:
        words = {(rank, "progress", peer): None for peer in range(ranks)}
        return Await(words, lambda word: word >= epoch * STEPS + steps)

    row = epoch % rules.rows
    for peer in range(ranks):
        yield Store((peer, "place", row, rank), (epoch, call.sizes[rank]))
    yield from say(0)
    if rules.enters:
        yield wait(0)
    if rules.everybody:
        yield Read({(rank, "place", row, peer): (epoch, call.sizes[peer]) for peer in range(ranks)})
        in_place = all(call.sizes)
    else:
        in_place = bool(call.sizes[rank])
    if in_place:
        yield Read({(peer, "tensor", rank): Input(peer, epoch, rank) for peer in range(ranks)})
        for peer in range(ranks):
            yield Store((peer, "tensor", rank), Sum(ranks, epoch, rank))
        yield from say(1)
        if rules.meets:
            yield wait(1)


def model(ranks: int, calls: Sequence[Call], rules: Rules | None = None, **options: bool) -> Machine:
    rules = rules or Rules()

    def data(rank: int) -> Program:
        return Program(rank, "data", lambda: data_program(rank, ranks, calls, rules))

    programs = [data(rank) for rank in range(ranks)] + header_programs(ranks, calls, rules.headers)
    return Machine(programs, {"tensor": "before", "place": (0, 0), "header": ZERO, "progress": -1}, **options)


def call(*mapped: int) -> Call:
    return Call("all_reduce", mapped)


@pytest.mark.parametrize(
    "calls",
    [[call(1, 1), call(1, 1)], [call(1, 1), call(1, 0), call(1, 1)], [call(0, 1), call(0, 0), call(1, 1)]],
    ids=["in place", "between", "first"],
)
def test_protocol_holds(calls: list[Call], verify) -> None:
    verify(model(2, calls))


def test_protocol_holds_for_three_ranks(verify) -> None:
    verify(model(3, [call(1, 1, 1)]))


def test_it_needs_no_headers(verify) -> None:
    """Headers exist to name mismatches and missing ranks."""
    verify(model(2, [call(1, 1), call(0, 1), call(1, 1)], Rules(headers=HeaderRules(exchanged=False))))


@pytest.mark.parametrize("rules", [Rules(enters=False), Rules(fenced=False)], ids=["does not enter", "no fence"])
def test_places_are_read_once_all_have_told_them(rules: Rules, refute) -> None:
    refute(model(2, [call(1, 1)], rules), Kind.WRONG_VALUE)


def test_without_a_meeting_tensors_are_still_in_use(refute) -> None:
    """The peer has not read this rank's tensor, or written into it, when the kernel behind the call does."""
    refute(model(2, [call(1, 1)], Rules(meets=False)), Kind.WRONG_VALUE)


def test_one_row_of_places_is_overwritten(refute) -> None:
    """A program without chunks ends as soon as the peers have begun, and tells the places of the next call."""
    bare = replace(HEADERS, exchanged=False)  # the headers of the next call would hold it back, in one program alone
    refute(model(2, [call(0, 1), call(1, 1)], Rules(rows=1, headers=bare)), Kind.WRONG_VALUE)


def test_a_rank_alone_cannot_decide(refute) -> None:
    refute(model(2, [call(0, 1)], Rules(everybody=False)), Kind.WRONG_VALUE)
