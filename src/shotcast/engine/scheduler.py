"""Which tokens of which requests each step computes: continuous batching over a paged cache.

Decoding sequences come first, so that a long prompt does not hold them up; what room a step has left goes to prompts,
a chunk at a time, in order of arrival. All that run arrived before all that wait. When the cache is full, the one that
arrived last loses its blocks, waits, and has its tokens computed again, prompt and output.

Plans take effect in order on every rank. So what an outstanding plan writes counts as written for the plans after it,
and blocks may change hands between two plans that are both outstanding.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from shotcast.engine.blocks import BlockManager
from shotcast.engine.plan import NO_TOKEN, PENDING, SequenceStep, StepPlan
from shotcast.engine.requests import EngineStats, FinishReason, Progress, Request, TokenLogprob, output_room
from shotcast.engine.sequence import SequenceState
from shotcast.errors import ConfigError

_NOT_NUMBERS = "the model's logits are not numbers (NaN or infinity)"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What the scheduler has to share out.

    Args:
        max_sequences: that run at once, and slots of the ranks' tables.
        max_batch_tokens: computed in a step.
        block_size: tokens a block of the cache.
        num_blocks: of the cache.
        max_model_len: tokens of a sequence, prompt and output.
        prefix_caching: take blocks that hold the same tokens over instead of computing them.
        lookahead: 1 plans a sequence's next step while its last token is still being drawn, and so has a step waiting
            for the ranks beside those that they compute.
        pipeline: stages of the model that work on different plans at the same time.
        eos: the model's end tokens.
    """

    max_sequences: int
    max_batch_tokens: int
    block_size: int
    num_blocks: int
    max_model_len: int
    prefix_caching: bool = True
    lookahead: int = 0
    pipeline: int = 1
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_batch_tokens", "block_size", "num_blocks", "pipeline"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is at least 1, not {getattr(self, name)}")
        if self.max_model_len < 2:
            raise ConfigError(
                f"max_model_len is at least 2, a token of prompt and one of output; not {self.max_model_len}"
            )
        if self.lookahead not in (0, 1):
            raise ConfigError(f"lookahead is 0 or 1, not {self.lookahead}")


class Scheduler:
    """Requests in, plans out; results of plans in, progress of requests out."""

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self._blocks = BlockManager(config.num_blocks, config.block_size, config.prefix_caching)
        self._eos = frozenset(config.eos)
        # Both in order of arrival.
        self._running: OrderedDict[str, SequenceState] = OrderedDict()
        self._waiting: OrderedDict[str, SequenceState] = OrderedDict()
        self._slots = list(range(config.max_sequences - 1, -1, -1))
        self._outstanding: deque[tuple[int, list[SequenceState]]] = (
            deque()
        )  # number of the plan, those for whom it draws
        self._next_plan = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._output_tokens = 0
        self._preemptions = 0

    @property
    def unfinished(self) -> int:
        """Requests that have not ended. Plans may be outstanding without any, and still want their update."""
        return len(self._running) + len(self._waiting)

    @property
    def outstanding(self) -> int:
        """Plans that were made and not updated."""
        return len(self._outstanding)

    @property
    def oldest_outstanding(self) -> int | None:
        """Number of the plan whose results :meth:`update` takes next."""
        return self._outstanding[0][0] if self._outstanding else None

    def stats(self) -> EngineStats:
        """All but the times."""
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_blocks=self.config.num_blocks,
            kv_blocks_used=self._blocks.used,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            preemptions=self._preemptions,
            steps=self._next_plan - len(self._outstanding),
        )

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ConfigError: the prompt is empty or too long for model or cache, or a request of that name is at work.
        """
        config, prompt = self.config, len(request.prompt)
        if request.request_id in self._running or request.request_id in self._waiting:
            raise ConfigError(f"request {request.request_id!r} is at work already; give each its own id")
        output_room(prompt, config.max_model_len)
        sequence = SequenceState.of(request, config.max_model_len)
        # The last token that is drawn is never computed.
        blocks = self._blocks.blocks_for(sequence.limit - 1)
        if blocks > config.num_blocks:
            raise ConfigError(
                f"a prompt of {prompt} tokens and an output of up to {sequence.limit - prompt} take {blocks} blocks of "
                f"{config.block_size} tokens, and the cache has {config.num_blocks}"
            )
        self._waiting[sequence.request_id] = sequence

    def abort(self, request_id: str) -> Progress | None:
        """End a request now. None if there is no such request, or it has ended."""
        sequence = self._running.get(request_id) or self._waiting.get(request_id)
        if sequence is None:
            return None
        self._end(sequence)
        return Progress(request_id, (), finish="abort", cached=sequence.cached or 0)

    def schedule(self) -> StepPlan | None:
        """The next step; None if there is nothing to compute before results of outstanding plans are in."""
        config = self.config
        if len(self._outstanding) >= config.pipeline + config.lookahead:
            return None
        chosen: dict[SequenceState, int] = {}  # how many tokens of each

        prefilling = None  # one at most: the next is let in only when a step has room for more than what it lacks
        decoding = 0
        ready: list[SequenceState] = []
        inside: list[SequenceState] = []  # a step of theirs would wait at the first stage until the last has drawn
        for sequence in self._running.values():
            if sequence.remaining > 1:
                prefilling = sequence
            elif sequence.length < sequence.limit:
                decoding += 1
                if sequence.drawing <= config.lookahead:
                    late = sequence.drawing and sequence.last_plan > self._next_plan - config.pipeline
                    (inside if late else ready).append(sequence)

        self._decode(ready, decoding, chosen)
        if prefilling is None or prefilling.slot is None:
            self._admit(chosen)
        else:
            count = min(prefilling.remaining, config.max_batch_tokens - len(chosen))
            # It arrived last, so if it lacks blocks it waits for them, and others do not take them meanwhile.
            if count and self._reserve(prefilling, count, chosen):
                chosen[prefilling] = count
                self._admit(chosen)
        if not chosen:
            self._decode(inside, decoding, chosen)
        return self._plan(chosen) if chosen else None

    def _decode(self, ready: list[SequenceState], decoding: int, chosen: dict[SequenceState, int]) -> None:
        """Choose of those that are ``ready``, one of ``decoding`` each, what belongs into one step."""
        # Every stage of a pipeline has its share of those that decode, and those that are ready are divided over the
        # plans that are still to be made before a result comes back.
        config = self.config
        to_make = max(1, config.pipeline - len(self._outstanding))
        quota = min(-(-decoding // config.pipeline), -(-len(ready) // to_make), config.max_batch_tokens)
        if quota < len(ready):
            ready.sort(key=lambda sequence: sequence.last_plan)
        for sequence in ready:
            if len(chosen) == quota:
                break
            if sequence.slot is None:
                continue  # one before it in this loop took its blocks
            if self._reserve(sequence, 1, chosen):
                chosen[sequence] = 1

    def _reserve(self, sequence: SequenceState, count: int, chosen: dict[SequenceState, int]) -> bool:
        """Give a running sequence blocks for ``count`` more tokens, at the cost of those that arrived after it."""
        if sequence.computed + count <= len(sequence.blocks) * self.config.block_size:
            return True
        blocks = self._blocks.blocks_for(sequence.computed + count) - len(sequence.blocks)
        while blocks > self._blocks.free:
            victim = next(reversed(self._running.values()))
            if victim is sequence:
                return False
            chosen.pop(victim, None)
            self._preempt(victim)
        if blocks > 0:
            sequence.blocks += self._blocks.allocate(blocks)
        return True

    def _admit(self, chosen: dict[SequenceState, int]) -> None:
        """Let those that wait run, in order, as far as slots, blocks and the step have room."""
        budget = self.config.max_batch_tokens - sum(chosen.values())
        while self._waiting and self._slots and budget:
            sequence = next(iter(self._waiting.values()))
            if sequence.drawing:
                break  # pre-empted, and what it drew last is not known yet
            known = len(sequence.tokens)
            matched: list[int] = []
            if self.config.prefix_caching:
                # At least one token is left to compute: its logits draw the next.
                count = (known - 1) // self.config.block_size
                self._blocks.extend_digests(sequence.digests, sequence.tokens, count)
                matched = self._blocks.match(sequence.digests[:count])
            # A block more for each that runs, lest the newcomer is pre-empted at once. So none fits that just was.
            if not self._blocks.fits(matched, self._blocks.blocks_for(known) - len(matched) + len(self._running)):
                break
            del self._waiting[sequence.request_id]
            self._running[sequence.request_id] = sequence
            sequence.slot = self._slots.pop()
            self._blocks.hold(matched)
            sequence.computed = len(matched) * self.config.block_size
            count = min(known - sequence.computed, budget)
            more = self._blocks.blocks_for(sequence.computed + count) - len(matched)
            sequence.blocks = matched + self._blocks.allocate(more)
            chosen[sequence] = count
            budget -= count
            if sequence.cached is None:
                sequence.cached = sequence.computed
                self._cached_tokens += sequence.cached
                self._prompt_tokens += sequence.prompt_length

    def _plan(self, chosen: dict[SequenceState, int]) -> StepPlan:
        number = self._next_plan
        self._next_plan += 1
        steps = []
        draws = []
        for sequence, count in sorted(chosen.items(), key=lambda item: item[1] > 1):
            step = self._step(sequence, count)
            steps.append(step)
            sequence.computed += count
            sequence.sent = len(sequence.blocks)
            sequence.last_plan = number
            if step.draws:
                sequence.drawing += 1
                draws.append(sequence)
            # Nobody else in this plan can find them any more: the plan is complete.
            self._publish(sequence)
        self._outstanding.append((number, draws))
        return StepPlan(number, tuple(steps))

    def _step(self, sequence: SequenceState, count: int) -> SequenceStep:
        start = sequence.computed
        assert sequence.slot is not None
        tokens = tuple(sequence.tokens[start : start + count]) or (PENDING,)
        blocks = tuple(sequence.blocks[sequence.sent :])
        draws = count == sequence.remaining
        if sequence.sent:
            return SequenceStep(sequence.slot, start, tokens, blocks, False, draws)
        return SequenceStep(
            sequence.slot, start, tokens, blocks, True, draws, sequence.params, sequence.request_id, sequence.output
        )

    def _publish(self, sequence: SequenceState) -> None:
        """Let others find the blocks that are full, computed, and all of whose tokens are known."""
        if not self.config.prefix_caching:
            return
        full = min(sequence.computed, len(sequence.tokens)) // self.config.block_size
        if full > sequence.published:
            self._blocks.extend_digests(sequence.digests, sequence.tokens, full)
            for block in range(sequence.published, full):
                self._blocks.publish(sequence.blocks[block], sequence.digests[block])
            sequence.published = full

    def update(
        self, number: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None] | None = None
    ) -> list[Progress]:
        """Take in what plan ``number`` drew: a token for each of its sequences that draws, in its order.

        A request whose token is NO_TOKEN ends with an error, and what it left in the cache is not used again.

        Returns:
            The progress of the requests that drew; those that had ended meanwhile are not among them.

        Raises:
            ConfigError: that plan is not the oldest outstanding one, or it draws another number of tokens.
        """
        if number != self.oldest_outstanding:
            raise ConfigError(f"the oldest outstanding plan is {self.oldest_outstanding}; here are results of {number}")
        draws = self._outstanding[0][1]
        if len(tokens) != len(draws) or (logprobs is not None and len(logprobs) != len(draws)):
            got = f"{len(tokens)}" + ("" if logprobs is None else f" with {len(logprobs)} log-probabilities")
            raise ConfigError(f"plan {number} draws {len(draws)} tokens; here are {got}")
        self._outstanding.popleft()
        progress = []
        for place, (sequence, token) in enumerate(zip(draws, tokens, strict=True)):
            if sequence.ended:
                continue
            if token == NO_TOKEN:
                self._blocks.withdraw(sequence.digests)
                self._end(sequence)
                cached = sequence.cached or 0
                progress.append(Progress(sequence.request_id, (), finish="error", cached=cached, error=_NOT_NUMBERS))
                continue
            sequence.tokens.append(token)
            sequence.drawing -= 1
            self._output_tokens += 1
            finish, stop_token = self._finish(sequence, token)
            self._publish(sequence)
            if finish:
                self._end(sequence)
            logprob = None if logprobs is None else logprobs[place]
            progress.append(
                Progress(
                    sequence.request_id,
                    (token,),
                    None if logprob is None else (logprob,),
                    finish,
                    stop_token,
                    sequence.cached or 0,
                )
            )
        return progress

    def _finish(self, sequence: SequenceState, token: int) -> tuple[FinishReason | None, int | None]:
        params = sequence.params
        if (token in self._eos and not params.ignore_eos) or token in params.stop_token_ids:
            return "stop", token
        return ("length" if len(sequence.tokens) == sequence.limit else None), None

    def _end(self, sequence: SequenceState) -> None:
        sequence.ended = True
        if sequence.slot is None:
            del self._waiting[sequence.request_id]
        else:
            del self._running[sequence.request_id]
            self._give_back(sequence)

    def _preempt(self, sequence: SequenceState) -> None:
        self._preemptions += 1
        del self._running[sequence.request_id]
        self._waiting[sequence.request_id] = sequence
        self._waiting.move_to_end(sequence.request_id, last=False)
        self._give_back(sequence)

    def _give_back(self, sequence: SequenceState) -> None:
        """Slot and blocks."""
        assert sequence.slot is not None
        self._slots.append(sequence.slot)
        self._blocks.release(sequence.blocks)
        sequence.slot = None
        sequence.blocks = []
        sequence.computed = sequence.sent = sequence.published = 0
