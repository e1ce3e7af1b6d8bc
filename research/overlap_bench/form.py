"""A form: one way to run products and messages, by whatever library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from overlap_bench.steps import Steps, library_product
from overlap_bench.timeline import Timeline

Begin = Callable[[int], Callable[[], Any]]
"""Begins the message of a step, and returns what waits for it."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way to run all steps once.

    Attributes:
        run: does it. Every rank calls it.
        steps: the memory that it uses.
        whole: it runs products and messages, so its results can be checked.
        in_place: the messages are reduced where they are.
        fused: product and message are one call, which need not leave the memory between them as it would be.
        average: reductions are divided by the number of ranks, so values stay as large when they are repeated.
        timeline: does it once, and returns when each step ran; None where that is not known.
    """

    run: Callable[[], Any]
    steps: Steps
    whole: bool = True
    in_place: bool = False
    fused: bool = False
    average: bool = False
    timeline: Callable[[], Timeline] | None = None

    def wrong(self) -> str:
        """Return what is wrong with the last results; empty if they are right. Collective."""
        return self.steps.wrong(self.in_place, self.average, self.fused) if self.whole else ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A form that may not be there on this machine.

    Attributes:
        name: the name of its row.
        build: returns the form. Collective; raises where there is none.
        own: it is ours, so a wrong result ends the measurement.
    """

    name: str
    build: Callable[[], Form]
    own: bool = False


Candidates = Iterator[Candidate]


def run_steps(steps: Steps, begin: Begin, overlap: bool, product: Callable[..., object] = library_product) -> None:
    """Run products on the current stream or thread, and messages by a library that begins them and continues."""
    count = steps.config.steps
    if not steps.config.gathers_first:
        waits = []
        for number in range(count):
            steps.multiply(number, product)
            waits.append(begin(number))
            if not overlap:
                waits.pop()()
        for wait in waits:
            wait()
        return
    wait = begin(0)
    for number in range(count):
        wait()
        if overlap and number + 1 < count:
            wait = begin(number + 1)
        steps.multiply(number, product)
        if not overlap and number + 1 < count:
            wait = begin(number + 1)


def in_one(steps: Steps, multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Form:
    """Return a form of calls that each multiply and communicate: of the left operand, or this rank's rows, and weights.

    Each returns what comes last of the two.
    """
    own = steps.elsewhere(lambda count, dtype: torch.empty(count, dtype=dtype, device=steps.comm.device))
    rows, _, depth = steps.config.gemm
    first = steps.config.gathers_first

    def run() -> None:
        for number in range(steps.config.steps):
            if first:
                own.products[number] = multiply(own.sent[number].view(rows // steps.comm.world_size, depth), own.b)
            else:
                own.received[number] = multiply(own.left(number), own.b).view(-1)

    return Form(run, own, fused=True)
