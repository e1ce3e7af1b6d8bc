"""Ranks that store into each other's memory: the machine on which the protocol models run.

A *program* is a generator of instructions, so it reads as the protocol does. Programs of all ranks interleave in every
way. A store is first *in flight* and lands at any later time: stores of one program to one address land in order, all
others in any order. ``Fence`` and the end of a kernel make stores land.

Three reductions keep the state spaces small without losing a behaviour.

1. *Issuing a store is not a choice.* A program runs on through its stores, because nothing can observe a store that
   has not landed: issuing it at once and landing it late is the same as issuing it late.
2. *A store lands just before something can observe it.* Landing commutes with every step that does not touch the
   address. So a landing is a step of its own only if another store to the same address is in flight, or if an
   instruction at which some program stands could tell the difference. Where a wait needs exactly this one store, the
   landing is part of the step that ends the wait.
3. *A wait for several words is one step*, although kernels poll word by word. Instead, the wait is checked in every
   state in which a program stands at it: any of its words that has arrived must be the expected one, since the
   program could read it at that moment. If such a word is overwritten again, the wait does not end, as it would not
   for a program that had not yet read the word.

``Machine(..., reduced=False)`` does without 1 and 2; a test compares the two on all protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .explore import Kind

Address = tuple[Any, ...]
"""(owner, region, *index): a word in the memory of rank ``owner``. The region determines its initial value."""


class Instruction:
    """An operation of a program. The value of a ``yield`` is the result of the instruction."""


@dataclass(frozen=True, slots=True)
class Store(Instruction):
    """Put a store of ``value`` to ``address`` in flight."""

    address: Address
    value: Hashable


@dataclass(frozen=True, slots=True)
class Await(Instruction):
    """Wait until every word has arrived, and take them: WRONG_VALUE unless they are the expected ones.

    ``arrived(word)`` is what the code really tests. An ``expected`` of None means that any word that has arrived is
    right. With ``unless``, the wait also ends once that word differs from its initial value. A ``deadline`` of "quiet"
    lets the wait end when nothing else can happen anywhere (the deadline is longer than any delay), unless a wait of
    less ``patience`` can; with "any time" it may always end. The result is ARRIVED, ABORTED or EXPIRED.
    """

    words: Mapping[Address, Hashable]
    arrived: Callable[[Any], bool]
    unless: Address | None = None
    deadline: str = ""
    patience: int = 0


ARRIVED, ABORTED, EXPIRED = "arrived", "aborted", "expired"


def Read(words: Mapping[Address, Hashable]) -> Await:  # noqa: N802 - it reads as the instruction that it is
    """Read the words, in any order, without waiting: WRONG_VALUE unless they are the expected ones."""
    return Await(words, arrived=lambda word: True)


@dataclass(frozen=True, slots=True)
class Load(Instruction):
    """Load a word, which is the result."""

    address: Address


@dataclass(frozen=True, slots=True)
class Add(Instruction):
    """Add to the word atomically; the result is the word before."""

    address: Address
    amount: int


@dataclass(frozen=True, slots=True)
class Fence(Instruction):
    """Continue once all stores of this program have landed.

    A store-release is a fence followed by a store: no other program can tell whether this one waited for its earlier
    stores, or continued while they landed ahead of the release.
    """


@dataclass(frozen=True, slots=True)
class Barrier(Instruction):
    """Continue once every program among this barrier's ``members`` stands at it. It orders no stores."""

    name: Hashable
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KernelBoundary(Instruction):
    """End the rank's kernel of call ``epoch`` once all its programs stand here.

    Its stores to its own memory have then landed. Those to other ranks may still be in flight. This is stronger than
    hardware, so no protocol here depends on it.
    """

    epoch: int


@dataclass(frozen=True, slots=True)
class Start(Instruction):
    """Begin call ``epoch`` at any time."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Finish(Instruction):
    """Finish call ``epoch``, in a rank with one program, or in the one that waits for the others."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Fail(Instruction):
    """Report a broken promise that the program has found."""

    message: str
    kind: Kind = Kind.BROKEN_CLAIM


Steps = Generator[Instruction, Any, Any]


@dataclass(frozen=True, slots=True)
class TailCall(Instruction):
    """Forget all results so far and continue as ``body``, which ``key`` determines within the program.

    It makes states equal that differ only in what a program has read and no longer needs.
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
class _Position:
    """The position of a program. Its results so far determine it, because bodies are deterministic."""

    program: int
    body: Callable[[], Steps]
    results: tuple[Any, ...]
    instruction: Instruction | None  # None: the program has ended
    after: dict[Any, int]


_State = tuple[tuple[int, ...], tuple[tuple[int, int], ...], tuple[tuple[tuple[int, int], tuple[int, ...]], ...]]
"""The positions of the programs, the words that differ from their initial values, and the stores in flight.

Stores in flight are by (address, program), oldest first.
"""


class _Interner:
    """Numbers for values, so that states are tuples of integers."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.values: list[Any] = []

    def __call__(self, value: Any) -> int:
        number = self.numbers.get(value)
        if number is None:
            number = self.numbers[value] = len(self.values)
            self.values.append(value)
        return number


class _MutableState:
    """A state unpacked, to be changed."""

    __slots__ = ("in_flight", "issued", "positions", "words")

    def __init__(self, state: _State) -> None:
        self.positions = list(state[0])
        self.words = dict(state[1])
        self.in_flight = dict(state[2])
        self.issued: list[Store] = []

    def state(self) -> _State:
        return tuple(self.positions), tuple(sorted(self.words.items())), tuple(sorted(self.in_flight.items()))


class Machine:
    """A :class:`Model` of ``programs``. ``initial_words`` gives the word of every region before the first store."""

    def __init__(
        self,
        programs: Sequence[Program],
        initial_words: Mapping[str, Hashable],
        *,
        check_starts: bool = True,
        reduced: bool = True,
    ) -> None:
        self.programs = tuple(programs)
        self.initial_words = dict(initial_words, started=-1, finished=-1)
        self.check_starts = check_starts
        self.reduced = reduced
        self._addresses, self._values = _Interner(), _Interner()
        self._positions: list[_Position] = []
        self._waits: dict[int, list[tuple[int, int | None]]] = {}
        self._accepts: dict[tuple[int, int], bool] = {}
        ranks = sorted({program.rank for program in self.programs})
        self._programs_of_rank = {r: [p for p, program in enumerate(self.programs) if program.rank == r] for r in ranks}
        self._started = [self._addresses((r, "started")) for r in ranks]
        self._finished = [self._addresses((r, "finished")) for r in ranks]
        self._tail_calls: dict[tuple[int, Hashable], int] = {}
        self._roots = [self._position(p, program.body, ()) for p, program in enumerate(self.programs)]

    # -- programs ---------------------------------------------------------------------------------------------------

    def _position(self, program: int, body: Callable[[], Steps], results: tuple[Any, ...]) -> int:
        running = body()
        instruction: Instruction | None
        try:
            instruction = next(running)
            for result in results:
                instruction = running.send(result)
        except StopIteration:
            instruction = None
        if isinstance(instruction, TailCall):
            key = program, instruction.key
            if key not in self._tail_calls:
                self._tail_calls[key] = self._position(program, instruction.body, ())
            return self._tail_calls[key]
        self._positions.append(_Position(program, body, results, instruction, {}))
        return len(self._positions) - 1

    def _proceed(self, mutable: _MutableState, program: int, result: Any = None) -> None:
        """Give the program the result of its instruction. When reduced, run it on through its stores."""
        while True:
            current = self._positions[mutable.positions[program]]
            successor = current.after.get(result)
            if successor is None:
                successor = current.after[result] = self._position(program, current.body, (*current.results, result))
            mutable.positions[program] = successor
            if not self.reduced or not self._issue(mutable, program):
                return
            result = None

    def _issue(self, mutable: _MutableState, program: int) -> bool:
        instruction = self._positions[mutable.positions[program]].instruction
        if isinstance(instruction, Store):
            key = self._addresses(instruction.address), program
            mutable.in_flight[key] = (*mutable.in_flight.get(key, ()), self._values(instruction.value))
            mutable.issued.append(instruction)
            return True
        return isinstance(instruction, Fence) and not any(source == program for _, source in mutable.in_flight)

    # -- memory -----------------------------------------------------------------------------------------------------

    def _word(self, mutable: _MutableState, address: int) -> int:
        number = mutable.words.get(address)
        return self._values(self.initial_words[self._addresses.values[address][1]]) if number is None else number

    def _write(self, mutable: _MutableState, address: int, value: int) -> None:
        if self._values.values[value] == self.initial_words[self._addresses.values[address][1]]:
            mutable.words.pop(address, None)
        else:
            mutable.words[address] = value

    def _land(self, mutable: _MutableState, key: tuple[int, int]) -> None:
        value, *rest = mutable.in_flight.pop(key)
        if rest:
            mutable.in_flight[key] = tuple(rest)
        self._write(mutable, key[0], value)

    def _land_all(self, mutable: _MutableState, keys: list[tuple[int, int]]) -> bool:
        """Land these stores, if their order relative to others to the same addresses does not matter."""
        if not self.reduced:
            return not keys
        addresses = [address for address, _ in mutable.in_flight]
        if any(len(mutable.in_flight[key]) > 1 or addresses.count(key[0]) > 1 for key in keys):
            return False
        for key in keys:
            self._land(mutable, key)
        return True

    # -- waits ------------------------------------------------------------------------------------------------------

    def _wait(self, position: int, wait: Await) -> list[tuple[int, int | None]]:
        """Return (address, expected word or None) for every word waited for."""
        found = self._waits.get(position)
        if found is None:
            found = self._waits[position] = [
                (self._addresses(address), None if expected is None else self._values(expected))
                for address, expected in wait.words.items()
            ]
        return found

    def _arrived(self, position: int, wait: Await, value: int) -> bool:
        key = position, value
        found = self._accepts.get(key)
        if found is None:
            found = self._accepts[key] = wait.arrived(self._values.values[value])
        return found

    # -- the model --------------------------------------------------------------------------------------------------

    def initial(self) -> _State:
        mutable = _MutableState((tuple(self._roots), (), ()))
        for program in range(len(self.programs)):
            if self.reduced and self._issue(mutable, program):
                self._proceed(mutable, program)
        return mutable.state()

    def is_final(self, state: _State) -> bool:
        return all(self._positions[position].instruction is None for position in state[0])

    def fault(self, state: _State) -> tuple[Kind, str] | None:
        mutable = _MutableState(state)
        for position in mutable.positions:
            instruction = self._positions[position].instruction
            if isinstance(instruction, Fail):
                return instruction.kind, f"{self.programs[self._positions[position].program]}: {instruction.message}"
            if isinstance(instruction, Await):
                for address, expected in self._wait(position, instruction):
                    word = self._word(mutable, address)
                    if expected is not None and word != expected and self._arrived(position, instruction, word):
                        reader = self.programs[self._positions[position].program]
                        return Kind.WRONG_VALUE, (
                            f"{reader} may take {self._values.values[word]} at {self._addresses.values[address]} "
                            f"where {self._values.values[expected]} is due"
                        )
        if self.check_starts:
            started = [self._values.values[self._word(mutable, address)] for address in self._started]
            for rank, address in enumerate(self._finished):
                finished = self._values.values[self._word(mutable, address)]
                if finished > min(started):
                    late = started.index(min(started))
                    return Kind.EARLY_FINISH, f"rank {rank} finished call {finished}, rank {late} has not started it"
        return None

    def steps(self, state: _State) -> list[tuple[_Label, _State]]:
        found: list[tuple[_Label, _State]] = []
        before = _MutableState(state)

        def step(program: int, what: str | Await, mutable: _MutableState, result: Any = None) -> None:
            self._proceed(mutable, program, result)
            found.append((_Label(self, program, what, mutable.issued), mutable.state()))

        quiet: dict[int, int] = {}  # the patience of programs whose deadline may pass
        observed: set[int] = set()  # addresses at which a landing could make a difference to somebody
        in_flight_at: dict[int, list[int]] = {}  # by address: the oldest store of every program, and the ones behind it
        for (address, _), values in before.in_flight.items():
            in_flight_at.setdefault(address, []).extend(values)

        for program, position in enumerate(before.positions):
            instruction = self._positions[position].instruction
            match instruction:
                case Await():
                    ready, landing = True, []
                    for address, expected in self._wait(position, instruction):
                        in_flight = in_flight_at.get(address, [])
                        if self._arrived(position, instruction, self._word(before, address)):
                            observed.add(address)
                        elif (
                            self.reduced and len(in_flight) == 1 and self._arrived(position, instruction, in_flight[0])
                        ):
                            landing.append(address)
                            if expected is not None and in_flight[0] != expected:
                                ready = False
                                observed.add(address)
                        else:
                            ready = False
                    if ready:
                        mutable = _MutableState(state)
                        for key in before.in_flight:
                            if key[0] in landing:
                                self._land(mutable, key)
                        step(program, instruction, mutable, ARRIVED)
                    if instruction.unless is not None:
                        address = self._addresses(instruction.unless)
                        observed.add(address)
                        if (
                            self._values.values[self._word(before, address)]
                            != self.initial_words[instruction.unless[1]]
                        ):
                            step(program, "sees the abort word", _MutableState(state), ABORTED)
                    if instruction.deadline == "any time":
                        step(program, "is out of time", _MutableState(state), EXPIRED)
                    elif instruction.deadline == "quiet":
                        quiet[program] = instruction.patience
                case Load(address):
                    observed.add(self._addresses(address))
                    value = self._values.values[self._word(before, self._addresses(address))]
                    step(program, f"reads {value} at {address}", _MutableState(state), value)
                case Add(address, amount):
                    observed.add(self._addresses(address))
                    value = self._values.values[self._word(before, self._addresses(address))]
                    mutable = _MutableState(state)
                    self._write(mutable, self._addresses(address), self._values(value + amount))
                    step(program, f"adds {amount} to {value} at {address}", mutable, value)
                case Fence():
                    mutable = _MutableState(state)
                    if self._land_all(mutable, [key for key in before.in_flight if key[1] == program]):
                        step(program, "passes its fence", mutable)
                case Start(epoch):
                    mutable = _MutableState(state)
                    address = self._started[self.programs[program].rank]
                    if epoch > self._values.values[self._word(before, address)]:
                        self._write(mutable, address, self._values(epoch))
                    step(program, f"starts call {epoch}", mutable)
                case Finish(epoch):
                    mutable = _MutableState(state)
                    self._write(mutable, self._finished[self.programs[program].rank], self._values(epoch))
                    step(program, f"finishes call {epoch}", mutable)
                case KernelBoundary(epoch):
                    rank = self.programs[program].rank
                    members = self._programs_of_rank[rank]
                    if program == members[0] and self._all_at(before, members, instruction):
                        mutable = _MutableState(state)
                        own = [
                            k for k in before.in_flight if k[1] in members and self._addresses.values[k[0]][0] == rank
                        ]
                        if self._land_all(mutable, own):
                            self._write(mutable, self._finished[rank], self._values(epoch))
                            for member in members[1:]:
                                self._proceed(mutable, member)
                            step(program, f"and all of the rank end call {epoch}", mutable)
                case Barrier(_, names):
                    members = [p for p, other in enumerate(self.programs) if str(other) in names]
                    if program == members[0] and self._all_at(before, members, instruction):
                        mutable = _MutableState(state)
                        for member in members[1:]:
                            self._proceed(mutable, member)
                        step(program, f"and the others pass barrier {instruction.name}", mutable)
                case Store():
                    mutable = _MutableState(state)
                    self._issue(mutable, program)
                    step(program, f"issues {instruction.value} to {instruction.address}", mutable)

        def land(everything: bool) -> None:
            for key in before.in_flight:
                if everything or key[0] in observed or len(in_flight_at[key[0]]) > 1:
                    mutable = _MutableState(state)
                    self._land(mutable, key)
                    found.append((_Label(self, key[1], (key[0], before.in_flight[key][0]), []), mutable.state()))

        land(not self.reduced)
        if not found:
            land(True)
        if not found:
            for program in [one for one, patience in quiet.items() if patience == min(quiet.values())]:
                step(program, "is out of time", _MutableState(state), EXPIRED)
        return found

    def _all_at(self, mutable: _MutableState, members: list[int], instruction: Instruction) -> bool:
        return all(self._positions[mutable.positions[member]].instruction == instruction for member in members)


_What = str | Await | tuple[int, int]


class _Label:
    """The text of a step, composed only if a trace is printed.

    ``what`` is a text, a wait that ended, or which store landed where.
    """

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
