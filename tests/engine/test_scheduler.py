"""The scheduler with simulated ranks whose cache holds tokens: every output must equal that of the request alone."""

from __future__ import annotations

import itertools
import math
import random
import sys
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shotcast.engine.outputs import EngineCoreOutput, ModelRunnerOutput, TokenLogprob
from shotcast.engine.requests import Request
from shotcast.engine.sampling_params import SamplingParams
from shotcast.engine.scheduler import Scheduler, SchedulerConfig
from shotcast.engine.sequence import SequenceState
from shotcast.engine.speculation import RankProposer, Speculation
from shotcast.engine.step_plan import INVALID_TOKEN, PENDING_TOKEN, ScheduledSequence, StepPlan
from shotcast.errors import ConfigError

VOCAB = 13


def next_token(tokens: list[int]) -> int:
    return zlib.crc32(array("q", tokens).tobytes()) % VOCAB


def alone(request: Request, config: SchedulerConfig) -> tuple[list[int], str]:
    """Return the output of a request that runs alone."""
    tokens = list(request.prompt)
    output: list[int] = []
    if not request.params.max_tokens:
        return output, "length"
    while True:
        output.append(next_token(tokens))
        tokens.append(output[-1])
        ends = output[-1] in request.params.stop_token_ids
        if ends or (output[-1] in config.eos and not request.params.ignore_eos):
            return output, "stop"
        if len(output) == request.params.max_tokens or len(tokens) == config.max_model_len:
            return output, "length"


@dataclass
class Slot:
    request_id: str
    table: list[int]
    tokens: list[int]  # all computed tokens, and the token sampled last
    last_token: int | None = None
    accepted: int = 0  # proposals of the last step


class Guesses:
    """Proposes some right tokens, and then wrong ones, as the tokens so far decide."""

    def propose(self, sequence: SequenceState, count: int) -> list[int]:
        return self.after(list(sequence.tokens), count)

    @staticmethod
    def after(tokens: list[int], count: int) -> list[int]:
        draw = random.Random(zlib.crc32(array("q", tokens).tobytes()))
        right, proposals = draw.randrange(count + 1), []
        for place in range(draw.randrange(count + 1)):
            proposals.append((next_token(tokens) + (place >= right)) % VOCAB)
            tokens.append(proposals[-1])
        return proposals


class Turns:
    """Speculates in steps by a pattern."""

    def __init__(self, pattern: list[bool]):
        self.pattern = itertools.cycle(pattern)
        self.recorded: list[bool] = []

    def speculates(self, running: int) -> bool:
        return next(self.pattern)

    def record(self, running: int, speculated: bool, tokens: float, seconds: float) -> None:
        assert tokens >= 1 or running
        self.recorded.append(speculated)


class Ranks:
    """Executes plans in order on a cache that holds (token, position) by block, and checks every read."""

    def __init__(self, config: SchedulerConfig, proposals: int = 0):
        self.config = config
        self.proposals = proposals
        self.cache = [[-1] * config.block_size for _ in range(config.num_blocks)]
        self.draft_cache = [[-1] * config.block_size for _ in range(config.num_blocks)]
        self.slots: dict[int, Slot] = {}
        self.reported: list[tuple[int, ...]] = []  # proposals of the last step

    def read(self, slot: Slot, count: int) -> list[int]:
        size = self.config.block_size
        return [self.cache[slot.table[place // size]][place % size] for place in range(count)]

    def draft(self, parts: list[tuple[ScheduledSequence, Slot, list[int]]]) -> None:
        """Compute what the draft model computes, and check what it reads before it proposes."""
        size, count = self.config.block_size, 0
        for s, slot, tokens in parts:
            if s.drafted is None:
                assert not s.propose
                continue
            first, known = s.drafted
            assert list(known) == slot.tokens[first : first + len(known)]
            assert first + len(known) <= s.num_computed
            computed = [*known, *tokens] if first + len(known) == s.num_computed else list(known)
            count += len(computed)
            for place, token in enumerate(computed, first):
                self.draft_cache[slot.table[place // size]][place % size] = token
            if s.propose:
                assert first + len(computed) == s.num_computed + len(tokens)
                wanted = [*slot.tokens[: s.num_computed], *tokens]
                assert [self.draft_cache[slot.table[at // size]][at % size] for at in range(len(wanted))] == wanted
        assert count <= self.config.max_num_batched_tokens

    def step(
        self, plan: StepPlan, prompts: dict[str, tuple[int, ...]]
    ) -> tuple[list[int], list[TokenLogprob | None], list[TokenLogprob]]:
        size = self.config.block_size
        limits = self.config
        decodes = any(not s.is_new and len(s.tokens) == 1 + s.drafts and s.do_sample for s in plan.sequences)
        most = limits.max_num_batched_tokens
        tokens = sum(len(s.tokens) for s in plan.sequences)
        assert tokens <= (most if decodes else max(most, limits.max_prompt_step_tokens))
        assert 0 < len({s.slot for s in plan.sequences}) == len(plan.sequences) <= self.config.max_num_seqs
        chunks = [len(s.tokens) > 1 + s.drafts for s in plan.sequences]
        assert chunks == sorted(chunks)
        written: set[int] = set()
        parts = []
        for s in plan.sequences:
            assert 0 <= s.slot < self.config.max_num_seqs
            if s.is_new:
                assert s.params is not None
                known = [*prompts[s.request_id], *s.output]
                self.slots[s.slot] = Slot(s.request_id, list(s.blocks), known, s.output[-1] if s.output else None)
            else:
                assert (s.params, s.request_id, s.output) == (None, "", ())
                self.slots[s.slot].table += s.blocks
            slot = self.slots[s.slot]
            assert s.accepted == slot.accepted
            tokens = list(s.tokens)
            if tokens == [PENDING_TOKEN]:
                assert slot.last_token is not None
                tokens = [slot.last_token]
            # The table has no more blocks than the tokens need, each once, and those of proposals.
            needed = -(-(s.num_computed + len(tokens)) // size)
            assert needed <= len(slot.table) == len(set(slot.table)) <= needed + -(-2 * self.proposals // size)
            known = len(tokens) - s.drafts
            assert tokens[:known] == slot.tokens[s.num_computed : s.num_computed + known]
            assert not s.drafts or (s.do_sample and s.num_computed + known == len(slot.tokens))
            # No sequence reads what this step writes: neither this one (it starts after), nor any other.
            assert self.read(slot, s.num_computed) == slot.tokens[: s.num_computed]
            parts.append((s, slot, tokens))
        self.draft(parts)
        for s, slot, tokens in parts:
            assert len(tokens) > 0
            blocks = {slot.table[place // size] for place in range(s.num_computed, s.num_computed + len(tokens))}
            assert not blocks & written
            written |= blocks
            for place, token in enumerate(tokens, s.num_computed):
                self.cache[slot.table[place // size]][place % size] = token
        sampled = []
        self.reported = []
        for s, slot, tokens in parts:
            computed = s.num_computed + len(tokens) - s.drafts
            assert self.read(slot, computed) == slot.tokens[:computed]
            assert s.do_sample == (computed == len(slot.tokens))
            slot.accepted = 0
            if s.do_sample:
                proposals = list(s.proposals)
                rows = [next_token(slot.tokens + proposals[:place]) for place in range(s.drafts + 1)]
                while slot.accepted < s.drafts and rows[slot.accepted] == proposals[slot.accepted]:
                    slot.accepted += 1
                slot.tokens += rows[: slot.accepted + 1]
                slot.last_token = slot.tokens[-1]
                assert len(slot.tokens) <= self.config.max_model_len
                sampled += rows
                room = len(slot.table) * size - len(slot.tokens) + 1  # the last proposal is not computed
                self.reported.append(tuple(Guesses.after(list(slot.tokens), max(0, min(s.propose, room)))))
            else:
                assert not s.propose
        entries = []
        for s, slot, tokens in parts:
            if s.targets is not None:
                first = s.num_computed + 1
                assert 0 < len(s.targets.tokens) <= len(tokens)
                followers = prompts[slot.request_id][first : first + len(tokens)]
                assert s.targets.tokens == followers
                for place, token in enumerate(followers, first):
                    entries.append(TokenLogprob(token, float(place), s.targets.alternatives, ()))
        return sampled, [None] * len(sampled), entries


def output_of(
    plan: StepPlan,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprob | None] | None = None,
    prompt_logprobs: Sequence[TokenLogprob] = (),
    failures: tuple[tuple[int, str], ...] = (),
    proposals: Sequence[tuple[int, ...]] = (),
) -> ModelRunnerOutput:
    entries = [None] * len(tokens) if logprobs is None else logprobs
    prompts = tuple(prompt_logprobs)
    return ModelRunnerOutput(plan.number, tuple(tokens), tuple(entries), prompts, failures, tuple(proposals))


class Engine:
    """A scheduler with its ranks; as many plans stay outstanding as the scheduler makes."""

    def __init__(self, config: SchedulerConfig, speculation: Speculation | None = None):
        self.config = config
        self.scheduler = Scheduler(config, speculation)
        self.ranks = Ranks(config, speculation.count if speculation else 0)
        self.plans: deque[StepPlan] = deque()
        self.prompts: deque[dict[str, tuple[int, ...]]] = deque()  # as of the time of each plan
        self.made: list[StepPlan] = []
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, EngineCoreOutput] = {}

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []

    def abort(self, request_id: str) -> None:
        output = self.scheduler.abort(request_id)
        assert (output is None) == (request_id in self.ended)
        if output is not None:
            assert (output.tokens, output.finish_reason) == ((), "abort")
            self.ended[request_id] = output

    def schedule(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self.plans.append(plan)
        self.prompts.append({name: request.prompt for name, request in self.requests.items()})
        self.made.append(plan)
        assert len(self.plans) == len(self.scheduler._outstanding) <= self.config.pipeline + self.config.lookahead
        return True

    def update(self) -> bool:
        if not self.plans:
            return False
        plan = self.plans.popleft()
        results = self.ranks.step(plan, self.prompts.popleft())
        for output in self.scheduler.update(output_of(plan, *results, proposals=self.ranks.reported)):
            assert output.request_id not in self.ended
            wanted = self.requests[output.request_id].params.prompt_logprobs
            if wanted is not None and not self.outputs[output.request_id]:
                prompt = self.requests[output.request_id].prompt
                entries = (TokenLogprob(token, float(place), wanted, ()) for place, token in enumerate(prompt))
                assert output.prompt_logprobs == tuple(entries)[1:]
                assert output.cached_tokens == 0
            else:
                assert output.prompt_logprobs is None
            self.outputs[output.request_id] += output.tokens
            assert output.cached_tokens < len(self.requests[output.request_id].prompt)
            if output.finish_reason:
                self.ended[output.request_id] = output
        return True

    def drain(self) -> None:
        """Run to the end like an engine: as many plans as possible, then the results of the oldest."""
        while self.scheduler.unfinished or self.plans:
            while self.schedule():
                pass
            assert self.update(), "requests are left, but nothing can be scheduled and no result is outstanding"

    def check(self) -> None:
        """Check that all requests ended with the output of each alone, and that all slots and blocks are free."""
        for name, request in self.requests.items():
            output, finish = alone(request, self.config)
            if self.ended[name].finish_reason == "abort":
                assert output[: len(self.outputs[name])] == self.outputs[name]
                continue
            assert (self.outputs[name], self.ended[name].finish_reason) == (output, finish)
            assert self.ended[name].stop_token == (output[-1] if finish == "stop" else None)
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
        assert stats.output_tokens == sum(map(len, self.outputs.values()))
        assert stats.steps == len(self.made)
        assert sorted(self.scheduler._slots) == list(range(self.config.max_num_seqs))


def request(name: str, prompt: tuple[int, ...], **params: object) -> Request:
    return Request(name, prompt, SamplingParams(**params))  # type: ignore[arg-type]


def config(**changes: object) -> SchedulerConfig:
    base = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, block_size=4, num_blocks=64, max_model_len=64)
    return replace(base, **changes)  # type: ignore[arg-type]


configs = st.builds(
    SchedulerConfig,
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 12),
    max_prompt_step_tokens=st.sampled_from([0, 0, 20]),
    block_size=st.integers(1, 4),
    num_blocks=st.integers(3, 12),
    max_model_len=st.integers(4, 24),
    prefix_caching=st.booleans(),
    lookahead=st.integers(0, 1),
    pipeline=st.integers(1, 3),
    eos=st.sampled_from([(), (0,), (0, 1)]),
)
requests = st.builds(
    # The prompts share prefixes.
    lambda base, length, tail, params: ((base,) * length + tuple(tail), params),
    st.integers(0, 1),
    st.integers(0, 9),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3),
    st.builds(
        SamplingParams,
        max_tokens=st.integers(0, 14),
        prompt_logprobs=st.sampled_from([None, None, 2]),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([(), (2,)]),
    ),
)
actions = st.lists(
    st.one_of(
        requests,
        st.tuples(st.just("abort"), st.integers(0, 5)),
        st.sampled_from(["schedule", "schedule", "update", "update", "turn"]),
    ),
    max_size=60,
)


speculations = st.none() | st.builds(
    lambda count, most, proposer, pattern: Speculation(count, most, proposer, Turns(pattern)),
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from([Guesses(), RankProposer()]),
    st.lists(st.booleans(), min_size=1, max_size=4),
)


@pytest.mark.full
@settings(max_examples=2000, derandomize=True)
@given(configs, speculations, actions)
def test_every_output_equals_that_of_the_request_alone(
    config: SchedulerConfig, speculation: Speculation | None, actions: list[object]
) -> None:
    engine = Engine(config, speculation)
    for number, action in enumerate(actions):
        if action in ("schedule", "turn"):
            engine.schedule()
        if action in ("update", "turn"):
            engine.update()
        elif isinstance(action, tuple) and action[0] == "abort":
            names = list(engine.requests)
            if names:
                engine.abort(names[-1 - action[1] % len(names)])
        elif isinstance(action, tuple):
            prompt, params = action
            try:
                engine.add(Request(f"{number}", prompt, params))
            except ConfigError:
                limit = min(len(prompt) + max(params.max_tokens, 1), config.max_model_len)
                blocks = -(-(limit - 1) // config.block_size)
                assert len(prompt) >= config.max_model_len or blocks > config.num_blocks
    engine.drain()
    engine.check()


@pytest.mark.every(4)
@pytest.mark.parametrize("proposer", [None, Guesses(), RankProposer()])
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("pipeline", [1, 2, 3])
def test_a_tiny_cache_under_load(lookahead: int, pipeline: int, proposer: Guesses | RankProposer | None) -> None:
    """There is much preemption and much sharing, and both must occur."""
    draw = random.Random(1)
    engine = Engine(
        config(
            max_num_seqs=8,
            num_blocks=14,
            max_model_len=40,
            lookahead=lookahead,
            pipeline=pipeline,
            max_num_batched_tokens=24,
        ),
        proposer and Speculation(3, 9, proposer, Turns([True, True, False])),
    )
    for number in range(150):
        prompt = (draw.randrange(2),) * draw.randrange(12) + (draw.randrange(VOCAB),)
        engine.add(request(f"{number}", prompt, max_tokens=draw.randrange(1, 28)))
        for _ in range(draw.randrange(12)):
            if draw.randrange(2):
                engine.schedule()
            else:
                engine.update()
        if draw.randrange(8) == 0:
            engine.abort(f"{draw.randrange(number + 1)}")
    engine.drain()
    stats = engine.scheduler.stats()
    assert stats.preemptions > 20
    assert stats.cached_tokens > 100
    least = 5 if isinstance(proposer, RankProposer) else 20  # a draft model rests in the many steps with prompts
    assert (stats.proposed_tokens > stats.accepted_tokens > least) == (proposer is not None)
    engine.check()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_draft_model_rests_where_proposals_do_not_pay(lookahead: int) -> None:
    """Then it computes what it has left out, as far as steps have room, and proposes again."""
    pays = [True] * 8 + [False] * 30 + [True] * 200
    turns = Turns(pays)
    engine = Engine(config(lookahead=lookahead, max_model_len=200), Speculation(3, 9, RankProposer(), turns))
    engine.add(request("a", (1, 2), max_tokens=100, ignore_eos=True))
    engine.drain()
    engine.check()
    (sequences,) = zip(*(plan.sequences for plan in engine.made), strict=True)
    drafted = [s.drafted for s in sequences]
    assert drafted[0] is None, "the prompt"
    first = next(number for number, part in enumerate(drafted) if part is None and any(drafted[:number]))
    again = next(number for number, part in enumerate(drafted) if number > first and part is not None)
    assert drafted[first:again] == [None] * (again - first)
    assert again - first > 20
    assert None not in drafted[again:]
    left_out = sequences[again].num_computed - sequences[first].num_computed
    later = [len(part[1]) for part in drafted[again:] if part is not None and part[1]]
    assert sum(later) >= left_out > max(later)
    assert max(later) == engine.config.max_num_batched_tokens - 1
    proposes = [s.propose > 0 for s in sequences]
    assert not any(proposes[first : again + len(later) - 1])
    assert any(proposes[:first])
    assert any(proposes[again:])
    measured = (
        len(sequences) - 1 - sum(1 for part in drafted if part and part[1])
    )  # neither the prompt nor steps that also compute what was left out
    assert len(turns.recorded) <= measured


def test_a_draft_model_catches_up_before_it_proposes() -> None:
    limits = config(max_num_seqs=8, num_blocks=300, max_num_batched_tokens=32, max_model_len=200)
    engine = Engine(limits, Speculation(3, 24, RankProposer(), Turns([True])))
    for number in range(7):
        engine.add(request(f"{number}", (number,), max_tokens=150, ignore_eos=True))
    for _ in range(6):
        engine.schedule()
        engine.update()
    engine.add(request("long", tuple(number % VOCAB for number in range(90)), max_tokens=60, ignore_eos=True))
    engine.drain()
    engine.check()
    levels = [
        all(s.drafted and sum(map(len, s.drafted[1:])) + s.drafted[0] == s.num_computed for s in plan.sequences)
        for plan in engine.made
    ]
    proposes = [any(s.propose for s in plan.sequences) for plan in engine.made]
    begun = next(number for number, plan in enumerate(engine.made) if len(plan.sequences) == 8)
    level = levels.index(True, begun)
    assert any(proposes[:begun])
    assert not any(proposes[begun:level])
    assert all(levels[level:])
    assert all(proposes[level : level + 5])
    late = [part for plan in engine.made[begun:level] for part in plan.sequences if part.drafted]
    assert sum(len(part.drafted[1]) for part in late if part.drafted) > 60


@pytest.mark.parametrize("proposer", [Guesses(), RankProposer()])
def test_prompts_do_not_wait_for_a_draft_model(proposer: Guesses | RankProposer) -> None:
    engine = Engine(config(lookahead=1, max_model_len=200), Speculation(3, 9, proposer, Turns([True])))
    engine.add(request("a", (1, 2), max_tokens=60, ignore_eos=True))
    while len(engine.made) < 6:
        assert engine.schedule()
        engine.update()
    engine.add(request("b", tuple(number % VOCAB for number in range(90)), max_tokens=1))
    engine.drain()
    engine.check()
    with_prompts = [any(len(s.tokens) > 1 + s.drafts for s in plan.sequences) for plan in engine.made]
    proposals = [any(s.drafts or s.propose for s in plan.sequences) for plan in engine.made]
    after = [proposes for proposes, before in zip(proposals[1:], with_prompts, strict=False) if before]
    assert len(after) > 6
    assert any(after) == isinstance(proposer, Guesses)
    assert not any(
        s.propose for plan, prompts in zip(engine.made, with_prompts, strict=True) if prompts for s in plan.sequences
    )
    assert any(proposals[:6])
    assert any(proposals[-6:])


def test_a_prefix_is_reused_from_an_earlier_step_but_not_from_the_same() -> None:
    engine = Engine(config(max_num_batched_tokens=64))
    prompt = tuple(range(10))
    engine.add(request("a", prompt, max_tokens=4))
    engine.add(request("b", prompt, max_tokens=4))
    engine.schedule()
    assert [s.num_computed for s in engine.made[0].sequences] == [0, 0]
    engine.update()
    engine.add(request("c", prompt, max_tokens=4))
    engine.schedule()
    taken = engine.made[1].sequences[-1]
    assert (taken.num_computed, taken.tokens, taken.blocks[:2]) == (8, (8, 9), engine.made[0].sequences[0].blocks[:2])
    engine.drain()
    assert engine.ended["c"].cached_tokens == 8
    stats = engine.scheduler.stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (30, 8)
    engine.check()


def test_a_prefix_may_be_reused_from_an_outstanding_plan() -> None:
    engine = Engine(config(pipeline=2))
    engine.add(request("a", tuple(range(10)), max_tokens=4))
    engine.schedule()
    engine.add(request("b", tuple(range(10)), max_tokens=4))
    engine.schedule()
    assert engine.made[1].sequences[0].num_computed == 8
    engine.drain()
    engine.check()


def test_a_fully_cached_prompt_leaves_a_token_to_compute() -> None:
    engine = Engine(config())
    for name in "ab":
        engine.add(request(name, tuple(range(8)), max_tokens=1))
        engine.drain()
    assert engine.ended["b"].cached_tokens == 4
    engine.check()


def test_an_output_is_found_as_a_prefix_too() -> None:
    engine = Engine(config(lookahead=1))
    engine.add(request("a", (1, 2, 3), max_tokens=10))
    engine.drain()
    engine.add(request("b", (1, 2, 3, *engine.outputs["a"]), max_tokens=2))
    engine.drain()
    assert engine.ended["b"].cached_tokens == 12
    engine.check()


def test_without_prefix_caching_nothing_is_reused() -> None:
    engine = Engine(config(prefix_caching=False))
    for name in "ab":
        engine.add(request(name, tuple(range(10)), max_tokens=2))
        engine.drain()
    assert engine.scheduler.stats().cached_tokens == 0


def test_decoding_sequences_go_first_and_prompts_get_the_rest() -> None:
    engine = Engine(config(max_num_batched_tokens=6))
    engine.add(request("a", (1,), max_tokens=20))
    engine.schedule()
    engine.update()
    engine.add(request("b", tuple(range(12)), max_tokens=2))
    for _ in range(3):
        engine.schedule()
        engine.update()
    assert [[len(s.tokens) for s in plan.sequences] for plan in engine.made[1:]] == [[1, 5], [1, 5], [1, 2]]
    assert [plan.sequences[1].do_sample for plan in engine.made[1:]] == [False, False, True]
    engine.drain()
    engine.check()


def test_prompts_have_larger_steps_while_nothing_decodes() -> None:
    engine = Engine(config(max_num_batched_tokens=6, max_prompt_step_tokens=10))
    engine.add(request("a", tuple(range(14)), max_tokens=20))
    engine.add(request("b", tuple(range(30, 50)), max_tokens=2))
    for _ in range(4):
        engine.schedule()
        engine.update()
    plans = [[(s.slot, len(s.tokens)) for s in plan.sequences] for plan in engine.made]
    first, second = plans[0][0][0], plans[1][1][0]
    assert plans == [[(first, 10)], [(first, 4), (second, 6)], [(first, 1), (second, 5)], [(first, 1), (second, 5)]]
    engine.drain()
    engine.check()


def test_lookahead_plans_a_token_that_is_not_known_yet() -> None:
    engine = Engine(config(lookahead=1))
    engine.add(request("a", (1, 2), max_tokens=3))
    assert engine.schedule()
    assert engine.schedule()
    assert not engine.schedule()
    assert engine.made[1].sequences[0].tokens == (PENDING_TOKEN,)
    engine.update()
    assert engine.schedule()
    engine.update()
    # The third token is being sampled, and there is no fourth.
    assert not engine.schedule()
    engine.update()
    assert engine.ended["a"].finish_reason == "length"
    engine.check()


def test_a_token_sampled_after_the_end_is_dropped() -> None:
    first = next_token([1, 2])
    engine = Engine(config(lookahead=1, eos=(first,)))
    engine.add(request("a", (1, 2), max_tokens=5))
    engine.schedule()
    engine.schedule()
    engine.update()
    assert (engine.ended["a"].finish_reason, engine.ended["a"].stop_token) == ("stop", first)
    assert engine.scheduler.unfinished == 0
    assert len(engine.scheduler._outstanding) == 1
    engine.update()
    assert engine.outputs["a"] == [first]
    engine.check()


@pytest.mark.parametrize(("running", "sizes"), [(4, [1, 1, 2]), (6, [2, 2, 2]), (9, [3, 3, 3])])
def test_a_pipeline_is_kept_full_with_even_batches(running: int, sizes: list[int]) -> None:
    engine = Engine(config(max_num_seqs=16, max_num_batched_tokens=64, pipeline=3, max_model_len=100, num_blocks=400))
    for number in range(running):
        engine.add(request(f"{number}", (number,), max_tokens=40, ignore_eos=True))
    while engine.scheduler.stats().output_tokens < 10 * running:
        while engine.schedule():
            pass
        engine.update()
    assert sorted(len(plan.sequences) for plan in engine.made[-3:]) == sizes
    in_flight = [s.slot for plan in engine.plans for s in plan.sequences]
    assert len(in_flight) == len(set(in_flight))
    engine.drain()
    engine.check()


def test_batches_of_a_pipeline_even_out_when_one_was_left_large() -> None:
    engine = Engine(config(max_num_seqs=8, max_num_batched_tokens=64, pipeline=2, max_model_len=100, num_blocks=400))
    for number in range(8):
        short = number in (0, 1, 2)  # those of the first four
        engine.add(request(f"{number}", (number,), max_tokens=5 if short else 60, ignore_eos=True))
    for _ in range(40):
        while engine.schedule():
            pass
        engine.update()
    assert [len(plan.sequences) for plan in engine.made[-2:]] in ([2, 3], [3, 2])


def test_chunks_of_one_prompt_follow_each_other_through_a_pipeline() -> None:
    engine = Engine(config(pipeline=2, max_num_batched_tokens=4))
    engine.add(request("a", tuple(range(10)), max_tokens=3))
    engine.schedule()
    engine.schedule()
    assert [plan.sequences[0].num_computed for plan in engine.plans] == [0, 4]
    engine.drain()
    engine.check()


@pytest.mark.parametrize(("pipeline", "decoding"), [(2, 1), (4, 1), (4, 3)])
def test_chunks_of_a_prompt_do_not_wait_for_tokens_in_a_pipeline(pipeline: int, decoding: int) -> None:
    """Few sequences decode, so the next step of each is planned ahead, but never with a chunk that could precede it."""
    engine = Engine(config(pipeline=pipeline, lookahead=1, max_num_batched_tokens=8, max_model_len=200, num_blocks=200))
    for number in range(decoding):
        engine.add(request(f"{number}", (number, 2), max_tokens=60))
    for _ in range(3 * pipeline):
        engine.schedule() or engine.update()
    engine.add(request("long", (1,) * 90, max_tokens=2))
    first = len(engine.made)
    while "long" not in engine.ended:
        while engine.schedule():
            pass
        engine.update()
    last_draw: dict[int, int] = {}
    mixed = 0
    for plan in engine.made:
        chunk = plan.number >= first and any(len(s.tokens) > 1 for s in plan.sequences)
        for s in plan.sequences:
            if chunk and s.tokens == (PENDING_TOKEN,):
                mixed += 1
                assert last_draw[s.slot] <= plan.number - pipeline
            if s.do_sample:
                last_draw[s.slot] = plan.number
    assert mixed > 2, "those that decode go on meanwhile"
    engine.drain()
    engine.check()


def test_no_sequence_is_skipped_when_a_pipeline_is_not_full() -> None:
    engine = Engine(config(pipeline=2))
    for number in range(4):
        engine.add(request(f"{number}", (number,), max_tokens=30, ignore_eos=True))
    for _ in range(21):
        engine.schedule()
        engine.update()
    assert [len(output) for output in engine.outputs.values()] == [11] * 4


def test_a_large_request_is_served_under_a_stream_of_small_ones() -> None:
    engine = Engine(config(num_blocks=16, max_num_seqs=4))
    for number in range(6):
        engine.add(request(f"{number}", (number,) * 9, max_tokens=6))
    engine.add(
        request("large", tuple(range(12)) * 4, max_tokens=14, ignore_eos=True)
    )  # it needs nearly the whole cache
    number = 6
    while "large" not in engine.ended:
        assert number < 200
        engine.add(request(f"{number}", (number % VOCAB,) * 9, max_tokens=6))
        number += 1
        engine.schedule()
        engine.update()
    engine.drain()
    engine.check()


def test_first_come_first_served() -> None:
    engine = Engine(config(num_blocks=16))
    for number in range(12):
        engine.add(request(f"{number}", (number,) * (1 + 5 * (number % 3)), max_tokens=9, ignore_eos=True))
    started: list[str] = []
    while engine.scheduler.unfinished:
        engine.schedule()
        engine.update()
        started += [name for name, output in engine.outputs.items() if output and name not in started]
    assert started == [f"{number}" for number in range(12)]


def test_the_last_to_arrive_is_preempted_and_keeps_its_output() -> None:
    engine = Engine(config(num_blocks=6, max_model_len=24, max_num_batched_tokens=64))
    engine.add(request("first", (1, 2, 3, 4), max_tokens=18, ignore_eos=True))
    engine.add(request("last", (5, 6, 7, 8), max_tokens=12, ignore_eos=True))
    engine.drain()
    fresh = [s for plan in engine.made for s in plan.sequences if s.is_new]
    assert [s.request_id for s in fresh] == ["first", "last", "last"]
    again = fresh[-1]
    assert 0 < len(again.output) < 12
    assert again.output == tuple(engine.outputs["last"][: len(again.output)])
    assert again.params == engine.requests["last"].params
    assert engine.scheduler.stats().preemptions == 1
    engine.check()


def test_a_preempted_request_comes_before_later_ones() -> None:
    engine = Engine(config(num_blocks=6, max_model_len=24, max_num_batched_tokens=64))
    for name in ("first", "second"):
        engine.add(request(name, (len(name),) * 5, max_tokens=13, ignore_eos=True))
    engine.schedule()
    engine.update()
    engine.add(request("third", (0,) * 5, max_tokens=2, ignore_eos=True))
    engine.drain()
    fresh = [s.request_id for plan in engine.made for s in plan.sequences if s.is_new]
    assert fresh == ["first", "second", "second", "third"]
    engine.check()


def test_no_request_is_admitted_that_the_next_block_of_another_would_preempt() -> None:
    engine = Engine(config(num_blocks=6, max_model_len=24))
    engine.add(request("a", (1,) * 9, max_tokens=6, ignore_eos=True))
    engine.schedule()
    engine.update()
    engine.add(request("b", (2,) * 9, max_tokens=8, ignore_eos=True))
    engine.drain()
    assert engine.scheduler.stats().preemptions == 0
    engine.check()


def test_a_prompt_that_waits_for_blocks_delays_later_ones() -> None:
    engine = Engine(config(block_size=1, num_blocks=24, max_num_batched_tokens=8, max_model_len=24))
    for name in "ab":
        engine.add(request(name, (ord(name),), max_tokens=5, ignore_eos=True))
    engine.schedule()
    engine.update()
    engine.add(request("long", tuple(range(100, 118)), max_tokens=2))
    engine.add(request("late", (7,), max_tokens=2))
    for _ in range(5):
        engine.schedule()
        engine.update()
    # The last chunk lacks blocks for two steps, until the first two requests have ended.
    assert [[len(s.tokens) for s in plan.sequences] for plan in engine.made[1:]] == [
        [1, 1, 6],
        [1, 1, 6],
        [1, 1],
        [1, 1],
        [1, 6],
    ]
    engine.drain()
    engine.check()


def test_a_prompt_waits_for_a_step_that_decoding_fills() -> None:
    engine = Engine(config(pipeline=2, max_num_batched_tokens=2))
    for number in range(3):
        engine.add(request(f"{number}", (number,), max_tokens=9, ignore_eos=True))
    engine.add(request("long", tuple(range(9)), max_tokens=2))
    engine.drain()
    engine.check()


def test_an_end_token_ends_unless_it_is_to_be_ignored() -> None:
    first = next_token([1, 2])
    for ignore, stops, finish in ((False, (), "stop"), (True, (), "length"), (True, (first,), "stop")):
        engine = Engine(config(eos=(first,)))
        engine.add(
            request("a", (1, 2), max_tokens=1 if ignore and not stops else 2, ignore_eos=ignore, stop_token_ids=stops)
        )
        engine.drain()
        assert engine.ended["a"].finish_reason == finish
        engine.check()


def test_the_model_length_limits_an_output() -> None:
    engine = Engine(config(max_model_len=8))
    engine.add(request("a", (1,) * 7, max_tokens=100))
    engine.add(request("b", (1,) * 3, max_tokens=100))
    engine.drain()
    assert [len(engine.outputs[name]) for name in "ab"] == [1, 5]
    assert engine.ended["b"].finish_reason == "length"
    engine.check()


def test_log_probabilities_go_with_their_tokens() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("a", (1,), max_tokens=5))
    scheduler.add(request("b", (1,), max_tokens=5))
    plan = scheduler.schedule()
    assert plan is not None
    one = TokenLogprob(3, -0.5, 1, ())
    first, second = scheduler.update(output_of(plan, [3, 4], [one, None]))
    assert (first.logprobs, second.logprobs) == ((one,), None)


def test_an_id_is_free_again_once_its_request_has_ended() -> None:
    engine = Engine(config(lookahead=1))
    engine.add(request("a", (1, 2), max_tokens=5))
    engine.schedule()
    engine.abort("a")
    engine.abort("a")
    del engine.ended["a"]
    engine.add(request("a", (3, 4, 5), max_tokens=5))
    engine.schedule()
    engine.drain()
    assert engine.outputs["a"] == alone(engine.requests["a"], engine.config)[0]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ((), 4, "is empty"),
        ((1,) * 64, 4, "has 64 tokens; .* at most 64, so a prompt has at most 63"),
        ((1,) * 30, 12, "30 tokens and an output of up to 12 take 11 blocks of 4 tokens, and the cache has 10"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(prompt: tuple[int, ...], max_tokens: int, message: str) -> None:
    scheduler = Scheduler(config(num_blocks=10))
    with pytest.raises(ConfigError, match=message):
        scheduler.add(request("a", prompt, max_tokens=max_tokens))
    assert scheduler.unfinished == 0


def test_the_longest_request_that_fits_is_served() -> None:
    engine = Engine(config(num_blocks=10))
    engine.add(request("a", (1,) * 30, max_tokens=11, ignore_eos=True))
    engine.drain()
    engine.check()


def calls(work: Callable[[], object]) -> int:
    """Count the calls of Python and C functions."""
    count = 0

    def count_one(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(count_one)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_the_work_of_a_step_grows_with_the_sequences_but_not_with_their_lengths() -> None:
    def step(running: int, steps: int) -> int:
        scheduler = Scheduler(
            config(max_num_seqs=running, num_blocks=20000, max_model_len=4096, max_num_batched_tokens=8192)
        )
        for number in range(running):
            scheduler.add(request(f"{number}", (number,) * 9, max_tokens=4000))

        def turn() -> None:
            plan = scheduler.schedule()
            assert plan is not None
            scheduler.update(output_of(plan, [1] * len(plan.sequences)))

        for _ in range(steps):
            turn()
        return calls(turn)

    assert step(64, 210) == step(64, 10)  # the same position in a block
    assert step(256, 10) < 4.2 * step(64, 10)
    assert step(64, 10) < 64 * 40


def test_invalid_logits_within_a_prompt_end_its_request() -> None:
    engine = Engine(config())
    for name in "ab":
        engine.add(request(name, (1, 2, 3), max_tokens=6, prompt_logprobs=0))
    assert engine.schedule()
    plan = engine.plans.popleft()
    sampled, logprobs, entries = engine.ranks.step(plan, engine.prompts.popleft())
    entries[0] = replace(entries[0], logprob=math.nan)
    failed, good = engine.scheduler.update(output_of(plan, sampled, logprobs, entries))
    assert (failed.request_id, failed.tokens, failed.finish_reason) == ("a", (), "error")
    assert (good.tokens, good.prompt_logprobs) == ((sampled[1],), tuple(entries[2:]))


@pytest.mark.parametrize("lookahead", [0, 1])
def test_invalid_logits_end_only_their_request(lookahead: int) -> None:
    engine = Engine(config(lookahead=lookahead, max_num_batched_tokens=32))
    for name in "ab":
        engine.add(request(name, tuple(range(9)), max_tokens=6))
    while engine.schedule():
        pass
    # With lookahead, the next step is planned already.
    assert len(engine.made) == 1 + lookahead
    plan = engine.plans.popleft()
    sampled, _, _ = engine.ranks.step(plan, engine.prompts.popleft())
    failed, good = engine.scheduler.update(output_of(plan, [INVALID_TOKEN, sampled[1]]))
    assert (failed.request_id, failed.tokens, failed.finish_reason) == ("a", (), "error")
    assert "not numbers" in failed.error
    engine.ended["a"] = failed._replace(finish_reason="abort")  # for the check at the end: its output is incomplete
    engine.outputs["b"] += good.tokens
    engine.drain()
    engine.check()


def test_a_request_that_cannot_go_on_ends_with_the_reason() -> None:
    engine = Engine(config(max_num_batched_tokens=32))
    for name in "ab":
        engine.add(request(name, tuple(range(9)), max_tokens=6))
    engine.schedule()
    plan = engine.plans.popleft()
    sampled, _, _ = engine.ranks.step(plan, engine.prompts.popleft())
    failed, good = engine.scheduler.update(output_of(plan, sampled, failures=((0, "no token may follow"),)))
    assert (failed.request_id, failed.tokens, failed.finish_reason) == ("a", (), "error")
    assert failed.error == "no token may follow"
    assert (good.request_id, good.tokens) == ("b", (sampled[1],))


def test_a_plan_says_which_tokens_would_end_an_output_too_early() -> None:
    engine = Engine(config(eos=(7,), max_num_batched_tokens=64))
    engine.scheduler.add_end_tokens([8])
    engine.add(request("none", (1, 2), stop_token_ids=[9]))
    engine.add(request("some", (1, 2), stop_token_ids=[9], min_tokens=2))
    engine.add(request("own", (1, 2), stop_token_ids=[9], min_tokens=2, ignore_eos=True))
    engine.schedule()
    none, some, own = engine.plans.popleft().sequences
    assert none.end_tokens == ()
    assert set(some.end_tokens) == {7, 8, 9}
    assert own.end_tokens == (9,)


def test_cached_blocks_of_a_failed_request_are_not_found() -> None:
    engine = Engine(config())
    engine.add(request("a", tuple(range(9)), max_tokens=6))
    engine.schedule()
    plan = engine.plans.popleft()
    engine.ranks.step(plan, engine.prompts.popleft())
    engine.scheduler.update(output_of(plan, [INVALID_TOKEN]))
    engine.ended["a"] = EngineCoreOutput("a", (), finish_reason="abort")
    engine.add(request("b", tuple(range(9)), max_tokens=2))
    engine.drain()
    assert engine.ended["b"].cached_tokens == 0
    engine.check()
