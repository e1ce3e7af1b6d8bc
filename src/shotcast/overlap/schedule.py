"""Schedules: which communication may run during which computation. Pure data, without torch.

A schedule is a list of steps in an order in which they could run one after another. Computation has one lane,
communication has one or more, and the steps of a lane run in list order. So only waits between lanes need events, and
:meth:`Schedule.order` finds the minimum number of them.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from shotcast.errors import ConfigError

COMPUTE_LANE = 0
"""The lane of computation; communication lanes follow it."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a schedule.

    Attributes:
        name: a unique name.
        after: the names of earlier steps whose results it needs.
    """

    name: str
    after: tuple[str, ...] = ()


class Compute(Step):
    """A step of computation; arguments as for :class:`Step`."""

    __slots__ = ()


class Communicate(Step):
    """A step of communication, which every rank runs; arguments as for :class:`Step`."""

    __slots__ = ()


class Order(NamedTuple):
    """The lanes of the steps, and the waits between lanes."""

    lanes: Mapping[str, int]  # the lane of each step
    waits: Mapping[str, tuple[str, ...]]  # the steps of other lanes that each step waits for, if any
    # the steps that begin their lane and wait for nothing in the schedule: what came before it comes first
    first: frozenset[str]
    last: tuple[str, ...]  # the steps of communication that nothing has waited for by the end

    @property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Every wait within the schedule: a step, and the step of another lane that it waits for."""
        return tuple((step, awaited) for step, names in self.waits.items() for awaited in names)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule of computation and communication steps.

    Args:
        steps: the steps, each after the ones that it needs.

    Raises:
        ConfigError: two steps have the same name, or one needs an unknown or later step.
    """

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        names = [step.name for step in self.steps]
        known: set[str] = set()
        for step in self.steps:
            if step.name in known:
                raise ConfigError(f"two steps of a schedule are named {step.name!r}")
            for name in step.after:
                if name not in names:
                    raise ConfigError(f"step {step.name!r} needs {name!r}, which is no step of the schedule")
                if name not in known:
                    raise ConfigError(
                        f"step {step.name!r} needs {name!r}, which comes no earlier; list steps in an order in which "
                        "they can run one after another"
                    )
            known.add(step.name)

    @property
    def digest(self) -> str:
        """A text that is equal for equal schedules, for ranks to compare."""
        steps = [[type(step).__name__, *asdict(step).values()] for step in self.steps]
        return hashlib.sha256(json.dumps(steps).encode()).hexdigest()[:16]

    def order(self, lanes: int = 1) -> Order:
        """Return the lane and the waits of each step, with ``lanes`` lanes of communication.

        Communication steps take turns on the lanes. Waits implied by others are omitted.
        """
        if lanes < 1:
            raise ConfigError(f"a schedule has 1 lane of communication or more, not {lanes}")
        return _order(self, lanes)


@functools.lru_cache(maxsize=256)
def _order(schedule: Schedule, lanes: int) -> Order:
    lane_of: dict[str, int] = {}
    waits: dict[str, tuple[str, ...]] = {}
    first: set[str] = set()
    position: dict[str, int] = {}
    done = [[0] * (lanes + 1) for _ in range(lanes + 1)]  # steps of each lane that are over for who runs next in a lane
    over: dict[str, list[int]] = {}  # the same for who has waited for a step
    turns = 0
    for number, step in enumerate(schedule.steps):
        lane = COMPUTE_LANE
        if isinstance(step, Communicate):
            lane, turns = 1 + turns % lanes, turns + 1
        seen, awaited = done[lane], []
        begins = not any(seen)
        for name in sorted(step.after, key=lambda name: position[name], reverse=True):
            if seen[lane_of[name]] < over[name][lane_of[name]]:
                awaited.append(name)
                seen = [max(pair) for pair in zip(seen, over[name], strict=True)]
        if awaited:
            waits[step.name] = tuple(awaited)
        elif begins and lane != COMPUTE_LANE:
            first.add(step.name)
        lane_of[step.name], position[step.name] = lane, number
        done[lane] = over[step.name] = [count + (other == lane) for other, count in enumerate(seen)]
    last = []
    seen = done[COMPUTE_LANE]
    for step in reversed(schedule.steps):
        lane = lane_of[step.name]
        if lane != COMPUTE_LANE and seen[lane] < over[step.name][lane]:
            last.append(step.name)
            seen = [max(pair) for pair in zip(seen, over[step.name], strict=True)]
    return Order(lane_of, waits, frozenset(first), tuple(last))


# -- builders ---------------------------------------------------------------------------------------------------------


def chain(count: int) -> Schedule:
    """Communicate each result during the next computation: consecutive products, or the chunks of one product."""
    pairs = ((_compute(i), _communicate(i, (f"compute {i}",))) for i in _counted(count))
    return Schedule(tuple(step for pair in pairs for step in pair))


def split(layers: int, parts: int = 2) -> Schedule:
    """Communicate the result of one part of a batch during another part's layer.

    Each layer of a part needs the communicated result of its previous layer. The steps of layer 3, part 1 are ``compute
    3.1`` and ``communicate 3.1``.
    """
    steps: list[Step] = []
    for layer in _counted(layers, "layers"):
        for part in _counted(parts, "parts"):
            before = () if layer == 0 else (f"communicate {layer - 1}.{part}",)
            name = f"{layer}.{part}"
            steps += [_compute(name, before), _communicate(name, (f"compute {name}",))]
    return Schedule(tuple(steps))


def beside() -> Schedule:
    """Communicate the result of ``compute 0`` during ``compute 1``, which does not need it."""
    return Schedule((_compute(0), _communicate(0, ("compute 0",)), _compute(1)))


def gather_and_scatter() -> Schedule:
    """Gather the input of ``compute 1`` during ``compute 0``, whose result is communicated during ``compute 1``."""
    gather, scatter = _communicate(0, ()), _communicate(1, ("compute 0",))
    return Schedule((gather, _compute(0), scatter, _compute(1, ("communicate 0",))))


def sequential(schedule: Schedule) -> Schedule:
    """Return the same steps, each of which waits for the previous one."""
    steps: list[Step] = []
    for step in schedule.steps:
        steps.append(replace(step, after=(steps[-1].name,) if steps else ()))
    return Schedule(tuple(steps))


def _compute(name: int | str, after: tuple[str, ...] = ()) -> Compute:
    return Compute(f"compute {name}", after)


def _communicate(name: int | str, after: tuple[str, ...]) -> Communicate:
    return Communicate(f"communicate {name}", after)


def _counted(count: int, what: str = "steps") -> Sequence[int]:
    if count < 1:
        raise ConfigError(f"a schedule has 1 or more {what}, not {count}")
    return range(count)
