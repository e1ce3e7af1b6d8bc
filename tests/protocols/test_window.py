"""Few SMs: chunks pass through places of a window, which are used again when the progress of the peers allows it.

In step s a program waits until its namesakes on all ranks have done s - 1 steps, sends chunk s, takes chunk s-2 and, in
an all-reduce, sends its sum, and takes the sums of chunk s-4. Then it says, by a word at every rank that only grows,
that it has done s + 1 steps: what it sent is there, and what it took was read. Before its first step it says that it
has begun, and waits until all have. Then no rank reads what an earlier call left, which may have divided the window
otherwise. Uneven parts are sent before the wait, and taken in the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from .explore import Kind
from .machine import Await, Fence, KernelBoundary, Machine, Program, Read, Start, Steps, Store
from .words import ZERO, Call, HeaderRules, Input, Sum, header_programs

EMPTY = "empty"
STEPS = 100
"""More than a call has; the epoch counts above."""
PLACES = 8
HEADERS = HeaderRules()


@dataclass(frozen=True)
class Rules:
    """The guards of the protocol. Each of them can be removed."""

    lag: int = 2  # steps from sending a chunk to taking it
    sends_first: bool = False  # a chunk is sent before the wait of its step
    sent: int = 4  # places of chunks
    sums: int = 4  # places of sums
    enters: bool = True
    fenced: bool = True  # progress is stored after a fence
    by_epoch: bool = True  # progress carries the epoch
    exactly: bool = False  # True: a rank waits for a number of steps, and not for as many or more
    behind: int = 0  # a rank waits for so many steps fewer
    raises_before_taking: bool = False
    headers: HeaderRules = HEADERS


def data_program(rank: int, ranks: int, calls: Sequence[Call], rules: Rules) -> Steps:
    """``sizes[0]`` of a call is the number of its chunks; ``root`` says how it divides the window."""
    for number, call in enumerate(calls):
        yield Start(number)
        if call.op != "barrier":
            yield from stream(rank, ranks, number + 1, call, rules)
        yield KernelBoundary(number)


def stream(rank: int, ranks: int, epoch: int, call: Call, rules: Rules) -> Steps:
    peers = [peer for peer in range(ranks) if peer != rank]
    chunks, adds = call.sizes[0], call.op == "all_reduce"

    def place(owner: int, number: int, sender: int) -> tuple[int, str, int, int]:
        return owner, "window", (number + call.root) % PLACES, sender

    def progress(steps: int) -> int:
        return steps + epoch * STEPS * rules.by_epoch

    def say(steps: int) -> Steps:
        if rules.fenced:
            yield Fence()
        for peer in peers:
            yield Store((peer, "progress", rank), progress(steps))

    def wait(steps: int) -> Await:
        wanted = progress(steps)
        return Await(
            {(rank, "progress", peer): None for peer in peers},
            lambda word: word == wanted if rules.exactly else word >= wanted,
        )

    if rules.enters:
        yield from say(0)
        yield wait(0)
    lag = rules.lag
    steps = chunks + (2 * lag if adds else lag) if chunks else 0
    for step in range(steps):
        sent = [Store(place(peer, step % rules.sent, rank), Input(rank, epoch, step)) for peer in peers]
        sent = sent if step < chunks else []
        if rules.sends_first:
            yield from sent
        if step >= lag:
            yield wait(step - lag + 1 - rules.behind)
            if rules.raises_before_taking and step + 1 < steps:
                yield from say(step + 1)
        if not rules.sends_first:
            yield from sent
        if lag <= step < chunks + lag:
            number = (step - lag) % rules.sent
            yield Read({place(rank, number, peer): Input(peer, epoch, step - lag) for peer in peers})
            if adds:
                number = rules.sent + step % rules.sums
                for peer in peers:
                    yield Store(place(peer, number, rank), Sum(ranks, epoch, step - lag))
        if adds and step >= 2 * lag:
            number = rules.sent + (step - lag) % rules.sums
            yield Read({place(rank, number, peer): Sum(ranks, epoch, step - 2 * lag) for peer in peers})
        if step + 1 < steps and not (rules.raises_before_taking and step >= lag):
            yield from say(step + 1)


UNEVEN = Rules(lag=1, sends_first=True, sent=3)
SHORT = Rules(lag=1, sent=2, sums=2)
"""The protocol of few SMs with fewer steps between, whose places serve again in shorter calls."""


def model(ranks: int, calls: Sequence[Call], rules: Rules | None = None, **options: bool) -> Machine:
    rules = rules or Rules()

    def data(rank: int) -> Program:
        return Program(rank, "data", lambda: data_program(rank, ranks, calls, rules))

    programs = [data(rank) for rank in range(ranks)] + header_programs(ranks, calls, rules.headers)
    return Machine(programs, {"window": EMPTY, "header": ZERO, "progress": -1}, **options)


def reduces(chunks: int, division: int = 0) -> Call:
    return Call("all_reduce", (chunks,), division)


def copies(chunks: int, division: int = 0) -> Call:
    return Call("all_gather", (chunks,), division)


BARRIER = Call("barrier", (0,))


@pytest.mark.parametrize("calls", [[reduces(5), reduces(2, 2)], [copies(5), copies(4, 1)]], ids=["sums", "copies"])
@pytest.mark.parametrize("rules", [Rules(), SHORT], ids=["two steps", "one step"])
def test_protocol_holds(calls: list[Call], rules: Rules, verify) -> None:
    verify(model(2, calls, rules))


def test_protocol_of_uneven_parts_holds(verify) -> None:
    verify(model(2, [copies(5), copies(4, 1)], UNEVEN))


@pytest.mark.full
@pytest.mark.parametrize("call", [reduces(3), copies(4)], ids=["sums", "copies"])
def test_protocol_holds_for_three_ranks(call: Call, verify) -> None:
    verify(model(3, [call], SHORT))


def test_calls_may_divide_the_window_differently(verify) -> None:
    """Short calls, calls without chunks and others between: no place means the same in two of them."""
    verify(model(2, [reduces(1), copies(2, 3), copies(0), BARRIER, reduces(1, 4), copies(1, 5)]))


def test_progress_keeps_the_invariant(verify) -> None:
    """Headers exist to name mismatches and missing ranks."""
    verify(model(2, [copies(2), reduces(1), copies(0), copies(1)], Rules(headers=HeaderRules(exchanged=False))))


@pytest.mark.parametrize(
    "rules", [Rules(sent=3), replace(SHORT, sent=1), replace(UNEVEN, sent=2)], ids=["two steps", "one step", "uneven"]
)
def test_fewer_places_are_not_enough(rules: Rules, refute) -> None:
    """A rank sends a chunk when its peer may still be reading the one whose place it takes."""
    refute(model(2, [copies(5)], rules), Kind.WRONG_VALUE)


@pytest.mark.parametrize("rules", [Rules(sums=3), replace(SHORT, sums=1)], ids=["two steps", "one step"])
def test_fewer_places_for_sums_are_not_enough(rules: Rules, refute) -> None:
    refute(model(2, [reduces(5)], rules), Kind.WRONG_VALUE)


def test_more_places_are_not_needed(verify) -> None:
    verify(model(2, [reduces(4)], replace(SHORT, sent=3)))


def test_without_a_fence_chunks_are_read_before_they_are_there(refute) -> None:
    refute(model(2, [copies(2)], Rules(fenced=False)), Kind.WRONG_VALUE)


def test_without_entering_places_of_the_call_before_are_overwritten(refute) -> None:
    """The peer may still be reading the last sums of the call before, whose places are now for chunks."""
    refute(model(2, [reduces(1), copies(2, 6)], Rules(enters=False)), Kind.WRONG_VALUE)


def test_progress_of_an_earlier_call_guards_nothing(refute) -> None:
    refute(model(2, [copies(2), copies(2)], Rules(by_epoch=False)), Kind.WRONG_VALUE, Kind.EARLY_FINISH)


def test_waiting_for_exactly_so_many_steps_misses_them(refute) -> None:
    """A peer that does not wait for this rank's last chunk goes on to the next call, and says so."""
    refute(model(2, [copies(2), copies(1)], Rules(exactly=True)), Kind.DEADLOCK)


def test_waiting_for_a_step_less_reads_too_early(refute) -> None:
    refute(model(2, [copies(2)], Rules(behind=1)), Kind.WRONG_VALUE)


def test_progress_before_reading_lets_places_be_overwritten(refute) -> None:
    refute(model(2, [reduces(4)], replace(SHORT, raises_before_taking=True)), Kind.WRONG_VALUE)


def test_reductions_of_the_machine_lose_nothing(verify, refute) -> None:
    verify(model(2, [copies(2)], reduced=False))
    refute(model(2, [copies(3)], replace(SHORT, sent=1), reduced=False), Kind.WRONG_VALUE)
