"""What the scheduler tells every rank to compute in one step."""

from __future__ import annotations

from typing import NamedTuple

from shotcast.engine.requests import SamplingParams

PENDING = -1
"""In place of a token: the one that an earlier step draws for this sequence, which is not known yet."""
NO_TOKEN = -1
"""In place of a token that was drawn: there is none, as the logits are not numbers."""


class SequenceStep(NamedTuple):
    """A sequence's part of a step.

    Attributes:
        slot: the sequence's place in the ranks' tables, its own as long as it runs.
        start: tokens whose keys and values are in the cache already.
        tokens: to compute, the ones that follow these; a single PENDING for one that is being drawn.
        blocks: of the paged cache, to append to the slot's table; with ``fresh`` they are its table.
        fresh: the slot is new to this sequence: forget what it held.
        draws: the last of ``tokens`` is the last that is known: draw the next.
        params, request_id, output: with ``fresh``, how to draw, for whom, and what the output holds already (a sequence
            that was pre-empted comes with what it had drawn). Otherwise None, "" and ().
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    fresh: bool
    draws: bool
    params: SamplingParams | None = None
    request_id: str = ""
    output: tuple[int, ...] = ()


class StepPlan(NamedTuple):
    """One step: sequences that have one token to compute (decoding) first, then those with more (prefill).

    Attributes:
        stamped: on CUDA, if all sequences decode: take the time of it and of its communication.
    """

    number: int
    sequences: tuple[SequenceStep, ...]
    stamped: bool = False

    @property
    def tokens(self) -> int:
        return sum(len(sequence.tokens) for sequence in self.sequences)

    @property
    def draws(self) -> bool:
        """Whether any of its sequences does."""
        return any(sequence.draws for sequence in self.sequences)
