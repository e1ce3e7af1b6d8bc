"""Smaller programs that are still legal, for one that fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from program_steps import (
    Capture,
    Collective,
    Fill,
    HostSleep,
    IllegalError,
    Messages,
    Product,
    Program,
    Replay,
    Shorten,
    Slot,
    Step,
    StreamSleep,
    Wait,
    check,
    every_step,
)


def shrink(program: Program, fails: Callable[[Program], bool], seconds: float) -> Program:
    """Return the smallest program found in that time for which ``fails`` is true, as it is for ``program``."""
    until = time.monotonic() + seconds
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(program):
            if time.monotonic() > until:
                return program
            if candidate != program and is_legal(candidate) and fails(candidate):
                program, smaller = candidate, True
                break
    return program


def is_legal(program: Program) -> bool:
    try:
        check(program)
    except IllegalError:
        return False
    return True


def _smaller(program: Program) -> Iterator[Program]:
    """Yield programs that are smaller by much, then by less."""
    steps = program.steps
    count = len(steps)
    while count:
        for start in range(0, len(steps), count):
            yield tidy(replace(program, steps=steps[:start] + steps[start + count :]))
        count //= 2
    for index, step in enumerate(steps):
        for other in _smaller_steps(step):
            yield tidy(replace(program, steps=(*steps[:index], other, *steps[index + 1 :])))
    for factor in (64, 8, 2):
        yield _scaled(program, factor)
    yield replace(program, steps=tuple(_on_first_stream(step) for step in steps))


def tidy(program: Program) -> Program:
    """Leave out waits for calls that are gone, replays of graphs that are gone, and what nothing uses."""
    labels = {one.label for one in program.steps if isinstance(one, Collective | Messages)}
    graphs = {one.graph for one in program.steps if isinstance(one, Capture)}
    steps = [
        step
        for step in program.steps
        if not (isinstance(step, Wait) and step.label not in labels)
        and not (isinstance(step, Replay) and step.graph not in graphs)
    ]
    used = sorted({slot for step in every_step(steps) for slot in slots_of(step)}) or [0]
    groups = sorted({step.group for step in every_step(steps) if isinstance(step, Collective | Messages)}) or [0]

    def renumber(step: Step) -> Step:
        changes: dict[str, Any] = {}
        if isinstance(step, Capture):
            changes["steps"] = tuple(renumber(one) for one in step.steps)
        if isinstance(step, Fill | Shorten):
            changes["slot"] = used.index(step.slot)
        if isinstance(step, Collective | Messages):
            changes |= {"slots": tuple(map(used.index, step.slots)), "group": groups.index(step.group)}
        return replace(step, **changes) if changes else step

    return replace(
        program,
        groups=tuple(program.groups[group] for group in groups),
        slots=tuple(program.slots[slot] for slot in used),
        steps=tuple(renumber(step) for step in steps),
    )


def slots_of(step: Step) -> tuple[int, ...]:
    """Return the slots that a step names."""
    return (step.slot,) if isinstance(step, Fill | Shorten) else getattr(step, "slots", ())


def _smaller_steps(step: Step) -> Iterator[Step]:
    if isinstance(step, Capture):
        for index in range(len(step.steps)):
            gone = step.steps[index]
            label = getattr(gone, "label", 0)
            yield replace(
                step,
                steps=tuple(
                    one for one in step.steps if one is not gone and not (isinstance(one, Wait) and one.label == label)
                ),
            )
    if isinstance(step, Collective | Messages) and step.label:
        yield replace(step, label=0, keep=True)  # its waits go
    if isinstance(step, Wait) and step.rank >= 0:
        yield replace(step, rank=-1)
    if isinstance(step, Messages) and len(step.pairs) > 1:
        for pair in step.pairs:
            yield replace(step, pairs=tuple(one for one in step.pairs if one != pair))
    if isinstance(step, Collective) and step.op.endswith("_coalesced") and len(step.slots) > 2:
        yield replace(step, slots=step.slots[:2])
    if isinstance(step, HostSleep) and step.ms > 1:
        yield replace(step, ms=round(step.ms / 4, 1))
    if isinstance(step, StreamSleep) and step.cycles > 100_000:
        yield replace(step, cycles=step.cycles // 4)
    if isinstance(step, Product) and step.size > 64:
        yield replace(step, size=step.size // 2)


def _scaled(program: Program, factor: int) -> Program:
    def divided(step: Step) -> Step:
        if isinstance(step, Capture):
            return replace(step, steps=tuple(divided(one) for one in step.steps))
        if isinstance(step, Collective) and step.sizes:
            return replace(step, sizes=tuple(tuple(size // factor for size in row) for row in step.sizes))
        if isinstance(step, Collective | Messages) and step.slots:
            return replace(step, elements=max(1, step.elements // factor))
        return step

    most = max(len(group.ranks) for group in program.groups)
    slots = tuple(Slot(max(min(most, slot.elements), slot.elements // factor), slot.dtype) for slot in program.slots)
    return replace(program, slots=slots, steps=tuple(divided(step) for step in program.steps))


def _on_first_stream(step: Step) -> Step:
    return replace(step, stream=0) if getattr(step, "stream", 0) else step
