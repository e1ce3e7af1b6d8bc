"""Steps on static memory with padding, and steps planned ahead, against steps computed one after the other."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import runner_targets as targets
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import shotcast
from shotcast.engine import steps
from shotcast.engine.plan import PENDING, SequenceStep, StepPlan
from shotcast.engine.requests import Progress, Request, SamplingParams
from shotcast.engine.runner import Drawn, Runner
from shotcast.engine.sampler import Sampler
from shotcast.kernels.steps import FIELDS
from shotcast.layers.batch import Logits
from shotcast.layers.clock import HostClock

INTERPRETED = {"TRITON_INTERPRET": "1"}
VOCAB = 203
BAD = 200
"""A token whose embedding is no number."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=False,
        eos_token_id=list(range(0, 24, 3)),
    )
    model = transformers.LlamaForCausalLM(config).float()
    model.model.embed_tokens.weight.data[BAD] = float("nan")
    path = tmp_path_factory.mktemp("runner")
    model.save_pretrained(path)
    return path


def requests() -> list[Request]:
    draw = random.Random(4)
    kinds = [
        SamplingParams(temperature=0, max_tokens=14),
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=5, max_tokens=17, logprobs=2),
        SamplingParams(temperature=0, max_tokens=12, frequency_penalty=1.5, ignore_eos=True),
        SamplingParams(temperature=0.7, top_p=0.9, max_tokens=9, presence_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True),
    ]
    made = []
    for number in range(14):
        prompt = (draw.randrange(40, 43),) * draw.choice([0, 4, 9]) + (draw.randrange(24, BAD), number + 24)
        made.append(Request(f"request {number}", prompt, kinds[number % len(kinds)]))
    return made


def outputs(found: dict[str, list[Progress]]) -> dict[str, tuple[list[int], str | None]]:
    return {
        name: ([token for progress in all_of_it for token in progress.tokens], all_of_it[-1].finish)
        for name, all_of_it in found.items()
    }


class FixedModel:
    """Its next token is 3, whatever came before."""

    config = SimpleNamespace(vocab=5)
    parallel = SimpleNamespace(clock=HostClock(), last=True)

    def caches(self, blocks: int, block_size: int) -> list[Any]:
        return [SimpleNamespace(keys=torch.empty(blocks, block_size))]

    def __call__(self, batch: Any, caches: Any) -> Logits:
        return Logits(torch.eye(5)[3:4], torch.tensor([[3, 1]]))


def test_a_rank_that_nobody_asks_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def runner(reports: bool) -> Runner:
        return Runner(FixedModel(), 4, 4, 2, 16, 0, reports=reports)  # type: ignore[arg-type]

    prompt = SequenceStep(0, 0, (1, 2), (0,), True, True, SamplingParams(temperature=0.0), "first", ())
    drawing = runner(True).execute(StepPlan(7, (prompt,)))
    assert drawing is not None
    assert drawing.result() == Drawn(7, (3,), (None,))

    def sample(*args: Any) -> None:
        raise AssertionError("it drew")

    monkeypatch.setattr(Sampler, "sample", sample)
    assert runner(False).execute(StepPlan(7, (prompt,))) is None
    with pytest.raises(AssertionError, match="it drew"):
        runner(True).execute(StepPlan(7, (prompt,)))


@pytest.mark.parametrize("world_size", [1, 2])
def test_static_steps_and_lookahead_change_no_output(folder: Path, world_size: int) -> None:
    def run(static: bool, lookahead: int, blocks: int) -> tuple[dict[str, list[Progress]], dict[str, int]]:
        options = str(folder), requests(), 7, blocks, static, lookahead
        ranks = shotcast.spawn(targets.answered, world_size, *options, env=INTERPRETED, timeout_s=110)
        assert all(rank == ranks[0] for rank in ranks)
        return ranks[0]

    plain, none = run(False, 0, 64)
    assert (none["static"], none["pending"]) == (0, 0)
    assert {finish for _, finish in outputs(plain).values()} == {"stop", "length"}
    ahead, counts = run(True, 1, 64)
    assert outputs(ahead) == outputs(plain)
    assert min(counts["static"], counts["padded"], counts["pending"]) > 10
    for name, progress in plain.items():
        for one, other in zip(progress, ahead[name], strict=True):
            assert (one.logprobs is None) == (other.logprobs is None)
            for mine, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
                assert (mine and mine.logprob) == pytest.approx(theirs and theirs.logprob, abs=1e-4)
    little, counts = run(True, 1, 19)
    assert counts["preemptions"] > 0
    assert outputs(little) == outputs(plain)


@pytest.mark.parametrize("static", [False, True])
def test_logits_that_are_no_numbers_end_their_request_alone(folder: Path, static: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    asked = [Request("good", (30, 31), params), Request("bad", (30, BAD), params), Request("other", (33, 34), params)]
    options = str(folder), asked, 4, 64, static, int(static)
    ((found, _),) = shotcast.spawn(targets.answered, 1, *options, env=INTERPRETED, timeout_s=60)
    assert outputs(found)["bad"] == ([], "error")
    assert "not numbers" in found["bad"][-1].error
    for name in ("good", "other"):
        tokens, finish = outputs(found)[name]
        assert (len(tokens), finish) == (6, "length")


@given(st.integers(1, 600), st.data())
def test_a_bucket_is_the_next_size(sequences: int, data: st.DataObject) -> None:
    sizes = steps.bucket_sizes(sequences)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == sequences
    count = data.draw(st.integers(1, sequences))
    plan = StepPlan(0, tuple(SequenceStep(slot, 3, (1,), (), False, True) for slot in range(count)))
    bucket = steps.bucket_of(plan, sizes)
    assert bucket is not None
    assert count <= bucket <= max(count + 7, count * 1.25)
    assert all(size < count or size >= bucket for size in sizes)


def test_sizes_are_as_they_are_written_down() -> None:
    assert steps.bucket_sizes(1) == (1,)
    assert steps.bucket_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert steps.bucket_sizes(128)[4:] == (16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)


@pytest.mark.parametrize(
    "odd",
    [SequenceStep(1, 0, (1, 2), (0,), False, False), SequenceStep(1, 0, (1,), (0,), True, True, SamplingParams())],
)
def test_steps_that_no_graph_serves(odd: SequenceStep) -> None:
    usual = SequenceStep(0, 3, (PENDING,), (), False, True)
    assert steps.bucket_of(StepPlan(0, (usual,)), (1, 2)) == 1
    assert steps.bucket_of(StepPlan(0, (usual, odd)), (1, 2)) is None
    assert steps.bucket_of(StepPlan(0, (usual,)), ()) is None


def test_a_step_is_packed_with_padding_that_is_nobodys() -> None:
    out = np.full((4, FIELDS), 99, np.int32)
    plan = StepPlan(0, (SequenceStep(6, 8, (41,), (3,), False, True), SequenceStep(2, 5, (PENDING,), (), False, True)))
    steps.packed(plan, 4, 9, out)
    assert out.tolist() == [[6, 8, 41, 3], [2, 5, PENDING, -1], [9, 0, 0, -1], [9, 0, 0, -1]]
