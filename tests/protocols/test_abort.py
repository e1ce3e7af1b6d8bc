"""Deadlines, mismatches and reset, on top of sentinel buffers.

A wait also ends when this rank's abort word is set, or at the deadline. Whoever gets there first names the ranks whose
header is missing (or, if all came, whose data is) in the abort word of every rank. The word stays: later calls
return at once. ``reset`` is collective: drain, host barrier, clear everything and agree on the epoch, host barrier.

A deadline is modelled in two ways: "quiet", it passes only when nothing else can happen anywhere, as one
longer than any delay does; and "any time", as one that is too short does.
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
    Become,
    Fail,
    Fence,
    KernelBoundary,
    Load,
    Machine,
    Program,
    Start,
    Steps,
    Store,
)
from .vocabulary import SENTINEL, ZERO, Header, Input


class Fault(NamedTuple):
    kind: str
    ranks: frozenset[int]


@dataclass(frozen=True)
class Scenario:
    """``before`` calls that go well; one in which the last rank is the culprit; ``stopped`` calls that find the
    communicator stopped; a reset; and ``after`` calls that go well again."""

    ranks: int
    culprit: str  # "absent": not there till the reset; "dies": gone after its header; "differs": in its fingerprint
    deadline: str = "quiet"  # of the call that goes wrong; those of the others are quiet
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
    """The guards, each of which can be taken away."""

    deadlines: bool = True
    data_looks: bool = True  # False: only the header program has a deadline and looks at the abort word
    delivered: bool = True  # False: a rank that gives up tells nobody
    drained: bool = True
    first_barrier: bool = True
    second_barrier: bool = True
    epoch_agreed: bool = True  # False: each rank goes on from its own


class Rank:
    def __init__(self, rank: int, scenario: Scenario, rules: Rules, epoch: int, generation: int) -> None:
        self.rank, self.scenario, self.rules = rank, scenario, rules
        self.ranks = range(scenario.ranks)
        self.peers = [r for r in self.ranks if r != rank]
        self.is_culprit = rank == scenario.ranks - 1
        self.everybody = tuple(f"rank {r} {name}" for r in self.ranks for name in ("data", "header"))
        self.epoch, self.generation = epoch, generation

    def makes(self, call: int) -> bool:
        """Whether this rank makes this call at all."""
        faulty = self.scenario.faulty
        gone_from = {"absent": faulty, "dies": faulty + 1, "differs": self.scenario.reset}[self.scenario.culprit]
        return not (self.is_culprit and gone_from <= call < self.scenario.reset)

    def header(self, call: int) -> Header:
        other = self.is_culprit and self.scenario.culprit == "differs" and call == self.scenario.faulty
        return Header(self.epoch, "other" if other else "all_reduce")

    def wait(self, words: dict[tuple[object, ...], object], arrived: Any, call: int, looks: bool = True) -> Await:
        deadline = self.scenario.deadline if call == self.scenario.faulty else "quiet"
        return Await(
            words,
            arrived,
            unless=(self.rank, "abort") if looks else None,
            deadline=deadline if looks and self.rules.deadlines else "",
        )

    def cell(self, peer: int) -> tuple[object, ...]:
        return self.rank, "header", peer, self.epoch % 2

    def stop(self, fault: Fault) -> Steps:
        for rank in self.ranks if self.rules.delivered else [self.rank]:
            yield Store((rank, "abort"), fault)

    def give_up(self, silent: set[int]) -> Steps:
        """Name the ranks whose header is missing or, if all came, those in ``silent``."""
        missing = set()
        for peer in self.peers:
            word = yield Load(self.cell(peer))
            if word == ZERO or word.epoch != self.epoch:
                missing.add(peer)
        yield from self.stop(Fault("timeout", frozenset(missing or silent)))

    def reset(self, clears: bool) -> Steps:
        if self.rules.drained:
            yield Fence()
        if self.rules.first_barrier:
            yield Barrier("drained", self.everybody)
        if clears:
            for rank in self.ranks:
                for generation in range(3):
                    yield Store((self.rank, "slots", generation, rank), SENTINEL)
                for parity in range(2):
                    yield Store((self.rank, "header", rank, parity), ZERO)
            yield Store((self.rank, "abort"), None)
            yield Fence()
        if self.rules.second_barrier:
            yield Barrier("cleared", self.everybody)
        else:
            yield Barrier("cleared here", tuple(f"rank {self.rank} {name}" for name in ("data", "header")))
        if self.rules.epoch_agreed:
            self.epoch = self.scenario.reset + 1  # the most that any rank has counted
        self.generation = 0


def calls_of(
    one_call: Callable[[Rank, int], Steps],
    rank: int,
    scenario: Scenario,
    rules: Rules,
    call: int = 0,
    epoch: int = 1,
    generation: int = 0,
) -> Steps:
    """Call after call; what was read in one is of no use in the next."""
    me = Rank(rank, scenario, rules, epoch, generation)
    yield from one_call(me, call)
    if call + 1 < scenario.calls:
        after = call + 1, me.epoch, me.generation
        yield Become(after, lambda: calls_of(one_call, rank, scenario, rules, *after))


def data_call(me: Rank, call: int) -> Steps:
    rank, scenario, rules = me.rank, me.scenario, me.rules
    if call == scenario.reset:
        yield from me.reset(clears=True)
    if not me.makes(call):
        return
    yield Start(call)
    fault = yield Load((rank, "abort"))
    outcome = ABORTED
    if fault is None:
        slots = {(rank, "slots", me.generation, r): Input(r, call, 0) for r in me.ranks}
        for r in me.ranks:
            yield Store((rank, "slots", (me.generation + 2) % 3, r), SENTINEL)
        if not (me.is_culprit and scenario.culprit == "dies" and call == scenario.faulty):
            for owner in me.ranks:
                yield Store((owner, "slots", me.generation, rank), Input(rank, call, 0))
            outcome = yield me.wait(slots, lambda word: word != SENTINEL, call, rules.data_looks)
    if outcome == EXPIRED:
        silent = set()
        for place, _ in slots.items():
            if (yield Load(place)) == SENTINEL:
                silent.add(place[3])
        yield from me.give_up(silent)
    me.epoch += 1
    me.generation = (me.generation + 1) % 3
    yield KernelBoundary(call)

    # The host looks, as ``check`` does. Here is what is promised.
    fault = yield Load((rank, "abort"))
    culprit = scenario.ranks - 1
    if outcome != ARRIVED and fault is None and not (me.is_culprit and scenario.culprit == "dies"):
        yield Fail(f"call {call} ended without its data, and without a fault")
    if call >= scenario.reset and fault is not None:
        yield Fail(f"{fault} after the reset")
    if call == scenario.faulty and scenario.deadline == "quiet":
        if fault is None and not me.is_culprit and scenario.culprit != "dies":
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


def header_call(me: Rank, call: int) -> Steps:
    rank, scenario = me.rank, me.scenario
    if call == scenario.reset:
        yield from me.reset(clears=False)
    if not me.makes(call):
        return
    yield Start(call)
    fault = yield Load((rank, "abort"))
    dies = me.is_culprit and scenario.culprit == "dies" and call == scenario.faulty
    if fault is None:
        mine = me.header(call)
        for peer in me.peers:
            yield Store((peer, "header", rank, me.epoch % 2), mine)
        for peer in me.peers if not dies else []:

            def came(word: Header, mine: Header = mine) -> bool:
                return word != ZERO and word.epoch == mine.epoch

            outcome = yield me.wait({me.cell(peer): None}, came, call)
            if outcome == EXPIRED:
                yield from me.give_up(set())
            if outcome != ARRIVED:
                break
            if (yield Load(me.cell(peer))) != mine:
                yield from me.stop(Fault("mismatch", frozenset({peer})))
                break
    me.epoch += 1
    yield KernelBoundary(call)


def model(scenario: Scenario, rules: Rules | None = None, **options: bool) -> Machine:
    rules = rules or Rules()
    programs = [
        Program(rank, name, lambda rank=rank, one_call=one_call: calls_of(one_call, rank, scenario, rules))
        for rank in range(scenario.ranks)
        for name, one_call in (("data", data_call), ("header", header_call))
    ]
    at_first = {"slots": SENTINEL, "header": ZERO, "abort": None}
    return Machine(programs, at_first, check_starts=False, **options)


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(2, "absent", after=2),
        Scenario(3, "absent"),
        Scenario(2, "dies", after=2),
        Scenario(3, "dies", before=0),
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


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("culprit", ["absent", "dies", "differs"])
def test_telling_the_others_saves_time_only(culprit: str, ranks: int, verify) -> None:
    """All end, and find the fault, even if nobody is told: every wait has its deadline, everybody compares headers."""
    more = 1 if ranks == 2 else 0  # with 3 ranks, only the call that goes wrong
    verify(model(Scenario(ranks, culprit, before=0, stopped=more, after=more), Rules(delivered=False)))


@pytest.mark.parametrize("culprit", ["absent", "dies"])
def test_without_a_deadline_the_others_hang(culprit: str, refute) -> None:
    refute(model(Scenario(2, culprit), Rules(deadlines=False)), Kind.DEADLOCK)


@pytest.mark.parametrize("culprit", ["absent", "dies"])
def test_every_waiting_program_must_look(culprit: str, refute) -> None:
    refute(model(Scenario(2, culprit), Rules(data_looks=False)), Kind.DEADLOCK)


@pytest.mark.parametrize(
    "rules",
    [Rules(drained=False), Rules(first_barrier=False), Rules(second_barrier=False), Rules(epoch_agreed=False)],
    ids=["no drain", "no barrier before clearing", "no barrier after clearing", "epochs not agreed"],
)
def test_each_part_of_a_reset_is_needed(rules: Rules, refute) -> None:
    refute(model(Scenario(2, "absent"), rules), Kind.BROKEN_CLAIM, Kind.WRONG_VALUE, Kind.DEADLOCK)
