"""The results of a program, by plain PyTorch on the values of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from program_steps import (
    FACTOR,
    SMALL,
    Capture,
    Collective,
    Fill,
    Messages,
    Program,
    Replay,
    Shorten,
    Slot,
    Step,
    Wait,
    written,
)

Values = list[list[torch.Tensor | None]]
"""The values of each rank's slots; None where the library leaves them open."""


def pattern(slot: Slot, number: int, rank: int, value: int, device: torch.device) -> torch.Tensor:
    """Return the values of a slot of a rank after a fill: neighbours, ranks, slots and fills differ."""
    i = torch.arange(slot.elements, dtype=torch.int32, device=device)
    i = i * 3 + torch.div(i, 7, rounding_mode="floor") + torch.div(i, 1021, rounding_mode="floor")
    return (i + rank * 2 + number + value).remainder_(SMALL).to(getattr(torch, slot.dtype))


def shorten_(x: torch.Tensor) -> None:
    """Make values whole and small, in place."""
    if x.is_floating_point():
        x.floor_()
    x.remainder_(SMALL)


def reduced(xs: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    """Return the reduction of tensors, in their dtype."""
    if reduction == "premul":
        xs = [x * FACTOR for x in xs]
    total = xs[0].clone()
    for x in xs[1:]:
        if reduction == "max":
            total = torch.maximum(total, x)
        elif reduction == "min":
            total = torch.minimum(total, x)
        elif reduction == "product":
            total *= x
        else:
            total += x
    if reduction == "avg":
        total = total / len(xs) if total.is_floating_point() else torch.div(total, len(xs), rounding_mode="trunc")
    return total


class Expected:
    """The values of all ranks, step by step.

    Attributes:
        kept: for each step that keeps its results, and each slot of these, the values of a rank.
    """

    def __init__(self, program: Program, rank: int, device: torch.device):
        self.program, self.rank = program, rank
        every = range(program.world_size)
        self.values: Values = [[pattern(slot, s, r, 0, device) for s, slot in enumerate(program.slots)] for r in every]
        self.kept: list[torch.Tensor | None] = []
        for step in program.steps:
            self.make(step)
            if getattr(step, "keep", False) and concerns(step, rank, program):
                for slot in written(step, program.steps):
                    value = self.values[rank][slot]
                    self.kept.append(None if value is None else value.clone())

    def make(self, step: Step) -> None:
        if isinstance(step, Capture):
            for one in step.steps:
                self.make(one)
        elif isinstance(step, Replay):
            self.make(next(s for s in self.program.steps if isinstance(s, Capture) and s.graph == step.graph))
        elif isinstance(step, Fill):
            for rank, slots in enumerate(self.values):
                slot = self.program.slots[step.slot]
                slots[step.slot] = pattern(slot, step.slot, rank, step.value, self.device_of())
        elif isinstance(step, Shorten):
            for rank in range(self.program.world_size):
                shorten_(self.of(rank, step.slot))
        elif isinstance(step, Messages):
            self.messages(step)
        elif isinstance(step, Collective) and step.op != "barrier":
            self.collective(step)

    def device_of(self) -> torch.device:
        return next(x.device for slots in self.values for x in slots if x is not None)

    def of(self, rank: int, slot: int) -> torch.Tensor:
        found = self.values[rank][slot]
        assert found is not None, "the rules let no step read an open value"
        return found

    def write(self, rank: int, slot: int, part: torch.Tensor, start: int = 0) -> None:
        """Write from an element on; what was open is known if all of it is written."""
        old = self.values[rank][slot]
        if len(part) == self.program.slots[slot].elements:
            self.values[rank][slot] = part.clone()
        elif old is not None:
            old[start : start + len(part)] = part

    def messages(self, step: Messages) -> None:
        ranks, m = self.program.groups[step.group].ranks, step.elements
        source, target = step.slots
        for a, b in step.pairs:
            self.write(ranks[b], target, self.of(ranks[a], source)[b * m : (b + 1) * m].clone(), a * m)

    def collective(self, step: Collective) -> None:
        ranks, m, root = self.program.groups[step.group].ranks, step.elements, step.root
        if step.op in ("all_reduce", "all_reduce_coalesced", "broadcast", "reduce"):
            for slot in step.slots:
                if step.op == "broadcast":
                    result = self.of(ranks[root], slot)[:m].clone()
                else:
                    result = reduced([self.of(rank, slot)[:m] for rank in ranks], step.reduction)
                for place, rank in enumerate(ranks):
                    if step.op != "reduce" or place == root:
                        self.write(rank, slot, result)
                    else:
                        self.values[rank][slot] = None
            return
        for source, target in zip(step.slots[::2], step.slots[1::2], strict=True):
            if step.op == "scatter":
                whole = self.of(ranks[root], source).clone()
                for place, rank in enumerate(ranks):
                    self.write(rank, target, whole[place * m : (place + 1) * m])
                continue
            xs = [self.of(rank, source) for rank in ranks]
            for place, rank in enumerate(ranks):
                if step.op.startswith("reduce_scatter"):
                    part = slice(place * m, (place + 1) * m)
                    self.write(rank, target, reduced([x[part] for x in xs], step.reduction))
                elif step.op.startswith("all_gather") or (step.op == "gather" and place == root):
                    self.write(rank, target, torch.cat([x[:m] for x in xs]))
                elif step.op == "all_to_all":
                    self.write(rank, target, torch.cat([x[place * m : (place + 1) * m] for x in xs]))
                elif step.op == "all_to_all_uneven":
                    parts = [x[: sum(row)].split(row)[place] for x, row in zip(xs, step.sizes, strict=True)]
                    self.write(rank, target, torch.cat(parts))


def concerns(step: Step, rank: int, program: Program) -> bool:
    """Return whether a rank has anything to do in a step."""
    if isinstance(step, Collective | Messages):
        ranks = program.groups[step.group].ranks
        if isinstance(step, Messages):
            ranks = tuple(ranks[place] for pair in step.pairs for place in pair)
        return rank in ranks
    if isinstance(step, Wait):
        alike = [one for one in program.steps if getattr(one, "label", 0) == step.label]  # the call, and its waits
        waited = any(one.rank == rank for one in alike[1 : alike.index(step)])
        return step.rank in (-1, rank) and not waited and concerns(alike[0], rank, program)
    return getattr(step, "rank", rank) == rank
