"""The scheduler, which decides which tokens of which requests each step computes (continuous batching).

Decoding sequences come first, so that a long prompt does not hold them up. The rest of a step goes to prompts, one
chunk at a time, in order of arrival. All running sequences arrived before all waiting ones. When the cache is full, the
sequence that arrived last is preempted: it loses its blocks, waits, and its prompt and output are recomputed.

Plans take effect in order on every rank. So tokens that an outstanding plan writes count as written for later plans,
and blocks may pass from one sequence to another between two outstanding plans.

A plan may compute a decoding sequence's last token together with proposals for the next ones. The number accepted is
known when the results arrive, so no other plan contains the sequence until then. Later plans overwrite the keys and
values of rejected proposals; the blocks stay with the sequence.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice, repeat
from math import isnan
from typing import NamedTuple

from shotcast.engine.block_manager import BlockManager
from shotcast.engine.outputs import EngineCoreOutput, EngineStats, FinishReason, ModelRunnerOutput
from shotcast.engine.requests import Request, max_output_tokens
from shotcast.engine.sequence import SequenceState
from shotcast.engine.speculation import Speculation, num_accepted
from shotcast.engine.step_plan import INVALID_TOKEN, PENDING_TOKEN, PromptTargets, ScheduledSequence, StepPlan
from shotcast.errors import ConfigError

_INVALID_LOGITS = "the model's logits are not numbers (NaN or infinity)"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the scheduler."""

    max_num_seqs: int  # sequences that run at once, which is the number of slots of the ranks' tables
    max_num_batched_tokens: int  # tokens of a step at most
    block_size: int  # tokens of a cache block
    num_blocks: int  # blocks of the cache
    max_model_len: int  # tokens of a sequence, prompt and output together
    prefix_caching: bool = True  # reuse blocks that hold the same tokens instead of computing them
    # 1 plans a sequence's next step while its last token is still being sampled, so that one more step is enqueued than
    # the ranks are computing; 0 does not
    lookahead: int = 0
    pipeline: int = 1  # pipeline stages, which work on different plans at the same time
    eos: tuple[int, ...] = ()  # the model's end tokens
    max_prompt_step_tokens: int = 0  # tokens of a step at most while no sequence decodes; 0 for as many as otherwise


class _OutstandingPlan(NamedTuple):
    """A plan whose results have not arrived."""

    number: int
    # the sequences for which it samples, and the proposals that it verifies
    sampling: list[tuple[SequenceState, tuple[int, ...]]]
    # sequences whose prompts have targets in it, the place of the first one among the log-probabilities of the prompt,
    # and how many there are
    targets: list[tuple[SequenceState, int, int]]
    running: int = 0  # sequences that were running
    speculates: bool | None = None  # whether it was to have proposals; None if it is not to be measured
    begun_s: float = 0.0  # when it was made


class Scheduler:
    """Turns requests into plans, and the results of plans into outputs.

    Args:
        speculation: the source of proposals; None for no proposals.
    """

    def __init__(self, config: SchedulerConfig, speculation: Speculation | None = None):
        self.config = config
        self._speculation = speculation
        self._updated_s = 0.0
        self._asks_ranks = False  # for proposals, in the plan that is being made
        self._drafts = False  # the ranks' draft model computes that plan
        self._draft_room = 0  # tokens that it may compute besides, which it has left out before
        self._undrafted: set[int] = set()  # blocks that it has not computed, or not all of
        self._computes_prompts = False  # in the last plan
        self._blocks = BlockManager(config.num_blocks, config.block_size, config.prefix_caching)
        self._eos = frozenset(config.eos)
        # Both are in order of arrival.
        self._running: OrderedDict[str, SequenceState] = OrderedDict()
        self._waiting: OrderedDict[str, SequenceState] = OrderedDict()
        self._slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._outstanding: deque[_OutstandingPlan] = deque()
        self._next_plan = 0
        self._totals: Counter[str] = Counter()  # counters of :class:`EngineStats`

    @property
    def unfinished(self) -> int:
        """The number of requests that have not ended.

        Even if there are none, outstanding plans still need their :meth:`update`.
        """
        return len(self._running) + len(self._waiting)

    def stats(self) -> EngineStats:
        """Return the counters, without times."""
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_blocks=self.config.num_blocks,
            kv_blocks_used=self._blocks.used,
            steps=self._next_plan - len(self._outstanding),
            **self._totals,
        )

    def add_end_tokens(self, tokens: Iterable[int]) -> None:
        """Let ``tokens`` end texts, in addition to ``config.eos``."""
        self._eos |= frozenset(tokens)

    def add(self, request: Request) -> None:
        """Queue a request whose id no unfinished one has. Raises ConfigError if the prompt is empty, or too long for
        the model or the cache.
        """
        config, prompt = self.config, len(request.prompt)
        max_output_tokens(prompt, config.max_model_len)
        sequence = SequenceState.from_request(request, config.max_model_len)
        # The last sampled token is never computed.
        blocks = self._blocks.blocks_for(sequence.limit - 1)
        if blocks > config.num_blocks:
            raise ConfigError(
                f"a prompt of {prompt} tokens and an output of up to {sequence.limit - prompt} take {blocks} blocks of "
                f"{config.block_size} tokens, and the cache has {config.num_blocks}"
            )
        self._waiting[sequence.request_id] = sequence

    def abort(self, request_id: str) -> EngineCoreOutput | None:
        """End a request now. Return None if there is no such request, or if it has already ended."""
        sequence = self._running.get(request_id) or self._waiting.get(request_id)
        if sequence is None:
            return None
        self._end(sequence)
        return EngineCoreOutput(request_id, (), finish_reason="abort", cached_tokens=sequence.num_cached or 0)

    def schedule(self) -> StepPlan | None:
        """Plan the next step. Return None if nothing can be computed until results of outstanding plans arrive."""
        config = self.config
        if len(self._outstanding) >= config.pipeline + config.lookahead:
            return None
        chosen: dict[SequenceState, int] = {}  # how many tokens of each sequence
        speculation = self._speculation
        by_ranks = speculation is not None and speculation.by_ranks
        # prompts are not to wait for the steps of a draft model, nor for the host, which knows no lookahead then
        pays = speculation is not None and speculation.policy.speculates(len(self._running))
        speculates = pays and not (by_ranks and self._computes_prompts)
        self._drafts, self._asks_ranks = pays and by_ranks, speculates and by_ranks
        lookahead = 0 if speculates else config.lookahead  # proposals follow known tokens

        prefilling = None  # at most one: the next is admitted only when a step has more room than this one needs
        num_decoding = 0
        ready: list[SequenceState] = []
        # a step of these would wait at the first stage until the last stage has sampled their tokens
        blocked: list[SequenceState] = []
        for sequence in self._running.values():
            if sequence.num_uncomputed > 1:
                prefilling = sequence
            elif sequence.length < sequence.limit:
                num_decoding += 1
                if sequence.num_pending <= lookahead and not sequence.drafts:
                    in_pipeline = sequence.num_pending and sequence.last_plan > self._next_plan - config.pipeline
                    (blocked if in_pipeline else ready).append(sequence)

        self._choose_decodes(ready, num_decoding, chosen)
        if speculates:
            self._add_proposals(chosen)
        decodes = len(chosen)
        most = config.max_num_batched_tokens
        if not num_decoding:
            most = max(most, config.max_prompt_step_tokens)
        if prefilling is None or prefilling.slot is None:
            self._admit(chosen, most)
        else:
            count = min(prefilling.num_uncomputed, most - sum(chosen.values()))
            # It arrived last, so if it lacks blocks it waits for them, and no other sequence takes them meanwhile.
            if count and self._reserve(prefilling, count, chosen):
                chosen[prefilling] = count
                self._admit(chosen, most)
        if not chosen:
            self._choose_decodes(blocked, num_decoding, chosen)
            decodes = len(chosen)
        if not chosen:
            return None
        self._computes_prompts = len(chosen) > decodes
        if self._computes_prompts:
            self._drafts = self._asks_ranks = False
        elif self._asks_ranks:
            self._asks_ranks = self._catches_up(chosen)
        return self._make_plan(chosen, None if self._computes_prompts else speculates)

    def _choose_decodes(
        self, candidates: list[SequenceState], num_decoding: int, chosen: dict[SequenceState, int]
    ) -> None:
        """Choose one step's sequences, one token each, from ``candidates`` out of ``num_decoding`` decoding ones."""
        # Each pipeline stage gets its share of the decoding sequences, and the candidates are divided over the plans
        # that are still to be made before a result arrives.
        config = self.config
        plans_left = max(1, config.pipeline - len(self._outstanding))
        quota = min(
            -(-num_decoding // config.pipeline), -(-len(candidates) // plans_left), config.max_num_batched_tokens
        )
        if quota < len(candidates):
            candidates.sort(key=lambda sequence: sequence.last_plan)
        for sequence in candidates:
            if len(chosen) == quota:
                break
            if sequence.slot is None:
                continue  # it was preempted for one before it in this loop
            if self._reserve(sequence, 1, chosen):
                chosen[sequence] = 1

    def _add_proposals(self, chosen: dict[SequenceState, int]) -> None:
        """Add proposals to decoding sequences, as far as the step has room and blocks remain that no running sequence
        needs next."""
        assert self._speculation is not None
        speculation, size = self._speculation, self.config.block_size
        room = min(speculation.most, self.config.max_num_batched_tokens - len(chosen))
        for sequence in chosen:
            reserved = (len(sequence.blocks) + self._spare_blocks) * size - sequence.num_computed - 1
            # The token after the last proposal is the last one at most.
            count = min(speculation.count, room, reserved, sequence.limit - sequence.length - 1)
            if count > 0 and (drafts := tuple(speculation.proposer.propose(sequence, count))):
                self._extend(sequence, sequence.num_computed + 1 + len(drafts))
                sequence.drafts = drafts
                chosen[sequence] += len(drafts)
                room -= len(drafts)

    @property
    def _spare_blocks(self) -> int:
        """The number of free blocks beyond one for each running sequence."""
        return max(0, self._blocks.free - len(self._running))

    def _extend(self, sequence: SequenceState, tokens: int) -> None:
        """Give a sequence spare blocks, up to the number needed for this many tokens."""
        blocks = self._blocks.blocks_for(tokens) - len(sequence.blocks)
        sequence.blocks += self._blocks.allocate(max(0, min(blocks, self._spare_blocks)))

    def _reserve(self, sequence: SequenceState, count: int, chosen: dict[SequenceState, int]) -> bool:
        """Return whether a running sequence has blocks for ``count`` more tokens, preempting later ones if
        necessary.
        """
        if sequence.num_computed + count <= len(sequence.blocks) * self.config.block_size:
            return True
        blocks = self._blocks.blocks_for(sequence.num_computed + count) - len(sequence.blocks)
        while blocks > self._blocks.free:
            victim = next(reversed(self._running.values()))
            if victim is sequence:
                return False
            chosen.pop(victim, None)
            self._preempt(victim)
        if blocks > 0:
            sequence.blocks += self._blocks.allocate(blocks)
        return True

    def _admit(self, chosen: dict[SequenceState, int], most: int) -> None:
        """Start waiting sequences in order, as far as slots, blocks and a step of ``most`` tokens allow."""
        budget = most - sum(chosen.values())
        while self._waiting and self._slots and budget:
            sequence = next(iter(self._waiting.values()))
            if sequence.num_pending:
                break  # it was preempted, and its last sampled token is not known yet
            known = len(sequence.tokens)
            # At least one token is left to compute: its logits are needed to sample the next one. All are where
            # log-probabilities of the prompt are wanted.
            may_match = self.config.prefix_caching and not self._wants_prompt(sequence)
            count = (known - 1) // self.config.block_size if may_match else 0
            self._blocks.extend_digests(sequence.digests, sequence.tokens, count)
            match = self._blocks.match(sequence.digests, count)
            # One more block for each running sequence, or the new one might be preempted at once. So a sequence that
            # was just preempted does not fit.
            if not self._blocks.fits(match, self._blocks.blocks_for(known) - len(match.blocks) + len(self._running)):
                break
            matched = list(match.blocks)
            undrafted = (place for place, block in enumerate(matched) if block in self._undrafted)
            first = next(undrafted, None)
            sequence.undrafted_from = None if first is None else first * self.config.block_size
            del self._waiting[sequence.request_id]
            self._running[sequence.request_id] = sequence
            sequence.slot = self._slots.pop()
            self._blocks.acquire(matched)
            sequence.num_computed = len(matched) * self.config.block_size
            count = min(known - sequence.num_computed, budget)
            new_blocks = self._blocks.blocks_for(sequence.num_computed + count) - len(matched)
            sequence.blocks = matched + self._blocks.allocate(new_blocks)
            chosen[sequence] = count
            budget -= count
            if sequence.num_cached is None:
                sequence.num_cached = sequence.num_computed
                self._totals["cached_tokens"] += sequence.num_cached
                self._totals["prompt_tokens"] += sequence.prompt_length

    def _make_plan(self, chosen: dict[SequenceState, int], speculates: bool | None) -> StepPlan:
        number = self._next_plan
        self._next_plan += 1
        scheduled = []
        sampling = []
        targets = []
        self._draft_room = max(0, self.config.max_num_batched_tokens - sum(chosen.values()))
        for sequence, count in sorted(chosen.items(), key=lambda item: item[1] > 1 + len(item[0].drafts)):
            part = self._scheduled_sequence(sequence, count)
            scheduled.append(part)
            if part.targets is not None:
                targets.append((sequence, part.num_computed, len(part.targets.tokens)))
            sequence.num_computed += count
            sequence.num_sent_blocks = len(sequence.blocks)
            sequence.last_plan = number
            if part.do_sample:
                sequence.num_pending += 1
                sampling.append((sequence, sequence.drafts))
            # No other sequence of this plan can find these blocks any more: all of its sequences are chosen.
            self._publish(sequence)
        if self._drafts and any(part.drafted is None or part.drafted[1] for part in scheduled):
            speculates = None  # the draft model also computes what it has left out, which says nothing of later steps
        begun_s = 0.0 if self._speculation is None else self._speculation.clock()
        plan = _OutstandingPlan(number, sampling, targets, len(self._running), speculates, begun_s)
        self._outstanding.append(plan)
        return StepPlan(number, tuple(scheduled))

    def _scheduled_sequence(self, sequence: SequenceState, count: int) -> ScheduledSequence:
        start = sequence.num_computed
        assert sequence.slot is not None
        drafts, accepted = len(sequence.drafts), sequence.num_accepted
        sequence.num_accepted = 0
        count -= drafts
        tokens = (tuple(sequence.tokens[start : start + count]) or (PENDING_TOKEN,)) + sequence.drafts
        do_sample = count == sequence.num_uncomputed
        propose, drafted = 0, None
        if self._speculation is not None and self._speculation.by_ranks:
            drafted = self._drafted(sequence, start + len(tokens))
        if self._asks_ranks and do_sample and self._speculation is not None and sequence.undrafted_from is None:
            # After this step, one token at least is known.
            propose = max(0, min(self._speculation.count, sequence.limit - sequence.length - 2))
            self._extend(sequence, min(sequence.limit, start + len(tokens) + propose))
        blocks = tuple(sequence.blocks[sequence.num_sent_blocks :])
        targets = None
        if self._wants_prompt(sequence) and (followers := sequence.tokens[start + 1 : start + count + 1]):
            targets = PromptTargets(tuple(followers), sequence.params.prompt_logprobs or 0)
        if sequence.num_sent_blocks:
            part = ScheduledSequence(sequence.slot, start, tokens, blocks, False, do_sample, targets=targets)
            if drafts or accepted or propose or drafted:
                part = part._replace(drafts=drafts, accepted=accepted, propose=propose, drafted=drafted)
            return part
        penalised = sequence.params.repetition_penalty != 1
        prompt = tuple(sequence.tokens[: sequence.prompt_length]) if penalised else ()
        request = sequence.params, sequence.request_id, sequence.output, prompt, self._end_tokens(sequence)
        return ScheduledSequence(
            sequence.slot, start, tokens, blocks, True, do_sample, *request, targets, propose=propose, drafted=drafted
        )

    def _catches_up(self, chosen: dict[SequenceState, int]) -> bool:
        """Return whether the next step has room for everything that the draft model has skipped.

        Nothing is proposed until then: the sooner all sequences have proposals, the more tokens a step yields.
        """
        behind = sum(each.num_computed - each.undrafted_from for each in chosen if each.undrafted_from is not None)
        return sum(chosen.values()) + behind <= self.config.max_num_batched_tokens

    def _drafted(self, sequence: SequenceState, stop: int) -> tuple[int, tuple[int, ...]] | None:
        """Return :attr:`ScheduledSequence.drafted`: the part that the draft model computes of a sequence in a plan that
        computes it up to ``stop``.

        It skips sequences in steps with prompts and if proposals do not pay. Once they pay again, it catches up as far
        as steps have room before it proposes.
        """
        start, size = sequence.num_computed, self.config.block_size
        first = start if sequence.undrafted_from is None else sequence.undrafted_from
        if not self._drafts or (first < start and sequence.num_pending):  # it takes tokens that are known
            sequence.undrafted_from = first
            self._undrafted.update(sequence.blocks[start // size : self._blocks.blocks_for(stop)])
            return None
        known = tuple(sequence.tokens[first : min(start, first + self._draft_room)])
        self._draft_room -= len(known)
        end = first + len(known)
        if end == start:
            end = stop
        sequence.undrafted_from = None if end == stop else end
        self._undrafted.difference_update(sequence.blocks[first // size : self._blocks.blocks_for(end)])
        if end < stop:
            self._undrafted.update(sequence.blocks[end // size : self._blocks.blocks_for(stop)])
        return first, known

    def _end_tokens(self, sequence: SequenceState) -> tuple[int, ...]:
        """Return the tokens that would end an output too early; () if it may have any length."""
        params = sequence.params
        if not params.min_tokens:
            return ()
        return (*(() if params.ignore_eos else self._eos), *params.stop_token_ids)

    @staticmethod
    def _wants_prompt(sequence: SequenceState) -> bool:
        """Return whether log-probabilities of the prompt are requested and no plan has computed all of them yet."""
        return sequence.params.prompt_logprobs is not None and sequence.length == sequence.prompt_length

    def _publish(self, sequence: SequenceState) -> None:
        """Let other sequences find the computed full blocks whose tokens are all known."""
        if not self.config.prefix_caching:
            return
        full = min(sequence.num_computed, len(sequence.tokens)) // self.config.block_size
        if full > sequence.num_published_blocks:
            self._blocks.extend_digests(sequence.digests, sequence.tokens, full)
            for block in range(sequence.num_published_blocks, full):
                self._blocks.publish(sequence.blocks[block], sequence.digests[block])
            sequence.num_published_blocks = full

    def update(self, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Process the output of the oldest outstanding plan.

        A request whose token is INVALID_TOKEN ends with an error, and its cache blocks are not reused. A request among
        the ``failures`` ends with that error.

        Returns the outputs of the requests that sampled, without the ones that have ended meanwhile.
        """
        plan = self._outstanding.popleft()
        assert output.number == plan.number
        entries = iter(output.prompt_logprobs)
        for sequence, start, count in plan.targets:
            # A prompt that was preempted is computed again, maybe in other chunks.
            sequence.prompt_logprobs[start : start + count] = islice(entries, count)
        outputs = []
        reasons, row = dict(output.failures), 0
        for (sequence, drafts), reported in zip(plan.sampling, chain(output.proposals, repeat(())), strict=False):
            sequence.reported = reported
            if not sequence.ended:
                outputs.append(self._take(sequence, drafts, row, output, reasons))
            row += 1 + len(drafts)
        if self._speculation is not None:
            self._measure(plan, sum(len(output.tokens) for output in outputs))
        return outputs

    def _take(
        self,
        sequence: SequenceState,
        drafts: tuple[int, ...],
        row: int,
        results: ModelRunnerOutput,
        reasons: dict[int, str],
    ) -> EngineCoreOutput:
        """Process the tokens of a sequence, from number ``row`` up to the token after the last accepted one of its
        ``drafts``; ``reasons`` are the failures by row."""
        tokens = results.tokens
        first = len(sequence.tokens) == sequence.prompt_length
        sequence.num_pending -= 1
        accepted = 0
        if drafts:
            accepted = num_accepted(drafts, tokens[row : row + len(drafts)])
            self._totals["proposed_tokens"] += len(drafts)
            self._totals["accepted_tokens"] += accepted
            sequence.drafts = ()
            if sequence.slot is not None:
                sequence.num_computed -= len(drafts) - accepted
                sequence.num_accepted = accepted
        stop = row
        error, finish_reason, stop_token = "", None, None
        for stop, token in enumerate(tokens[row : row + accepted + 1], row):
            if stop in reasons:
                error = reasons[stop]
                break
            if token == INVALID_TOKEN or (first and any(isnan(each.logprob) for each in sequence.prompt_logprobs)):
                error = _INVALID_LOGITS
                self._blocks.withdraw(sequence.digests)
                break
            sequence.tokens.append(token)
            finish_reason, stop_token = self._finish(sequence, token)
            if finish_reason:
                break
        if not error:
            stop += 1
            self._publish(sequence)
        if error or finish_reason:
            self._end(sequence)
        if not sequence.params.max_tokens:
            stop = row
        new_tokens = tuple(tokens[row:stop])
        self._totals["output_tokens"] += len(new_tokens)
        entries = None
        if results.logprobs[row] is not None:
            entries = tuple(entry for entry in results.logprobs[row:stop] if entry is not None)
        output = EngineCoreOutput(
            sequence.request_id,
            new_tokens,
            entries,
            "error" if error else finish_reason,
            stop_token,
            sequence.num_cached or 0,
            error,
        )
        if first and not error and sequence.params.prompt_logprobs is not None:
            output = output._replace(prompt_logprobs=tuple(sequence.prompt_logprobs))
        return output

    def _measure(self, plan: _OutstandingPlan, tokens: int) -> None:
        """Report to the policy how many tokens a plan yielded."""
        assert self._speculation is not None
        now_s = self._speculation.clock()
        if plan.speculates is not None:
            seconds = now_s - max(plan.begun_s, self._updated_s)
            self._speculation.policy.record(plan.running, plan.speculates, tokens / len(plan.sampling), seconds)
            if not plan.speculates:
                # one in turn, since a long text takes a while to search
                self._speculation.foresee(plan.sampling[plan.number % len(plan.sampling)][0], plan.running)
        self._updated_s = now_s

    def _finish(self, sequence: SequenceState, token: int) -> tuple[FinishReason | None, int | None]:
        """Return why the last token of a sequence ends it, if it does, and the token if it is a stop token."""
        params = sequence.params
        if not params.max_tokens:
            return "length", None
        if (token in self._eos and not params.ignore_eos) or token in params.stop_token_ids:
            return "stop", token
        return ("length" if len(sequence.tokens) == sequence.limit else None), None

    def _end(self, sequence: SequenceState) -> None:
        sequence.ended = True
        if sequence.slot is None:
            del self._waiting[sequence.request_id]
        else:
            del self._running[sequence.request_id]
            self._free(sequence)

    def _preempt(self, sequence: SequenceState) -> None:
        self._totals["preemptions"] += 1
        del self._running[sequence.request_id]
        self._waiting[sequence.request_id] = sequence
        self._waiting.move_to_end(sequence.request_id, last=False)
        self._free(sequence)

    def _free(self, sequence: SequenceState) -> None:
        assert sequence.slot is not None
        self._slots.append(sequence.slot)
        self._blocks.release(sequence.blocks)
        sequence.slot = None
        sequence.blocks = []
        sequence.num_computed = sequence.num_sent_blocks = sequence.num_published_blocks = sequence.num_accepted = 0
