"""Proposals from n-grams, the configuration of speculative decoding, and when it is used."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shotcast.engine.config import MAX_PROPOSALS, EngineConfig
from shotcast.engine.draft_model import DraftModel
from shotcast.engine.sampling_params import SamplingParams
from shotcast.engine.sequence import SequenceState
from shotcast.engine.speculation import (
    FORESEEN_STEPS,
    KEPT_STEPS,
    SETTLING_STEPS,
    TRIAL_STEPS,
    ForesightPolicy,
    MeasuringPolicy,
    NgramProposer,
    Speculation,
    num_accepted,
)
from shotcast.engine.speculative_config import SpeculativeConfig
from shotcast.engine.step_plan import ScheduledSequence, StepPlan
from shotcast.errors import ConfigError


def sequence(tokens: list[int]) -> SequenceState:
    return SequenceState("a", SamplingParams(), 1, tokens, 1000)


def expected(tokens: list[int], longest: int, shortest: int, count: int) -> list[int]:
    """Return the proposals by the definition: extend the text, token by token, as the last occurrence went on."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for place in range(len(tokens) - length - 1, -1, -1):
            if tokens[place : place + length] == tokens[-length:]:
                text = list(tokens)
                for number in range(count):
                    text.append(text[place + length + number])
                return text[len(tokens) :]
    return []


texts = st.lists(st.sampled_from([0, 1, 2, 256, 65536, 2**24]), min_size=1, max_size=30)


@given(texts, texts, st.integers(1, 4), st.integers(1, 4), st.integers(1, 9))
def test_ngrams_are_looked_up_where_they_occurred_last(
    text: list[int], later: list[int], longest: int, shortest: int, count: int
) -> None:
    """Some tokens have the bytes of others, shifted."""
    shortest = min(shortest, longest)
    proposer, state = NgramProposer(longest, shortest), sequence(list(text))
    assert proposer.propose(state, count) == expected(text, longest, shortest, count)
    state.tokens += later
    assert proposer.propose(state, count) == expected(text + later, longest, shortest, count)


@given(st.lists(st.integers(0, 2), max_size=5), st.lists(st.integers(0, 2), min_size=5, max_size=6))
def test_proposals_are_accepted_up_to_the_first_that_differs(proposals: list[int], sampled: list[int]) -> None:
    count = num_accepted(proposals, sampled)
    assert proposals[:count] == sampled[:count]
    assert count == len(proposals) or proposals[count] != sampled[count]


class Foreseeing:
    """A policy of n-grams at work: steps take 1 s, and those with proposals ``seconds``; both would give, and give,
    ``tokens``."""

    def __init__(self) -> None:
        self.policy = ForesightPolicy()
        self.tokens, self.given, self.seconds = 1.0, None, 1.2

    def steps(self, count: int, running: int = 1) -> list[bool]:
        found = []
        for number in range(count):
            found.append(speculates := self.policy.speculates(running))
            slow = 100.0 if number % TRIAL_STEPS == 5 else 0.0  # does not count
            given = self.tokens if self.given is None else self.given
            self.policy.record(running, speculates, *((given, self.seconds) if speculates else (1.0, 1.0 + slow)))
            if not speculates:
                self.policy.foresee(running, self.tokens)
        return found


def test_ngrams_are_not_tried_where_nothing_repeats() -> None:
    assert not any(Foreseeing().steps(10 * KEPT_STEPS))


def test_ngrams_are_used_as_soon_as_text_repeats_and_as_long() -> None:
    decoding = Foreseeing()
    decoding.steps(TRIAL_STEPS + SETTLING_STEPS)
    decoding.tokens = 3.0
    assert decoding.steps(FORESEEN_STEPS + 1)[-1]
    assert all(decoding.steps(KEPT_STEPS))
    decoding.tokens = 1.1  # and a step takes 1.2 s
    assert not decoding.steps(2 * TRIAL_STEPS)[-1]  # the first of these count in part
    decoding.tokens = 1.3
    assert decoding.steps(2 * FORESEEN_STEPS + 1)[-1]


def test_ngrams_that_give_less_than_was_foreseen_wait() -> None:
    decoding = Foreseeing()
    decoding.steps(TRIAL_STEPS + SETTLING_STEPS)
    decoding.tokens, decoding.given = 3.0, 1.0
    found = decoding.steps(KEPT_STEPS)
    assert sum(found) == TRIAL_STEPS + SETTLING_STEPS
    assert sum(decoding.steps(KEPT_STEPS)) == TRIAL_STEPS + SETTLING_STEPS


def test_a_cost_that_was_measured_counts() -> None:
    decoding = Foreseeing()
    decoding.steps(TRIAL_STEPS + SETTLING_STEPS)
    decoding.tokens, decoding.seconds = 2.0, 4.0
    assert any(decoding.steps(KEPT_STEPS))
    assert not any(decoding.steps(4 * KEPT_STEPS))
    decoding.tokens = 4.5
    assert any(decoding.steps(TRIAL_STEPS))
    assert not decoding.policy.speculates(40), "numbers of sequences are decided on apart"


@pytest.mark.parametrize(("most", "accepted"), [(5, 3.0), (2, 1.2)])
def test_what_would_have_been_accepted_is_known_afterwards(most: int, accepted: float) -> None:
    """A text that repeats, but for one token: of five proposals, three are accepted."""
    told: list[tuple[int, float]] = []
    policy = ForesightPolicy()
    policy.foresee = lambda running, tokens: told.append((running, tokens))  # type: ignore[method-assign]
    speculation = Speculation(5, most, NgramProposer(3, 2), policy)
    state = sequence([1, 2, 3, 4, 5, 6, 7, 8, 1, 2])
    speculation.foresee(state, 1)
    for token in (3, 4, 5, 9, 9, 9):
        state.tokens.append(token)
        speculation.foresee(state, 1)
    assert told == [(1, 1 + accepted), (1, 1.0), (1, 1.0)]
    told.clear()
    Speculation(5, 5, NgramProposer(3, 2), MeasuringPolicy()).foresee(state, 1)
    assert not told


class Decoding:
    """A policy at work: steps take 1 s, and those with proposals give ``tokens`` in ``seconds``."""

    def __init__(self) -> None:
        self.policy = MeasuringPolicy()
        self.tokens, self.seconds = 1.0, 1.0

    def steps(self, count: int, running: int = 1) -> list[bool]:
        found = []
        for _ in range(count):
            found.append(speculates := self.policy.speculates(running))
            self.policy.record(running, speculates, *((self.tokens, self.seconds) if speculates else (1.0, 1.0)))
        return found


TRIAL = SETTLING_STEPS + TRIAL_STEPS


@pytest.mark.parametrize(
    ("tokens", "seconds", "pays"), [(2.0, 1.5, True), (2.0, 2.5, False), (1.0, 1.1, False), (1.0, 0.9, True)]
)
def test_steps_have_proposals_where_these_pay(tokens: float, seconds: float, pays: bool) -> None:
    decoding = Decoding()
    decoding.tokens, decoding.seconds = tokens, seconds
    assert decoding.steps(2 * TRIAL) == [True] * TRIAL + [False] * TRIAL
    kept = SETTLING_STEPS + KEPT_STEPS
    assert decoding.steps(kept) == [pays] * kept
    assert decoding.steps(TRIAL) == [not pays] * TRIAL
    assert decoding.steps(10) == [pays] * 10


def test_proposals_are_tried_again_since_texts_change() -> None:
    decoding = Decoding()
    decoding.steps(2 * TRIAL)
    assert decoding.steps(SETTLING_STEPS + KEPT_STEPS)[-1] is False
    decoding.tokens = 3.0
    decoding.steps(TRIAL)
    assert decoding.steps(1) == [True]


def test_numbers_of_sequences_are_decided_on_apart() -> None:
    """A step of many sequences takes longer with proposals than one of few."""
    decoding = Decoding()
    decoding.tokens = 2.0
    decoding.steps(2 * TRIAL, running=2)
    decoding.seconds = 4.0
    decoding.steps(2 * TRIAL, running=40)
    for _ in range(3):
        assert decoding.policy.speculates(3)
        assert not decoding.policy.speculates(63)


def test_a_slow_first_step_and_steps_planned_before_a_change_do_not_count() -> None:
    decoding = Decoding()
    decoding.tokens, decoding.seconds = 2.0, 1000.0
    decoding.steps(SETTLING_STEPS)
    decoding.seconds = 1.5
    decoding.steps(TRIAL_STEPS)
    decoding.policy.record(1, True, 0.0, 1000.0)
    decoding.steps(TRIAL)
    assert decoding.steps(5) == [True] * 5


def test_options_have_the_names_of_vllm() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'
    config = EngineConfig("m", speculative_config=text)
    assert config.speculation == SpeculativeConfig(4, "ngram", "", 4, 4)
    assert EngineConfig("m", speculative_config=config.speculative_config) == config
    assert config.max_proposals == 4 * 64
    assert EngineConfig("m", speculative_config=text, max_num_seqs=3).max_proposals == 12
    assert EngineConfig("m", speculative_config=text.replace('s": 4', 's": 32')).max_proposals == MAX_PROPOSALS
    made = Speculation.of(config)
    assert made is not None
    assert (made.count, made.most, made.proposer) == (4, 256, NgramProposer(4, 4))
    assert isinstance(made.policy, ForesightPolicy)
    plain = EngineConfig("m")
    assert (plain.speculation, plain.max_proposals, Speculation.of(plain)) == (None, 0, None)


@pytest.mark.parametrize(
    ("given", "bounds"),
    [({}, (5, 5)), ({"prompt_lookup_min": 2}, (2, 2)), ({"prompt_lookup_max": 6, "prompt_lookup_min": 2}, (6, 2))],
)
def test_defaults_of_the_lookup(given: dict[str, int], bounds: tuple[int, int]) -> None:
    found = SpeculativeConfig.read({"method": "ngram", "num_speculative_tokens": 1, **given})
    assert (found.prompt_lookup_max, found.prompt_lookup_min) == bounds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{", "speculative_config is not JSON"),
        ("[]", "must be options such as"),
        (3, "must be options such as"),
        ({"method": "ngram"}, "needs num_speculative_tokens"),
        ({"num_speculative_tokens": 4}, "method of speculative_config must be ngram or draft_model, not ''"),
        ({"method": "eagle", "num_speculative_tokens": 4}, "not 'eagle'"),
        ({"method": 3, "num_speculative_tokens": 4}, "method of speculative_config must be a string"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "must be from 1 to 32, not 0"),
        ({"method": "ngram", "num_speculative_tokens": True}, "must be from 1 to 32, not True"),
        ({"method": "ngram", "num_speculative_tokens": 33}, "must be from 1 to 32, not 33"),
        ({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": -1}, "must be from 0 to 64, not -1"),
        (
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 3},
            "prompt_lookup_min (3) must not exceed prompt_lookup_max (2)",
        ),
        (
            {"method": "ngram", "num_speculative_token": 4},
            "no option 'num_speculative_token'; did you mean num_speculative_tokens?",
        ),
        ({"method": "ngram", "num_speculative_tokens": 4, "quux": 1}, "no option 'quux'; it has num_speculative"),
        ({"method": "ngram", "num_speculative_tokens": 4, "model": "m"}, "method ngram of speculative_config has no"),
        ({"method": "draft_model", "num_speculative_tokens": 4}, "method draft_model of speculative_config needs"),
        ({"model": "m", "num_speculative_tokens": 4, "prompt_lookup_max": 3}, "are for method ngram"),
    ],
)
def test_options_that_cannot_be_used(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineConfig("m", speculative_config=options)


class RecordingRunner:
    """A runner that records what it is told and what it computes."""

    vocab = 100

    def __init__(self) -> None:
        self.sampler = SimpleNamespace(advance=lambda slot, count: None)
        self.last_tokens = torch.zeros(4, dtype=torch.int64)
        self.told: list[ScheduledSequence] = []
        self.computed: list[ScheduledSequence] = []

    def leave_out(self, plan: StepPlan) -> None:
        self.told += plan.sequences

    def execute(self, plan: StepPlan) -> None:
        self.computed += plan.sequences


def test_a_draft_model_hears_of_blocks_whose_tokens_it_does_not_compute() -> None:
    """A graph of decoding would enter the first block of a plan as that of the one token that is computed."""
    runner = RecordingRunner()
    sequences = (
        ScheduledSequence(0, 40, tuple(range(8)), (7, 8), False, True, drafted=(3, (9,))),  # one token, left out before
        ScheduledSequence(1, 16, (5,), (4,), False, True, drafted=(16, ())),  # as the model computes it
        ScheduledSequence(2, 16, (6,), (5,), False, True, drafted=None),
        ScheduledSequence(3, 2, (8,), (), False, True, drafted=(0, (1, 2))),  # all that was left out, and its own
    )
    DraftModel(runner, 100).propose(StepPlan(0, sequences), None, torch.zeros(4, dtype=torch.int64))  # type: ignore[arg-type]
    assert {(part.slot, part.blocks) for part in runner.told} == {(0, (7, 8)), (2, (5,)), (3, ())}
    computed = [(part.slot, part.num_computed, part.tokens, part.blocks) for part in runner.computed]
    assert computed == [(0, 3, (9,), ()), (1, 16, (5,), (4,)), (3, 0, (1, 2, 8), ())]
