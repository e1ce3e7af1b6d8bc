"""Speculative decoding: one step of the model verifies several proposed tokens.

A step computes a sequence's last token and its proposals together, and samples after each of them
(:class:`~shotcast.engine.sampler.Sampler`). Proposals come from the text so far, or from a smaller model on the ranks
(:mod:`shotcast.engine.draft_model`). If they do not pay, steps continue without them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shotcast.engine.config import EngineConfig
from shotcast.engine.sequence import SequenceState

TRIAL_STEPS, KEPT_STEPS = 12, 256
"""The number of steps for which the slower mode is tried, and between two trials."""
FORESEEN_STEPS = 4
"""The number of steps without proposals after which the benefit of proposals is known."""
ASSUMED_COST, LEAST_GAIN = 1.25, 1.05
"""The assumed relative time of a step with proposals before it is measured; the least gain worth a trial."""
SETTLING_STEPS = 2
"""Steps after a change of mode that are not counted."""


def num_accepted(proposals: Sequence[int], sampled: Sequence[int]) -> int:
    """Return how many of the first proposals equal the sampled tokens."""
    pairs = enumerate(zip(proposals, sampled, strict=False))
    return next((place for place, (proposal, token) in pairs if proposal != token), len(proposals))


@dataclass(frozen=True, slots=True)
class NgramProposer:
    """Proposes the tokens that followed the most recent earlier occurrence of a sequence's last tokens.

    Longer n-grams are tried first. If an occurrence ends within the last tokens, the text repeats, and the proposals
    continue the repetition.
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
    """Proposes the tokens that the ranks' draft model reported with the last token of a sequence."""

    def propose(self, sequence: SequenceState, count: int) -> Sequence[int]:
        """Return up to ``count`` of the reported tokens."""
        return sequence.reported[:count]


@dataclass(slots=True)
class _Measured:
    """The speed of decoding with and without proposals, for about this many sequences."""

    speculates: bool = True  # the way of the present steps
    trial: bool = True  # whether that way is only tried
    steps: int = 0  # in the present way, which took ``seconds`` for ``tokens``
    tokens: float = 0.0
    seconds: float = 0.0
    # tokens of a sequence a second, by way, when it was last measured
    rates: dict[bool, float] = field(default_factory=dict)


class MeasuringPolicy:
    """Decodes with proposals if that has been faster, measured for numbers of sequences within a power of two.

    The first steps have proposals, and the next ones have none. From then on the faster mode is used, and the other is
    retried occasionally, since texts change. The measurement includes step time, accepted tokens, and the loss because
    steps with proposals cannot be planned ahead.
    """

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}

    def speculates(self, running: int) -> bool:
        """Return whether the next step with ``running`` sequences has proposals."""
        return self._measured.setdefault(running.bit_length(), _Measured()).speculates

    def record(self, running: int, speculated: bool, tokens: float, seconds: float) -> None:
        """Record a step: whether it was meant to have proposals, and its tokens per sequence."""
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


@dataclass(slots=True)
class _Foreseen:
    """Step times of both modes and the expected benefit of proposals, for about this many sequences."""

    speculates: bool = False
    steps: int = 0  # since the way changed
    failed: int = 0  # steps before the next trial, as one gave less than was foreseen
    tokens: list[float] = field(default_factory=list)  # of a sequence, in each of the last steps
    seconds: list[float] = field(default_factory=list)
    step_s: dict[bool, float] = field(default_factory=dict)  # the median of the last steps, by way
    foreseen: list[float] = field(default_factory=list)  # tokens of a sequence that steps would have given

    @property
    def cost(self) -> float:
        """The time of a step with proposals, relative to one without."""
        return self.step_s[True] / self.step_s[False] if True in self.step_s else ASSUMED_COST


class ForesightPolicy:
    """Decodes with n-gram proposals if they pay, for numbers of sequences within a power of two.

    Which proposals would have been accepted is known afterwards, even without a step that has them. So they are tried
    only if they promise more than they cost, and dropped as soon as they yield less.
    """

    def __init__(self) -> None:
        self._foreseen: dict[int, _Foreseen] = {}

    def _of(self, running: int) -> _Foreseen:
        return self._foreseen.setdefault(running.bit_length(), _Foreseen())

    def speculates(self, running: int) -> bool:
        """Return whether the next step with ``running`` sequences has proposals."""
        return self._of(running).speculates

    def record(self, running: int, speculated: bool, tokens: float, seconds: float) -> None:
        """Record a step: whether it was meant to have proposals, and its tokens per sequence."""
        found = self._of(running)
        if speculated != found.speculates:
            return  # it was planned before the way changed
        found.steps += 1
        found.failed = max(0, found.failed - 1)
        if found.steps <= SETTLING_STEPS:
            return
        found.tokens.append(tokens)
        found.seconds.append(seconds)
        if len(found.seconds) < TRIAL_STEPS:
            return
        found.step_s[speculated] = statistics.median(found.seconds)
        gain = statistics.fmean(found.tokens) / found.cost
        found.tokens, found.seconds = [], []
        if speculated and gain < 1:
            found.failed = KEPT_STEPS if found.steps <= SETTLING_STEPS + TRIAL_STEPS else 0
            found.speculates, found.steps, found.foreseen = False, 0, []

    def foresee(self, running: int, tokens: float) -> None:
        """Record how many tokens a step with proposals would have yielded for a sequence."""
        found = self._of(running)
        found.foreseen.append(tokens)
        if len(found.foreseen) < FORESEEN_STEPS:
            return
        gain = statistics.fmean(found.foreseen) / found.cost
        found.foreseen = []
        if gain > LEAST_GAIN and not found.speculates and not found.failed and False in found.step_s:
            found.speculates, found.steps, found.tokens, found.seconds = True, 0, [], []


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding from the scheduler's view."""

    count: int  # proposals of a sequence at most
    most: int  # proposals of a step at most
    proposer: NgramProposer | RankProposer  # where they come from
    policy: MeasuringPolicy | ForesightPolicy = field(default_factory=MeasuringPolicy)  # when steps have any
    clock: Callable[[], float] = time.perf_counter  # seconds, by which steps are measured

    @classmethod
    def of(cls, config: EngineConfig) -> Speculation | None:
        """Return the speculation of an engine; None if disabled."""
        if (found := config.speculation) is None:
            return None
        lengths = found.prompt_lookup_max, found.prompt_lookup_min
        count, most = found.num_speculative_tokens, config.max_proposals
        if found.model:
            return cls(count, most, RankProposer(), MeasuringPolicy())
        return cls(count, most, NgramProposer(*lengths), ForesightPolicy())

    def foresee(self, sequence: SequenceState, running: int) -> None:
        """Compare hypothetical proposals for a sequence with its tokens since, in a step without proposals."""
        if not isinstance(self.policy, ForesightPolicy):
            return
        start, proposals = sequence.guess
        known = sequence.tokens[start:]
        accepted = num_accepted(proposals, known)
        if accepted < min(len(known), len(proposals)) or len(known) > len(proposals):
            if start:
                self.policy.foresee(running, 1 + accepted * min(1.0, self.most / (self.count * running)))
            sequence.guess = len(sequence.tokens), tuple(self.proposer.propose(sequence, self.count))

    @property
    def by_ranks(self) -> bool:
        """Return whether the ranks make the proposals that plans request."""
        return isinstance(self.proposer, RankProposer)
