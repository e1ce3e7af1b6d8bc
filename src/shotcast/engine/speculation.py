"""Speculative decoding: tokens are proposed, and one step of the model verifies several of them.

A step computes a sequence's last token and its proposals together, and samples after each of them
(:class:`~shotcast.engine.sampler.Sampler`). Proposals come from the text so far, or from a smaller model on the ranks
(:mod:`shotcast.engine.draft_model`). Where they do not pay, steps go on without them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shotcast.engine.config import EngineConfig
from shotcast.engine.sequence import SequenceState

TRIAL_STEPS, KEPT_STEPS = 12, 256
"""Steps for which the slower way is tried, and those between two trials."""
SETTLING_STEPS = 2
"""Steps after a change of ways that are not counted."""


def num_accepted(proposals: Sequence[int], sampled: Sequence[int]) -> int:
    """Return how many of the first proposals equal the tokens that were sampled in their places."""
    pairs = enumerate(zip(proposals, sampled, strict=False))
    return next((place for place, (proposal, token) in pairs if proposal != token), len(proposals))


@dataclass(frozen=True, slots=True)
class NgramProposer:
    """Proposes what followed the last tokens of a sequence where they occurred before, most recently.

    Longer n-grams are looked for first. Where an occurrence ends within the last tokens, the text repeats, and the
    proposals go on as it does.
    """

    longest: int  # n-grams, in tokens
    shortest: int

    def propose(self, sequence: SequenceState, count: int) -> list[int]:
        """Return ``count`` proposals, or none."""
        tokens, history = sequence.tokens, sequence.history
        size = history.itemsize
        history.extend(tokens[len(history) :])
        text = memoryview(history).cast("B").tobytes()
        for length in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            ngram, place = text[-size * length :], len(text) - size
            while (place := text.rfind(ngram, 0, place)) >= 0 and place % size:
                place += size * length - 1
            if place >= 0:
                follows = tokens[place // size + length :]
                return [follows[number % len(follows)] for number in range(count)]
        return []


class RankProposer:
    """Proposes what the ranks' draft model reported with the last token of a sequence."""

    def propose(self, sequence: SequenceState, count: int) -> Sequence[int]:
        """Return up to ``count`` of the reported tokens."""
        return sequence.reported[:count]


@dataclass(slots=True)
class _Measured:
    """The speed of both ways of decoding about so many sequences."""

    speculates: bool = True  # the way of the present steps
    trial: bool = True  # whether that way is only tried
    steps: int = 0  # in the present way, which took ``seconds`` for ``tokens``
    tokens: float = 0.0
    seconds: float = 0.0
    # tokens of a sequence a second, by way, when it was last measured
    rates: dict[bool, float] = field(default_factory=dict)


class MeasuringPolicy:
    """Decodes with proposals where that has been faster, measured for numbers of sequences within a power of two.

    The first steps have proposals, and the next ones have none. From then on the faster way is taken, and the other
    tried again now and then, since texts change. What a step takes, what is accepted, and what is lost since no step
    with proposals can be planned ahead, all count.
    """

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}

    def speculates(self, running: int) -> bool:
        """Return whether the next step with ``running`` sequences has proposals."""
        return self._measured.setdefault(running.bit_length(), _Measured()).speculates

    def record(self, running: int, speculated: bool, tokens: float, seconds: float) -> None:
        """Take note of a step: whether it was to have proposals, and its tokens of a sequence."""
        measured = self._measured.setdefault(running.bit_length(), _Measured())
        if speculated != measured.speculates:
            return  # it was planned before the way changed
        measured.steps += 1
        if measured.steps <= SETTLING_STEPS:
            return
        measured.tokens += tokens
        measured.seconds += seconds
        if measured.steps < SETTLING_STEPS + (TRIAL_STEPS if measured.trial else KEPT_STEPS):
            return
        rates = measured.rates
        rates[speculated] = measured.tokens / max(measured.seconds, 1e-9)
        measured.steps, measured.tokens, measured.seconds = 0, 0.0, 0.0
        if measured.trial and len(rates) == 2:
            measured.speculates, measured.trial = rates[True] > rates[False], False
        else:
            measured.speculates, measured.trial = not speculated, True


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding, as the scheduler plans it."""

    count: int  # proposals of a sequence at most
    most: int  # proposals of a step at most
    proposer: NgramProposer | RankProposer  # where they come from
    policy: MeasuringPolicy = field(default_factory=MeasuringPolicy)  # when steps have any
    clock: Callable[[], float] = time.perf_counter  # seconds, by which steps are measured

    @classmethod
    def of(cls, config: EngineConfig) -> Speculation | None:
        """Return the speculation of an engine; None if it has none."""
        if (found := config.speculation) is None:
            return None
        lengths = found.prompt_lookup_max, found.prompt_lookup_min
        proposer = RankProposer() if found.model else NgramProposer(*lengths)
        return cls(found.num_speculative_tokens, config.max_proposals, proposer)

    @property
    def by_ranks(self) -> bool:
        """Return whether the ranks propose, where plans ask them to."""
        return isinstance(self.proposer, RankProposer)
