"""Explicit-state model checking: visit every state that a model can reach, and describe the first violation."""

from __future__ import annotations

import enum
import functools
import gc
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol


class Kind(enum.Enum):
    """The properties that a model can violate."""

    WRONG_VALUE = "a rank takes a word that is not of this call"
    EARLY_FINISH = "a rank finishes a call that another has not started"
    BROKEN_CLAIM = "something the protocol promises does not hold"
    DEADLOCK = "nothing can happen, and not everybody is done"
    NO_END = "a state from which no end can be reached"


class Model(Protocol):
    """A transition system. States are hashable and compared by value."""

    def initial(self) -> Hashable: ...

    def steps(self, state: Any) -> Iterable[tuple[Any, Hashable]]:
        """Return the possible next steps as (label, successor). Labels are turned into text only for a trace."""
        ...

    def fault(self, state: Any) -> tuple[Kind, str] | None:
        """Return the safety property that this state violates, if any."""
        ...

    def is_final(self, state: Any) -> bool:
        """Return whether the model may end in this state."""
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
    """The outcome of an exploration: how many states and steps were visited, and the violation.

    ``violation`` is None if all reachable states were visited without one.
    """

    states: int
    steps: int
    violation: Violation | None


def _without_collections(fn: Callable[..., Result]) -> Callable[..., Result]:
    """Collect no garbage in calls of ``fn``, which keeps nearly all that it makes: a third of its time went there."""

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Result:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return fn(*args, **kwargs)
        finally:
            if enabled:
                gc.enable()

    return called


@_without_collections
def explore(model: Model, max_states: int = 1_000_000) -> Result:
    """Visit the states breadth first, so that no trace to a violation is shorter than the one returned."""
    initial = model.initial()
    index_of = {initial: 0}
    states: list[Any] = [initial]
    reached_from: list[tuple[int, Any]] = [(-1, "")]  # by state: where it was first reached from, and by which step
    predecessors: list[list[int]] = [[]]  # by state: all states with a step to it
    final: list[int] = []
    steps = 0

    def violated(kind: Kind, message: str, index: int) -> Result:
        trace: list[str] = []
        while index > 0:
            index, label = reached_from[index]
            trace.append(str(label))
        return Result(len(states), steps, Violation(kind, message, tuple(reversed(trace))))

    current = 0
    while current < len(states):
        state = states[current]
        fault = model.fault(state)
        if fault:
            return violated(*fault, current)
        is_final = model.is_final(state)
        if is_final:
            final.append(current)
        stuck = True
        for label, next_state in model.steps(state):
            stuck = False
            steps += 1
            successor = index_of.get(next_state)
            if successor is None:
                successor = index_of[next_state] = len(states)
                if successor >= max_states:
                    raise TooManyStatesError(f"more than {max_states} states")
                states.append(next_state)
                reached_from.append((current, label))
                predecessors.append([])
            predecessors[successor].append(current)
        if stuck and not is_final:
            return violated(Kind.DEADLOCK, str(state), current)
        current += 1

    ends = set(final)
    while final:
        for earlier in predecessors[final.pop()]:
            if earlier not in ends:
                ends.add(earlier)
                final.append(earlier)
    for current in range(len(states)):
        if current not in ends:
            return violated(Kind.NO_END, str(states[current]), current)
    return Result(len(states), steps, None)
