"""Replays traces of interpreted kernels (``kernel_traces.py``) against the programs of the models.

A model's program says what a rank does in a call: stores, then a wait, then stores, and so on. The programs of a grid
share this work. Each of them must do its stores in the phases in which the model does them, between waits for the same
words. Together they must leave nothing out, and do nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from . import test_epoch_advance as epoch_advance
from .kernel_traces import COPIES, POLLED, Event
from .machine import Add, Await, Fail, Fence, KernelBoundary, Load, Start, Steps, Store
from .words import SENTINEL, Header

Place = tuple[Any, ...]
Translation = Callable[[Place, Any], tuple[Place, Any]]
"""A function from a word of the model and its value to those of the kernels."""


class ReplayError(AssertionError):
    """A kernel does what the model does not, or leaves out what it does."""


def region_of(place: Place) -> str:
    region: str = place[1]
    return region


class Wait:
    """Words that a rank waits for, or only reads, and the model's test of them."""

    def __init__(self, words: dict[Place, Any], step: Await) -> None:
        self.words, self.step = words, step
        self.only_reads = all(region_of(place) == "slots" for place in words) and step.arrived(SENTINEL)

    def ends(self, place: Place, value: Any) -> bool:
        wanted = self.words[place]
        return value == wanted or (wanted is None and self.step.arrived(value))


class Phases:
    """The steps of a model's program in one call.

    Attributes:
        stores: what is stored before each wait, and after the last.
        waits: the waits.
        released: places that are stored after a fence.
        clears: slots that must be cleared.
        may_clear: slots of this call that may be cleared once they have been read: a rank need not clear what no rank
            has stored.
    """

    def __init__(self, rank: int, steps: Sequence[Any], translate: Translation, keeps: int = 2) -> None:
        self.rank = rank
        self.stores: list[dict[Place, Any]] = [{}]
        self.waits: list[Wait] = []
        self.released: set[Place] = set()
        clears: set[Place] = set()
        kept: set[Place] = set()
        used: set[Any] = set()  # generations
        fenced = False
        for step in steps:
            if isinstance(step, Fence):
                fenced = True
            elif isinstance(step, Store):
                place, value = translate(step.address, step.value)
                if value == SENTINEL:
                    clears.add(place)
                    continue
                used.add(place[1:3])
                own = place[0] == rank and region_of(place) in ("slots", "cells")
                if own and len(self.waits) < keeps:
                    kept.add(place)  # a rank takes its own words from where they are
                    continue
                self.stores[-1][place] = value
                if fenced and region_of(place) == "flags":
                    self.released.add(place)
            elif isinstance(step, Await):
                pairs = [translate(address, value) for address, value in step.words.items()]
                used |= {place[1:3] for place, _ in pairs}
                words = {place: value for place, value in pairs if place not in kept}
                if words:
                    self.waits.append(Wait(words, step))
                    self.stores.append({})
        awaited = {place for wait in self.waits for place in wait.words}
        self.may_clear = {place for place in clears if place[1:3] in used}
        self.clears = {place for place in clears if place not in self.may_clear or place in awaited}

    def replay(self, events: Sequence[Event], where: str) -> None:
        """Replay what the programs of the grid do in the call.

        Raises:
            ReplayError: they do something else.
        """
        stored: set[Place] = set()
        read: set[Place] = set()
        cleared: set[Place] = set()
        for program in sorted({event.program for event in events}):
            replay = _ProgramReplay(self, [e for e in events if e.program == program], f"{where}, program {program}")
            replay.run()
            for done, already, verb in ((replay.stored, stored, "stores"), (replay.cleared, cleared, "clears")):
                if done & already:
                    raise ReplayError(f"{where}: another program {verb} {sorted(done & already)} too")
            stored |= replay.stored
            read |= replay.read
            cleared |= replay.cleared
        left = {place for stores in self.stores for place in stores} - stored
        unread = {place for wait in self.waits for place in wait.words} - read
        if left or unread or self.clears - cleared:
            raise ReplayError(
                f"{where} leaves out: stores {sorted(left)}, waits for {sorted(unread)}, "
                f"clears {sorted(self.clears - cleared)}"
            )


class _ProgramReplay:
    """One program's accesses, in order."""

    def __init__(self, phases: Phases, events: list[Event], where: str) -> None:
        self.phases, self.events, self.where = phases, events, where
        touched = {place for event in events for place in event.words}
        self.stores = [{p: v for p, v in stores.items() if p in touched} for stores in phases.stores]
        self.waited = [{p for p in wait.words if p in touched} for wait in phases.waits]
        self.stored: set[Place] = set()
        self.read: set[Place] = set()
        self.cleared: set[Place] = set()
        self.phase = 0
        self.seen: set[Place] = set()
        self.marks: set[str] = set()  # barriers and fences since the last store, or since the wait began

    def run(self) -> None:
        self._pass_empty_waits()
        for event in self.events:
            if not event.words:
                self.marks.add(event.action)
                continue
            for place, value in event.words.items():
                if event.action in ("store", "release"):
                    self._store(event.action, place, value)
                else:
                    self._load(event.action, place, value)
            self.marks -= {"barrier"} if event.action == "store" else set()
        self._end_wait()
        if self.phase < len(self.waited) or any(self.stores):
            raise ReplayError(
                f"{self.where} leaves out: waits {[sorted(words - self.seen) for words in self.waited[self.phase :]]}, "
                f"stores {[stores for stores in self.stores if stores]}"
            )

    def _end_wait(self) -> None:
        """Go on to the next phase if every word that is waited for was there when it was last looked at."""
        if self.phase < len(self.waited) and self.seen == self.waited[self.phase]:
            self.read |= self.seen
            self.seen = set()
            self.phase += 1
            self._pass_empty_waits()

    def _pass_empty_waits(self) -> None:
        """Pass waits of which this program has no word: what other programs do between them is not its own."""
        while self.phase < len(self.waited) and not self.waited[self.phase]:
            self.stores[self.phase + 1] |= self.stores[self.phase]
            self.stores[self.phase] = {}
            self.phase += 1

    def _store(self, action: str, place: Place, value: Any) -> None:
        rank, phases = self.phases.rank, self.phases
        if value == SENTINEL and region_of(place) == "slots":
            self._clear(place)
            return
        if place[0] == rank and region_of(place) == "header" and place[2] == rank:
            return  # a kernel sends itself a header too
        if place not in self.stores[self.phase]:
            self._end_wait()
        if place not in self.stores[self.phase] or self.stores[self.phase][place] != value:
            raise ReplayError(
                f"{self.where} stores {value} to {place} after {self.phase} waits; the model: {self.stores[self.phase]}"
            )
        if place in phases.released and (action != "release" or "barrier" not in self.marks):
            raise ReplayError(f"{self.where} stores to {place} without a barrier, or without release")
        if region_of(place) == "credits" and "barrier" not in self.marks:
            raise ReplayError(f"{self.where} gives credit before all threads have their words")
        del self.stores[self.phase][place]
        self.stored.add(place)

    def _clear(self, place: Place) -> None:
        if place not in self.phases.clears and place not in self.phases.may_clear:
            raise ReplayError(f"{self.where} clears {place}, which the model does not")
        if place in self.phases.may_clear and place not in self.read:
            self._end_wait()
            if place not in self.read:
                raise ReplayError(f"{self.where} clears {place} before it has come")
        self.cleared.add(place)

    def _load(self, action: str, place: Place, value: Any) -> None:
        rank = self.phases.rank
        if place[0] == rank and region_of(place) == "header" and place[2] == rank:
            return
        if self.phase == len(self.waited) or place not in self.waited[self.phase]:
            self._end_wait()
        if self.phase == len(self.waited) or place not in self.waited[self.phase]:
            raise ReplayError(f"{self.where} reads {place}, for which the model does not wait")
        if self.stores[self.phase]:
            raise ReplayError(f"{self.where} waits before it stores {self.stores[self.phase]}")
        wait = self.phases.waits[self.phase]
        if not self.seen and not wait.only_reads:
            self.marks.clear()
        if wait.only_reads:
            if not {"fence", "barrier"} <= self.marks:
                raise ReplayError(f"{self.where} reads {place} without a fence and a barrier")
        elif action != "load":
            raise ReplayError(f"{self.where} polls {place} by a load that may be cached")
        self.seen.discard(place)
        if wait.ends(place, value):
            self.seen.add(place)


def calls_in(steps: Steps) -> list[list[Any]]:
    """Return the instructions of each call of a model's program."""
    calls: list[list[Any]] = []
    for step in steps:
        if isinstance(step, Start):
            calls.append([])
        elif not isinstance(step, KernelBoundary):
            calls[-1].append(step)
    return calls


def of_regions(events: Iterable[Event], call: int, *regions: str, data: bool | None = None) -> list[Event]:
    """Return the accesses of a call to these regions, and its barriers: of data programs, of program 0, or of all."""
    found = []
    for event in events:
        if event.call == call and (data is None or data == (event.program > 0)):
            words = {place: value for place, value in event.words.items() if region_of(place) in regions}
            if words or not event.words:
                found.append(event._replace(words=words))
    return found


def header_of(address: Place, value: Any) -> tuple[Place, Any]:
    """Return the word of a header as the kernels have it: each has two."""
    place = address if len(address) > 4 else (*address, 0)
    return place, (value.epoch, "same") if isinstance(value, Header) else value


def replay_epochs(events: list[Event], number: int, rank: int, first: int, extents: Sequence[int | None]) -> None:
    """Replay how each program learns its epoch, against the model of tests/protocols/test_epoch_advance.py.

    ``extents[n]`` is that of call n, None if it uses no slots.
    """
    regions = ("epoch", "generation", "readers")
    accesses = of_regions(events, number, *regions)
    programs = sorted({event.program for event in events if event.call == number})
    for program in programs:
        where = f"rank {rank}, call {number}, program {program}"
        mine = [event for event in accesses if event.program == program]
        flat = [(e.action, place[1:], value) for e in mine for place, value in e.words.items()]
        stores = [entry[1:] for entry in flat if entry[0] == "store"]
        keeper = program == 0
        counts = [position for position, entry in enumerate(flat) if entry[0] == ("store" if keeper else "add")]
        if not counts:
            raise ReplayError(f"{where} does not count itself in")
        if not waits_for_prior_kernel(mine):
            raise ReplayError(f"{where} reads the epoch before the prior kernel has ended")
        if not _barrier_before_count(mine):
            raise ReplayError(f"{where} counts itself in without a barrier after its loads")
        loads = {place: value for action, place, value in flat if action == "load"}
        for position, (action, place, _) in enumerate(flat):
            if action == "plain load":
                raise ReplayError(f"{where} loads {place}, which may be cached")
            if position > counts[0] and action != ("store" if keeper else "add"):
                raise ReplayError(f"{where}: {action} of {place} after the count of readers")
        if program > 0 and _waits_before_count(of_program(events, number, program)):
            raise ReplayError(f"{where} waits for a peer before it counts itself in")
        rules = epoch_advance.Rules()
        steps = epoch_advance.program_of(number, program, len(programs), rules, extents, COPIES)
        adds = iter([] if keeper else counts)
        step, wanted = next(steps), []
        while True:
            result: Any = None
            if isinstance(step, Fail):
                raise ReplayError(f"{where} {step.message}")
            if isinstance(step, Load):
                if step.address[1:] not in loads:
                    raise ReplayError(f"{where} does not load {step.address[1:]}")
                result = loads[step.address[1:]]
                if step.address[1] == "epoch":
                    result -= first
            elif isinstance(step, Add):
                action, place, result = flat[next(adds, counts[-1])]
                if place != step.address[1:]:
                    raise ReplayError(f"{where} counts itself in {place}, the model in {step.address[1:]}")
            elif isinstance(step, Store) and step.address[1] != "ended":
                value = step.value
                if step.address[1] == "epoch":
                    assert isinstance(value, int)
                    value += first
                wanted.append((step.address[1:], value))
            try:
                step = steps.send(result)
            except StopIteration:
                break
        if next(adds, None) is not None:
            raise ReplayError(f"{where} counts itself in {len(counts)} times")
        if sorted(stores, key=str) != sorted(wanted, key=str):
            raise ReplayError(f"{where} stores {stores}, the model {wanted}")


def _barrier_before_count(events: list[Event]) -> bool:
    """Return whether all threads pass a barrier between a program's loads and its count, or its look at the counts."""
    barrier = False
    for event in events:
        if any(region_of(place) == "readers" for place in event.words):
            return barrier
        barrier = event.action == "barrier" or (barrier and not event.words)
    return False


def of_program(events: list[Event], number: int, program: int) -> list[Event]:
    return [event for event in events if event.call == number and event.program == program]


def _waits_before_count(events: list[Event]) -> bool:
    """Return whether a program polls words of its peers while its own grid may wait for its count."""
    for event in events:
        regions = {region_of(place) for place in event.words}
        if event.action in ("add", "store") and regions & {"readers", "epoch"}:
            return False
        if event.action == "load" and regions & set(POLLED):
            return True
    return False


def waits_for_prior_kernel(events: Sequence[Event]) -> bool:
    """Return whether a program waits for the kernel before, and only then uses the region."""
    waited = False
    for event in events:
        waited = waited or event.action == "prior"
        if event.words:
            return waited
    return True
