"""Deadlines, mismatches and reset, on top of sentinel buffers.

A wait also ends when this rank's abort word is set, or at the deadline. The first rank to get there names, in the abort
word of every rank, the ranks whose header is missing or, if all headers came, the ranks whose data is missing. The word
stays: later calls return at once. ``reset`` is collective: drain, host barrier, clear everything and agree on the
epoch, host barrier.

A deadline is modelled in two ways. A "quiet" one passes only when nothing else can happen anywhere, like a deadline
that is longer than any delay. An "any time" one passes at any time, like a deadline that is too short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from .explore import Kind
from .machine import (
    ABORTED,
    ARRIVED,
    EXPIRED,
    Await,
    Barrier,
    Fail,
    Fence,
    KernelBoundary,
    Load,
    Machine,
    Program,
    Start,
    Steps,
    Store,
    TailCall,
)
from .words import SENTINEL, ZERO, Header, Input


class Fault(NamedTuple):
    kind: str
    ranks: frozenset[int]


@dataclass(frozen=True)
class Scenario:
    """A sequence of calls, one of which fails.

    ``before`` calls succeed. In the next one the last rank is the culprit. ``stopped`` calls find the communicator
    stopped. After a reset, ``after`` calls succeed again.
    """

    ranks: int
    culprit: str  # "absent": until the reset; "dies": after its header; "differs": has another fingerprint
    deadline: str = "quiet"  # of the call that fails; the deadlines of the others are quiet
    before: int = 1
    after: int = 1
    stopped: int = 1

    @property
    def faulty(self) -> int:
        return self.before

    @property
    def reset(self) -> int:
        return self.before + 1 + self.stopped

    @property
    def calls(self) -> int:
        return self.reset + self.after


@dataclass(frozen=True)
class Rules:
    """The guards of the protocol. Each of them can be removed."""

    deadlines: bool = True
    data_checks: bool = True  # False: only the header program has a deadline and checks the abort word
    delivered: bool = True  # False: a rank that gives up does not tell the others
    drained: bool = True
    first_barrier: bool = True
    second_barrier: bool = True
    epoch_agreed: bool = True  # False: each rank goes on from its own


class RankState:
    """A rank between two calls: its epoch and generation, and its part in the scenario."""

    def __init__(self, rank: int, scenario: Scenario, rules: Rules, epoch: int, generation: int) -> None:
        self.rank, self.scenario, self.rules = rank, scenario, rules
        self.ranks = range(scenario.ranks)
        self.peers = [r for r in self.ranks if r != rank]
        self.is_culprit = rank == scenario.ranks - 1
        self.all_programs = tuple(f"rank {r} {name}" for r in self.ranks for name in ("data", "header"))
        self.epoch, self.generation = epoch, generation

    def joins(self, call: int) -> bool:
        """Return whether this rank makes this call at all."""
        faulty = self.scenario.faulty
        gone_from = {"absent": faulty, "dies": faulty + 1, "differs": self.scenario.reset}[self.scenario.culprit]
        return not (self.is_culprit and gone_from <= call < self.scenario.reset)

    def header(self, call: int) -> Header:
        other = self.is_culprit and self.scenario.culprit == "differs" and call == self.scenario.faulty
        return Header(self.epoch, "other" if other else "all_reduce")

    def wait(self, words: dict[tuple[object, ...], object], arrived: Any, call: int, checks: bool = True) -> Await:
        deadline = self.scenario.deadline if call == self.scenario.faulty else "quiet"
        return Await(
            words,
            arrived,
            unless=(self.rank, "abort") if checks else None,
            deadline=deadline if checks and self.rules.deadlines else "",
        )

    def cell(self, peer: int) -> tuple[object, ...]:
        return self.rank, "header", peer, self.epoch % 2

    def stop(self, fault: Fault) -> Steps:
        for rank in self.ranks if self.rules.delivered else [self.rank]:
            yield Store((rank, "abort"), fault)

    def give_up(self, late_ranks: set[int]) -> Steps:
        """Name the ranks whose header is missing or, if all headers came, those in ``late_ranks``."""
        missing = set()
        for peer in self.peers:
            word = yield Load(self.cell(peer))
            if word == ZERO or word.epoch != self.epoch:
                missing.add(peer)
        yield from self.stop(Fault("timeout", frozenset(missing or late_ranks)))

    def reset(self, clears_memory: bool) -> Steps:
        if self.rules.drained:
            yield Fence()
        if self.rules.first_barrier:
            yield Barrier("drained", self.all_programs)
        if clears_memory:
            for rank in self.ranks:
                for generation in range(3):
                    yield Store((self.rank, "slots", generation, rank), SENTINEL)
                for parity in range(2):
                    yield Store((self.rank, "header", rank, parity), ZERO)
            yield Store((self.rank, "abort"), None)
            yield Fence()
        if self.rules.second_barrier:
            yield Barrier("cleared", self.all_programs)
        else:
            yield Barrier("cleared here", tuple(f"rank {self.rank} {name}" for name in ("data", "header")))
        if self.rules.epoch_agreed:
            self.epoch = self.scenario.reset + 1  # the highest epoch of any rank
        self.generation = 0


def calls_of(
    one_call: Callable[[RankState, int], Steps],
    rank: int,
    scenario: Scenario,
    rules: Rules,
    call: int = 0,
    epoch: int = 1,
    generation: int = 0,
) -> Steps:
    """Make one call after the other. The results of a call are of no use in the next."""
    state = RankState(rank, scenario, rules, epoch, generation)
    yield from one_call(state, call)
    if call + 1 < scenario.calls:
        after = call + 1, state.epoch, state.generation
        yield TailCall(after, lambda: calls_of(one_call, rank, scenario, rules, *after))


def data_call(state: RankState, call: int) -> Steps:
    rank, scenario, rules = state.rank, state.scenario, state.rules
    if call == scenario.reset:
        yield from state.reset(clears_memory=True)
    if not state.joins(call):
        return
    yield Start(call)
    fault = yield Load((rank, "abort"))
    outcome = ABORTED
    if fault is None:
        slots = {(rank, "slots", state.generation, r): Input(r, call, 0) for r in state.ranks}
        for r in state.ranks:
            yield Store((rank, "slots", (state.generation + 2) % 3, r), SENTINEL)
        if not (state.is_culprit and scenario.culprit == "dies" and call == scenario.faulty):
            for owner in state.ranks:
                yield Store((owner, "slots", state.generation, rank), Input(rank, call, 0))
            outcome = yield state.wait(slots, lambda word: word != SENTINEL, call, rules.data_checks)
    if outcome == EXPIRED:
        late_ranks = set()
        for address, _ in slots.items():
            if (yield Load(address)) == SENTINEL:
                late_ranks.add(address[3])
        yield from state.give_up(late_ranks)
    state.epoch += 1
    state.generation = (state.generation + 1) % 3
    yield KernelBoundary(call)

    # The host looks at the fault, as ``check`` does. From here on, the promises are checked.
    fault = yield Load((rank, "abort"))
    culprit = scenario.ranks - 1
    if outcome != ARRIVED and fault is None and not (state.is_culprit and scenario.culprit == "dies"):
        yield Fail(f"call {call} ended without its data, and without a fault")
    if call >= scenario.reset and fault is not None:
        yield Fail(f"{fault} after the reset")
    if call == scenario.faulty and scenario.deadline == "quiet":
        if fault is None and not state.is_culprit and scenario.culprit != "dies":
            yield Fail("a call that went wrong has no fault")
        if scenario.culprit == "absent" and fault != Fault("timeout", frozenset({culprit})):
            yield Fail(f"{fault} does not name the absent rank alone")
        if scenario.culprit == "differs":
            if fault is None or fault.kind != "mismatch":
                yield Fail(f"a mismatch is taken for {fault}")
            elif not (fault.ranks == {culprit} or fault.ranks <= set(range(culprit))):
                yield Fail(f"{fault} sets apart neither the one that differs nor those it differs from")
        if scenario.culprit == "dies" and fault is not None and culprit not in fault.ranks:
            yield Fail(f"{fault} does not name the rank that died")


def header_call(state: RankState, call: int) -> Steps:
    rank, scenario = state.rank, state.scenario
    if call == scenario.reset:
        yield from state.reset(clears_memory=False)
    if not state.joins(call):
        return
    yield Start(call)
    fault = yield Load((rank, "abort"))
    dies = state.is_culprit and scenario.culprit == "dies" and call == scenario.faulty
    if fault is None:
        own_header = state.header(call)
        for peer in state.peers:
            yield Store((peer, "header", rank, state.epoch % 2), own_header)
        for peer in state.peers if not dies else []:

            def is_current(word: Header, own_header: Header = own_header) -> bool:
                return word != ZERO and word.epoch == own_header.epoch

            outcome = yield state.wait({state.cell(peer): None}, is_current, call)
            if outcome == EXPIRED:
                yield from state.give_up(set())
            if outcome != ARRIVED:
                break
            if (yield Load(state.cell(peer))) != own_header:
                yield from state.stop(Fault("mismatch", frozenset({peer})))
                break
    state.epoch += 1
    yield KernelBoundary(call)


def model(scenario: Scenario, rules: Rules | None = None, **options: bool) -> Machine:
    rules = rules or Rules()
    programs = [
        Program(rank, name, lambda rank=rank, one_call=one_call: calls_of(one_call, rank, scenario, rules))
        for rank in range(scenario.ranks)
        for name, one_call in (("data", data_call), ("header", header_call))
    ]
    initial_words = {"slots": SENTINEL, "header": ZERO, "abort": None}
    return Machine(programs, initial_words, check_starts=False, **options)


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(2, "absent", after=2),
        pytest.param(Scenario(3, "absent"), marks=pytest.mark.full),
        Scenario(2, "dies", after=2),
        pytest.param(Scenario(3, "dies", before=0), marks=pytest.mark.full),
        Scenario(2, "differs", before=0),
    ],
    ids=lambda scenario: f"{scenario.culprit}-{scenario.ranks}",
)
def test_everybody_ends_with_the_fault_named_and_recovers(scenario: Scenario, verify) -> None:
    verify(model(scenario))


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(2, "absent", deadline="any time"),
        Scenario(2, "dies", deadline="any time", before=0),
    ],
    ids=lambda scenario: scenario.culprit,
)
def test_a_deadline_that_is_too_short_costs_calls_but_never_a_wrong_result(scenario: Scenario, verify) -> None:
    verify(model(scenario))


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("culprit", ["absent", "dies", "differs"])
def test_telling_the_others_saves_time_only(culprit: str, ranks: int, verify) -> None:
    """All ranks end, and find the fault, even if none is told.

    Every wait has its deadline, and every rank compares headers.
    """
    more = 1 if ranks == 2 else 0  # with 3 ranks, only the call that goes wrong
    verify(model(Scenario(ranks, culprit, before=0, stopped=more, after=more), Rules(delivered=False)))


@pytest.mark.parametrize("culprit", ["absent", "dies"])
def test_without_a_deadline_the_others_hang(culprit: str, refute) -> None:
    refute(model(Scenario(2, culprit), Rules(deadlines=False)), Kind.DEADLOCK)


@pytest.mark.parametrize("culprit", ["absent", "dies"])
def test_every_waiting_program_must_look(culprit: str, refute) -> None:
    refute(model(Scenario(2, culprit), Rules(data_checks=False)), Kind.DEADLOCK)


@pytest.mark.parametrize(
    "rules",
    [Rules(drained=False), Rules(first_barrier=False), Rules(second_barrier=False), Rules(epoch_agreed=False)],
    ids=["no drain", "no barrier before clearing", "no barrier after clearing", "epochs not agreed"],
)
def test_each_part_of_a_reset_is_needed(rules: Rules, refute) -> None:
    refute(model(Scenario(2, "absent"), rules), Kind.BROKEN_CLAIM, Kind.WRONG_VALUE, Kind.DEADLOCK)
