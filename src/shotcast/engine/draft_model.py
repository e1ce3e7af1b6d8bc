"""A smaller model that proposes tokens, on the ranks of the last pipeline stage.

It computes each step after the model, for the same tokens, in a cache with the same blocks. So the scheduler's plans
for prefixes, preemption and blocks also apply to it. Then it decodes the requested proposals, one step for each. It
skips steps in which proposals do not pay, and catches up before the next proposals.

It samples with the same noise as the model at each position, so both often pick the same token even if many are likely.
It ignores penalties, masks and biases.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from shotcast.engine.model_runner import AsyncModelRunnerOutput, Drafted, ModelRunner
from shotcast.engine.sampling_params import SamplingParams
from shotcast.engine.speculation import num_accepted
from shotcast.engine.step_plan import INVALID_TOKEN, PENDING_TOKEN, ScheduledSequence, StepPlan


class _Start(NamedTuple):
    """A sequence to make proposals for."""

    place: int  # its place among the sequences of the plan that sample
    slot: int
    token: int  # its last one
    position: int  # that of ``token``
    accepted: int  # how many proposals the step has accepted
    wanted: int  # how many proposals are made


class DraftModel:
    """Proposes tokens after each step that asks for them. Collective among the ranks of the last stage.

    Args:
        runner: runs the smaller model, with as many slots and blocks as the model has.
        vocab: the tokens of the model. Others are not proposed; tokens beyond the smaller model's vocabulary, which may
            be padded less, map to its last token.
    """

    def __init__(self, runner: ModelRunner, vocab: int):
        self.runner, self._vocab, self._last = runner, vocab, runner.vocab - 1

    def propose(self, plan: StepPlan, output: AsyncModelRunnerOutput | None, last_tokens: torch.Tensor) -> Drafted:
        """Compute a plan that the model has computed, and the proposals that it asks for. Returns the outputs of the
        decoding steps, for :meth:`proposals`.

        Args:
            output: what the model has sampled, which this waits for if the plan asks for proposals.
            last_tokens: the token that the model sampled last for each slot.
        """
        runner, sampler = self.runner, self.runner.sampler
        assert sampler is not None
        parts = [self._computed(sequence) for sequence in plan.sequences]
        # The blocks of a plan may be those of other tokens than this model computes, which a graph takes for theirs.
        others = [part for sequence, part in zip(plan.sequences, parts, strict=True) if part.tokens != sequence.tokens]
        runner.leave_out(StepPlan(plan.number, tuple(others)))
        told = {part.slot for part in others}
        parts = [part._replace(is_new=False, blocks=()) if part.slot in told else part for part in parts if part.tokens]
        runner.execute(StepPlan(plan.number, tuple(sorted(parts, key=lambda part: len(part.tokens) > 1))))
        sampling = [sequence for sequence in plan.sequences if sequence.do_sample]
        for sequence in sampling:
            sampler.advance(sequence.slot, sequence.accepted + 1)
        made: Drafted = []
        if plan.proposes:
            assert output is not None
            starts = self._starts(sampling, output.result().tokens)
            for start in starts:
                sampler.advance(start.slot, start.accepted)
            for number in range(max((start.wanted for start in starts), default=0)):
                going = [start for start in starts if number < start.wanted]
                step = StepPlan(plan.number, tuple(_decoded(start, number) for start in going))
                pending = runner.execute(step)
                assert pending is not None
                made.append((tuple(start.place for start in going), pending))
            for start in starts:
                sampler.advance(start.slot, -start.accepted - start.wanted)
        torch.clamp(last_tokens, max=self._last, out=runner.last_tokens)
        return made

    def _computed(self, sequence: ScheduledSequence) -> ScheduledSequence:
        """Return the part of a planned sequence that the smaller model computes; no tokens if it skips the sequence."""
        first, tokens = (sequence.num_computed, ()) if sequence.drafted is None else sequence.drafted
        if sequence.drafted is not None and first + len(tokens) == sequence.num_computed:
            tokens += sequence.tokens
        if self._last + 1 < self._vocab:
            tokens = tuple(min(token, self._last) for token in tokens)
        params = sequence.params and _simplified(sequence.params)
        quiet = sequence._replace(do_sample=False, drafts=0, accepted=0, params=params, targets=None)
        return quiet._replace(num_computed=first, tokens=tokens)

    def _starts(self, sampling: list[ScheduledSequence], tokens: tuple[int, ...]) -> list[_Start]:
        starts, row = [], 0
        for index, sequence in enumerate(sampling):
            sampled = tokens[row : row + sequence.num_sampled]
            row += sequence.num_sampled
            accepted = num_accepted(sequence.proposals, sampled)
            position = sequence.num_computed + len(sequence.tokens) - sequence.drafts + accepted
            count = min(sequence.propose, self.runner.capacity(sequence.slot) - position)
            if count > 0 and sampled[accepted] != INVALID_TOKEN:
                token = min(sampled[accepted], self._last)
                starts.append(_Start(index, sequence.slot, token, position, accepted, count))
        return starts

    def proposals(self, drafted: Drafted) -> tuple[tuple[int, ...], ...]:
        """Wait for the result of :meth:`propose`, and return the proposals of each sequence that samples."""
        found: dict[int, list[int]] = {}
        for number, (indices, pending) in enumerate(drafted):
            for index, token in zip(indices, pending.result().tokens, strict=True):
                proposals = found.setdefault(index, [])
                if len(proposals) == number and 0 <= token < self._vocab:
                    proposals.append(token)
        return tuple(tuple(found.get(index, ())) for index in range(max(found, default=-1) + 1))


def _simplified(params: SamplingParams) -> SamplingParams:
    return replace(
        params,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias=(),
        allowed_token_ids=None,
        grammar=None,
        min_tokens=0,
        logprobs=None,
    )


def _decoded(start: _Start, number: int) -> ScheduledSequence:
    """Return the step in which a sequence samples its proposal of this number."""
    token = PENDING_TOKEN if number else start.token
    return ScheduledSequence(start.slot, start.position + number, (token,), (), False, True)
