"""Ranks that store into each other's memory: the machine on which the protocol models run.

A *program* is a generator of instructions; it reads as the protocol reads. Programs of all ranks interleave in every
way. A store is first *in flight* and lands at any later time: stores of one program to one address land in order, all
others in any order. ``Fence`` and the end of a kernel are what makes stores land.

Three things keep the state spaces small without losing a behaviour.

1. *Issuing a store is not a choice.* A program runs on through its stores, since nobody can see a store that has not
   landed: issuing it at once and landing it late is the same as issuing it late.
2. *A store lands just before somebody would notice.* Landing commutes with every step that does not touch the address.
   So a landing is a step of its own only if another store to the same address is in flight, or if an instruction
   that some program stands at could tell the difference. Where a wait needs exactly this one store, the landing is
   part of the step that ends the wait.
3. *A wait for several words is one step*, though kernels poll word by word. The wait is watched instead: in every state
   in which a program stands at it, any of its words that has arrived must be the expected one, since the program
   could read it right now; and if such a word is taken away again, the wait does not end, as it would not for a program
   that had not read the word yet.

``Machine(..., reduced=False)`` does without 1 and 2; a test compares the two on all protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .explore import Kind

Address = tuple[Any, ...]
"""(owner, region, *index): a word in the memory of rank ``owner``. The region decides what the word is at first."""


class Instruction:
    """What a program can do. The value of a ``yield`` is the instruction's result."""


@dataclass(frozen=True, slots=True)
class Store(Instruction):
    """Put ``value`` in flight to ``address``."""

    address: Address
    value: Hashable


@dataclass(frozen=True, slots=True)
class Await(Instruction):
    """Wait until every word has arrived, and take them: WRONG_VALUE unless they are the expected ones.

    ``arrived(word)`` is what the code really tests. ``expected`` None means that any word that arrived is right. With
    ``unless``, the wait also ends once that word is not as at first; ``deadline`` "quiet" lets it end when nothing else
    can happen anywhere (the deadline is longer than any delay), "any time" whenever. The result is ARRIVED, ABORTED or
    EXPIRED.
    """

    words: Mapping[Address, Hashable]
    arrived: Callable[[Any], bool]
    unless: Address | None = None
    deadline: str = ""


ARRIVED, ABORTED, EXPIRED = "arrived", "aborted", "expired"


def Read(words: Mapping[Address, Hashable]) -> Await:  # noqa: N802 - it reads as the instruction that it is
    """Read the words, in any order, without waiting: WRONG_VALUE unless they are the expected ones."""
    return Await(words, arrived=lambda word: True)


@dataclass(frozen=True, slots=True)
class Load(Instruction):
    """The result is the word."""

    address: Address


@dataclass(frozen=True, slots=True)
class Add(Instruction):
    """Atomically add to the word; the result is the word before."""

    address: Address
    amount: int


@dataclass(frozen=True, slots=True)
class Fence(Instruction):
    """Go on once all stores of this program have landed.

    A store-release is a fence followed by a store: nobody else can tell whether the program waited for its earlier
    stores or went on while they landed ahead of the release.
    """


@dataclass(frozen=True, slots=True)
class Barrier(Instruction):
    """Go on once every program that ever names this barrier's ``members`` stands at it. Orders nothing."""

    name: Hashable
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KernelBoundary(Instruction):
    """The rank's kernel of call ``epoch`` is done once all its programs stand here.

    Its stores to its own memory have landed. Those to other ranks may still be in flight: stronger than hardware, so
    no protocol here leans on it.
    """

    epoch: int


@dataclass(frozen=True, slots=True)
class Start(Instruction):
    """The program begins call ``epoch`` at a time of its choosing."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Finish(Instruction):
    """The rank, having one program, finishes call ``epoch``."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Fail(Instruction):
    """The program found a promise broken."""

    message: str
    kind: Kind = Kind.BROKEN_CLAIM


Steps = Generator[Instruction, Any, Any]


@dataclass(frozen=True, slots=True)
class Become(Instruction):
    """Forget all results so far and go on as ``body``, which ``key`` alone determines within the program.

    Only makes states equal that differ in nothing but what a program has read and no longer needs.
    """

    key: Hashable
    body: Callable[[], Steps]


@dataclass(frozen=True, slots=True)
class Program:
    rank: int
    name: str
    body: Callable[[], Steps]

    def __str__(self) -> str:
        return f"rank {self.rank} {self.name}".rstrip()


@dataclass(slots=True)
class _Point:
    """Where a program stands: the results it has had so far determine it, for bodies are deterministic."""

    program: int
    body: Callable[[], Steps]
    results: tuple[Any, ...]
    instruction: Instruction | None  # None: the program has ended
    after: dict[Any, int]


_State = tuple[tuple[int, ...], tuple[tuple[int, int], ...], tuple[tuple[tuple[int, int], tuple[int, ...]], ...]]
"""Points of the programs; words that are not as at first; stores in flight by (address, program), oldest first."""


class _Numbers:
    """Values by number, so that states are tuples of integers."""

    def __init__(self) -> None:
        self.of: dict[Any, int] = {}
        self.values: list[Any] = []

    def __call__(self, value: Any) -> int:
        number = self.of.get(value)
        if number is None:
            number = self.of[value] = len(self.values)
            self.values.append(value)
        return number


class _Moment:
    """A state taken apart, to be changed."""

    __slots__ = ("flying", "issued", "points", "words")

    def __init__(self, state: _State) -> None:
        self.points = list(state[0])
        self.words = dict(state[1])
        self.flying = dict(state[2])
        self.issued: list[Store] = []

    def state(self) -> _State:
        return tuple(self.points), tuple(sorted(self.words.items())), tuple(sorted(self.flying.items()))


class Machine:
    """A :class:`Model` of ``programs``; ``at_first`` gives every region's word before the first store."""

    def __init__(
        self,
        programs: Sequence[Program],
        at_first: Mapping[str, Hashable],
        *,
        check_starts: bool = True,
        reduced: bool = True,
    ) -> None:
        self.programs = tuple(programs)
        self.at_first = dict(at_first, started=-1, finished=-1)
        self.check_starts = check_starts
        self.reduced = reduced
        self._addresses, self._values = _Numbers(), _Numbers()
        self._points: list[_Point] = []
        self._waits: dict[int, list[tuple[int, int | None]]] = {}
        self._accepts: dict[tuple[int, int], bool] = {}
        ranks = sorted({program.rank for program in self.programs})
        self._of_rank = {r: [p for p, program in enumerate(self.programs) if program.rank == r] for r in ranks}
        self._started = [self._addresses((r, "started")) for r in ranks]
        self._finished = [self._addresses((r, "finished")) for r in ranks]
        self._became: dict[tuple[int, Hashable], int] = {}
        self._roots = [self._point(p, program.body, ()) for p, program in enumerate(self.programs)]

    # -- programs ---------------------------------------------------------------------------------------------------

    def _point(self, program: int, body: Callable[[], Steps], results: tuple[Any, ...]) -> int:
        running = body()
        instruction: Instruction | None
        try:
            instruction = next(running)
            for result in results:
                instruction = running.send(result)
        except StopIteration:
            instruction = None
        if isinstance(instruction, Become):
            key = program, instruction.key
            if key not in self._became:
                self._became[key] = self._point(program, instruction.body, ())
            return self._became[key]
        self._points.append(_Point(program, body, results, instruction, {}))
        return len(self._points) - 1

    def _proceed(self, moment: _Moment, program: int, result: Any = None) -> None:
        """Give the program the result of its instruction; when reduced, run it on through its stores."""
        while True:
            here = self._points[moment.points[program]]
            there = here.after.get(result)
            if there is None:
                there = here.after[result] = self._point(program, here.body, (*here.results, result))
            moment.points[program] = there
            if not self.reduced or not self._issue(moment, program):
                return
            result = None

    def _issue(self, moment: _Moment, program: int) -> bool:
        instruction = self._points[moment.points[program]].instruction
        if isinstance(instruction, Store):
            key = self._addresses(instruction.address), program
            moment.flying[key] = (*moment.flying.get(key, ()), self._values(instruction.value))
            moment.issued.append(instruction)
            return True
        return isinstance(instruction, Fence) and not any(source == program for _, source in moment.flying)

    # -- memory -----------------------------------------------------------------------------------------------------

    def _word(self, moment: _Moment, address: int) -> int:
        number = moment.words.get(address)
        return self._values(self.at_first[self._addresses.values[address][1]]) if number is None else number

    def _write(self, moment: _Moment, address: int, value: int) -> None:
        if self._values.values[value] == self.at_first[self._addresses.values[address][1]]:
            moment.words.pop(address, None)
        else:
            moment.words[address] = value

    def _land(self, moment: _Moment, key: tuple[int, int]) -> None:
        value, *rest = moment.flying.pop(key)
        if rest:
            moment.flying[key] = tuple(rest)
        self._write(moment, key[0], value)

    def _land_all(self, moment: _Moment, keys: list[tuple[int, int]]) -> bool:
        """Land these stores, if it does not matter in which order they do with others to the same addresses."""
        if not self.reduced:
            return not keys
        addresses = [address for address, _ in moment.flying]
        if any(len(moment.flying[key]) > 1 or addresses.count(key[0]) > 1 for key in keys):
            return False
        for key in keys:
            self._land(moment, key)
        return True

    # -- waits ------------------------------------------------------------------------------------------------------

    def _wait(self, point: int, wait: Await) -> list[tuple[int, int | None]]:
        """(address, expected word or None) of every word waited for."""
        found = self._waits.get(point)
        if found is None:
            found = self._waits[point] = [
                (self._addresses(address), None if expected is None else self._values(expected))
                for address, expected in wait.words.items()
            ]
        return found

    def _arrived(self, point: int, wait: Await, value: int) -> bool:
        key = point, value
        found = self._accepts.get(key)
        if found is None:
            found = self._accepts[key] = wait.arrived(self._values.values[value])
        return found

    # -- the model --------------------------------------------------------------------------------------------------

    def initial(self) -> _State:
        moment = _Moment((tuple(self._roots), (), ()))
        for program in range(len(self.programs)):
            if self.reduced and self._issue(moment, program):
                self._proceed(moment, program)
        return moment.state()

    def is_final(self, state: _State) -> bool:
        return all(self._points[point].instruction is None for point in state[0])

    def fault(self, state: _State) -> tuple[Kind, str] | None:
        moment = _Moment(state)
        for point in moment.points:
            instruction = self._points[point].instruction
            if isinstance(instruction, Fail):
                return instruction.kind, f"{self.programs[self._points[point].program]}: {instruction.message}"
            if isinstance(instruction, Await):
                for address, expected in self._wait(point, instruction):
                    word = self._word(moment, address)
                    if expected is not None and word != expected and self._arrived(point, instruction, word):
                        reader = self.programs[self._points[point].program]
                        return Kind.WRONG_VALUE, (
                            f"{reader} may take {self._values.values[word]} at {self._addresses.values[address]} "
                            f"where {self._values.values[expected]} is due"
                        )
        if self.check_starts:
            started = [self._values.values[self._word(moment, address)] for address in self._started]
            for rank, address in enumerate(self._finished):
                finished = self._values.values[self._word(moment, address)]
                if finished > min(started):
                    late = started.index(min(started))
                    return Kind.EARLY_FINISH, f"rank {rank} finished call {finished}, rank {late} has not started it"
        return None

    def steps(self, state: _State) -> list[tuple[_Label, _State]]:
        found: list[tuple[_Label, _State]] = []
        before = _Moment(state)

        def step(program: int, what: str | Await, moment: _Moment, result: Any = None) -> None:
            self._proceed(moment, program, result)
            found.append((_Label(self, program, what, moment.issued), moment.state()))

        quiet: list[int] = []
        noticed: set[int] = set()  # addresses at which a landing could make a difference to somebody
        in_flight: dict[int, list[int]] = {}  # by address: the oldest store of every program, and the ones behind it
        for (address, _), values in before.flying.items():
            in_flight.setdefault(address, []).extend(values)

        for program, point in enumerate(before.points):
            instruction = self._points[point].instruction
            match instruction:
                case Await():
                    ready, landing = True, []
                    for address, expected in self._wait(point, instruction):
                        flying = in_flight.get(address, [])
                        if self._arrived(point, instruction, self._word(before, address)):
                            noticed.add(address)
                        elif self.reduced and len(flying) == 1 and self._arrived(point, instruction, flying[0]):
                            landing.append(address)
                            if expected is not None and flying[0] != expected:
                                ready = False
                                noticed.add(address)
                        else:
                            ready = False
                    if ready:
                        moment = _Moment(state)
                        for key in before.flying:
                            if key[0] in landing:
                                self._land(moment, key)
                        step(program, instruction, moment, ARRIVED)
                    if instruction.unless is not None:
                        address = self._addresses(instruction.unless)
                        noticed.add(address)
                        if self._values.values[self._word(before, address)] != self.at_first[instruction.unless[1]]:
                            step(program, "sees the abort word", _Moment(state), ABORTED)
                    if instruction.deadline == "any time":
                        step(program, "is out of time", _Moment(state), EXPIRED)
                    elif instruction.deadline == "quiet":
                        quiet.append(program)
                case Load(address):
                    noticed.add(self._addresses(address))
                    value = self._values.values[self._word(before, self._addresses(address))]
                    step(program, f"reads {value} at {address}", _Moment(state), value)
                case Add(address, amount):
                    noticed.add(self._addresses(address))
                    value = self._values.values[self._word(before, self._addresses(address))]
                    moment = _Moment(state)
                    self._write(moment, self._addresses(address), self._values(value + amount))
                    step(program, f"adds {amount} to {value} at {address}", moment, value)
                case Fence():
                    moment = _Moment(state)
                    if self._land_all(moment, [key for key in before.flying if key[1] == program]):
                        step(program, "passes its fence", moment)
                case Start(epoch):
                    moment = _Moment(state)
                    address = self._started[self.programs[program].rank]
                    if epoch > self._values.values[self._word(before, address)]:
                        self._write(moment, address, self._values(epoch))
                    step(program, f"starts call {epoch}", moment)
                case Finish(epoch):
                    moment = _Moment(state)
                    self._write(moment, self._finished[self.programs[program].rank], self._values(epoch))
                    step(program, f"finishes call {epoch}", moment)
                case KernelBoundary(epoch):
                    rank = self.programs[program].rank
                    members = self._of_rank[rank]
                    if program == members[0] and self._all_at(before, members, instruction):
                        moment = _Moment(state)
                        own = [k for k in before.flying if k[1] in members and self._addresses.values[k[0]][0] == rank]
                        if self._land_all(moment, own):
                            self._write(moment, self._finished[rank], self._values(epoch))
                            for member in members[1:]:
                                self._proceed(moment, member)
                            step(program, f"and all of the rank end call {epoch}", moment)
                case Barrier(_, names):
                    members = [p for p, other in enumerate(self.programs) if str(other) in names]
                    if program == members[0] and self._all_at(before, members, instruction):
                        moment = _Moment(state)
                        for member in members[1:]:
                            self._proceed(moment, member)
                        step(program, f"and the others pass barrier {instruction.name}", moment)
                case Store():
                    moment = _Moment(state)
                    self._issue(moment, program)
                    step(program, f"issues {instruction.value} to {instruction.address}", moment)

        def land(everything: bool) -> None:
            for key in before.flying:
                if everything or key[0] in noticed or len(in_flight[key[0]]) > 1:
                    moment = _Moment(state)
                    self._land(moment, key)
                    found.append((_Label(self, key[1], (key[0], before.flying[key][0]), []), moment.state()))

        land(not self.reduced)
        if not found:
            land(True)
        if not found:
            for program in quiet:
                step(program, "is out of time", _Moment(state), EXPIRED)
        return found

    def _all_at(self, moment: _Moment, members: list[int], instruction: Instruction) -> bool:
        return all(self._points[moment.points[member]].instruction == instruction for member in members)


_What = str | Await | tuple[int, int]


class _Label:
    """Text of a step, made only if a trace is printed. ``what``: text, a wait that ended, or what landed where."""

    __slots__ = ("issued", "machine", "program", "what")

    def __init__(self, machine: Machine, program: int, what: _What, issued: list[Store]) -> None:
        self.machine, self.program, self.what, self.issued = machine, program, what, issued

    def __str__(self) -> str:
        program = self.machine.programs[self.program]
        if isinstance(self.what, tuple):
            address, value = self.machine._addresses.values[self.what[0]], self.machine._values.values[self.what[1]]
            return f"{program}: its store of {value} to {address} lands"
        stores = "; ".join(f"{store.value} to {store.address}" for store in self.issued)
        what = f"has {', '.join(map(str, self.what.words))}" if isinstance(self.what, Await) else self.what
        return f"{program} {what}" + (f", then sends {stores}" if stores and self.machine.reduced else "")
