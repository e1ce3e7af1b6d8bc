"""Explicit-state model checking: visit every state a model can reach, and say what is wrong with the first bad one."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol


class Kind(enum.Enum):
    """What a model can do wrong."""

    WRONG_VALUE = "a rank takes a word that is not of this call"
    EARLY_FINISH = "a rank finishes a call that another has not started"
    BROKEN_CLAIM = "something the protocol promises does not hold"
    DEADLOCK = "nothing can happen, and not everybody is done"
    NO_END = "a state from which no end can be reached"


class Model(Protocol):
    """A transition system. States are hashable and compared by value."""

    def initial(self) -> Hashable: ...

    def steps(self, state: Any) -> Iterable[tuple[Any, Hashable]]:
        """What can happen next, as (label, state reached); labels are turned into text only for a trace."""
        ...

    def fault(self, state: Any) -> tuple[Kind, str] | None:
        """The safety property this state breaks, if any."""
        ...

    def is_final(self, state: Any) -> bool:
        """Whether it is right that nothing more happens here."""
        ...


class TooManyStatesError(Exception):
    """The model has more states than it was expected to have."""


@dataclass(frozen=True, slots=True)
class Violation:
    kind: Kind
    message: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"  {number:3} {label}" for number, label in enumerate(self.trace, 1)]
        return "\n".join([f"{self.kind.name}: {self.kind.value}", f"  {self.message}", *lines])


@dataclass(frozen=True, slots=True)
class Result:
    """``violation`` is None if the fixpoint was reached without one; ``states`` and ``steps`` count what was seen."""

    states: int
    steps: int
    violation: Violation | None


def explore(model: Model, max_states: int = 1_000_000) -> Result:
    """Breadth first, so that the trace to a violation is as short as any."""
    first = model.initial()
    number = {first: 0}
    states: list[Any] = [first]
    cause: list[tuple[int, Any]] = [(-1, "")]  # by state: where it was first reached from, and how
    before: list[list[int]] = [[]]  # by state: every state with a step to it
    final: list[int] = []
    steps = 0

    def violated(kind: Kind, message: str, at: int) -> Result:
        trace: list[str] = []
        while at > 0:
            at, label = cause[at]
            trace.append(str(label))
        return Result(len(states), steps, Violation(kind, message, tuple(reversed(trace))))

    here = 0
    while here < len(states):
        state = states[here]
        fault = model.fault(state)
        if fault:
            return violated(*fault, here)
        is_final = model.is_final(state)
        if is_final:
            final.append(here)
        stuck = True
        for label, after in model.steps(state):
            stuck = False
            steps += 1
            there = number.get(after)
            if there is None:
                there = number[after] = len(states)
                if there >= max_states:
                    raise TooManyStatesError(f"more than {max_states} states")
                states.append(after)
                cause.append((here, label))
                before.append([])
            before[there].append(here)
        if stuck and not is_final:
            return violated(Kind.DEADLOCK, str(state), here)
        here += 1

    ends = set(final)
    while final:
        for earlier in before[final.pop()]:
            if earlier not in ends:
                ends.add(earlier)
                final.append(earlier)
    for here in range(len(states)):
        if here not in ends:
            return violated(Kind.NO_END, str(states[here]), here)
    return Result(len(states), steps, None)
