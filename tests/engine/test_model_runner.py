"""Steps on static memory with padding, and steps planned ahead, compared with eager steps one after the other."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import model_runner_targets as targets
import numpy as np
import prefill_overlap_targets
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from grammar_vocabulary import text_of, vocabulary
from quick_interpreter import GPU_COLLECTIVES, interpret
from shotcast.engine.cuda_graphs import (
    CudaGraphs,
    DeviceState,
    decode_capture_size,
    decode_capture_sizes,
    prefill_capture_sizes,
)
from shotcast.engine.grammar import Grammar
from shotcast.engine.input_batch import (
    InputBatch,
    build_input_batch,
    max_tiles,
    pack_decode,
    pack_prefill,
    part_bounds,
    prefill_layout,
)
from shotcast.engine.model_runner import ModelRunner
from shotcast.engine.outputs import EngineCoreOutput, ModelRunnerOutput
from shotcast.engine.prefill import PrefillGraphs, PrefillOverlap
from shotcast.engine.prefill_forms import BY_COPIES, HALVES, PrefillForms
from shotcast.engine.requests import Request
from shotcast.engine.sampler import Sampler
from shotcast.engine.sampling_params import SamplingParams
from shotcast.engine.step_plan import PENDING_TOKEN, ScheduledSequence, StepPlan
from shotcast.kernels.step_fields import FIELDS, TILE_FIELDS
from shotcast.launcher.spawn import spawn
from shotcast.layers.batch import Logits
from shotcast.layers.step_timer import HostStepTimer
from shotcast.overlap.policy import PLAIN, SEQUENTIAL, Decision

VOCAB = 203
SIZES = (5, 16, targets.TOKENS)
NODES = {"SHOTCAST_RANKS_PER_NODE": "1"}
"""Numbers of tokens for which steps with prompts run on static memory."""
BAD = 200
"""A token whose embedding is NaN."""


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
    made = [Request("long", tuple(range(30, 80)), kinds[0])]
    for number in range(14):
        prompt = (draw.randrange(40, 43),) * draw.choice([0, 4, 9]) + (draw.randrange(24, BAD), number + 24)
        made.append(Request(f"request {number}", prompt, kinds[number % len(kinds)]))
    return made


SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "names": {"type": "array", "items": {"enum": ["ab", "c", "x y"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["count", "names"],
    "additionalProperties": False,
}


def constrained_requests() -> list[Request]:
    """Return requests with every kind of constraint, between others."""
    kinds = {
        "schema": {"grammar": Grammar.json_schema(SCHEMA), "max_tokens": 60},
        "greedy schema": {"grammar": Grammar.json_schema(SCHEMA), "max_tokens": 60, "temperature": 0},
        "regex": {"grammar": Grammar.regex("(ab|[0-9]){3,6}!"), "max_tokens": 30, "logprobs": 1},
        "choice": {"grammar": Grammar.choice(["yes", "no", "yesterday"]), "max_tokens": 12, "frequency_penalty": 1.0},
        "allowed": {"allowed_token_ids": [30, 40, 50], "max_tokens": 9, "top_k": 2},
        "bias": {"logit_bias": {77: 100.0, 78: 100.0}, "max_tokens": 9, "temperature": 0},
        "long enough": {"min_tokens": 15, "max_tokens": 20, "logit_bias": {3: 60.0}, "stop_token_ids": [33]},
        "dead end": {"grammar": Grammar.regex("abc"), "allowed_token_ids": [24 + 97 - 32], "max_tokens": 9},
    }
    made = requests()[:5]
    for number, (name, changes) in enumerate(kinds.items()):
        params = SamplingParams(**{"temperature": 1.0, "seed": number} | changes)  # type: ignore[arg-type]
        made += [Request(name, (30 + number,) * (3 + 7 * number), params), *requests()[5 + number : 6 + number]]
    return made


def outputs(found: dict[str, list[EngineCoreOutput]]) -> dict[str, tuple[list[int], str | None]]:
    return {
        name: ([token for progress in all_of_it for token in progress.tokens], all_of_it[-1].finish_reason)
        for name, all_of_it in found.items()
    }


def run_overlapped(folder: Path, overlap: str, env: dict[str, str] | None = None) -> tuple[Any, dict[str, int]]:
    options = str(folder), requests(), 7, 64, (), 0, 1, "cpu", overlap
    ranks = spawn(targets.outputs_of, 2, *options, timeout_s=300, env=env)
    assert all(found == ranks[0][0] for found, _ in ranks)
    return ranks[0]


def test_halves_of_prompts_change_no_output(folder: Path) -> None:
    """One half of a step communicates while the other computes."""
    plain, none = run_overlapped(folder, "auto")
    assert none["divided"] == none["measured"] == 0, "ranks of one node have no network"
    halves, counts = run_overlapped(folder, PLAIN, NODES)
    assert counts["divided"] > 10
    assert counts["later"] > 0
    assert outputs(halves) == outputs(plain)
    for name, progress in plain.items():
        for one, other in zip(progress, halves[name], strict=True):
            for mine, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
                assert (mine and mine.logprob) == pytest.approx(theirs and theirs.logprob, abs=1e-4)


def test_only_steps_with_prompts_are_divided() -> None:
    """Decode reads all weights for each half."""
    overlap = object.__new__(PrefillOverlap)
    overlap._forms, overlap._size, overlap._least = SimpleNamespace(parts=lambda size: HALVES), 64, 64

    def step(*counts: int) -> InputBatch:
        tokens, rows = np.zeros(sum(counts), np.int32), np.zeros(len(counts), np.int32)
        return InputBatch(tokens, tokens, tokens, rows, rows, np.array(counts, np.int32), rows, rows)

    assert overlap.serves(step(64))
    assert overlap.serves(step(*[1] * 62, 2))
    assert not overlap.serves(step(*[1] * 100))
    assert not overlap.serves(step(63))


@pytest.mark.full
def test_overlap_is_measured_where_there_is_a_network(folder: Path) -> None:
    plain, none = run_overlapped(folder, "off", NODES)
    assert none["divided"] == none["measured"] == 0
    found, counts = run_overlapped(folder, "auto", NODES)
    assert counts["measured"] == 2
    assert outputs(found) == outputs(plain)


@st.composite
def steps(draw: st.DrawFn) -> StepPlan:
    """Sequences that decode first, some with proposals, then prompts."""
    proposals = draw(st.lists(st.integers(0, 4), max_size=4))
    counts = [1 + count for count in proposals] + draw(st.lists(st.integers(2, 9), max_size=4))
    if sum(counts) < 4:
        counts.append(5)
    sequences = []
    for slot, count in enumerate(counts):
        before = draw(st.integers(0, 6))
        tokens = tuple(range(10 * slot, 10 * slot + count))
        drafts = proposals[slot] if slot < len(proposals) else 0
        do_sample = drafts > 0 or draw(st.booleans())
        sequences.append(ScheduledSequence(slot, before, tokens, (), False, do_sample, drafts=drafts))
    return StepPlan(0, tuple(sequences))


@given(steps())
def test_halves_are_steps(plan: StepPlan) -> None:
    tables = np.arange(10 * 8, dtype=np.int32).reshape(10, 8)
    whole = build_input_batch(plan, tables, 4)
    halves = whole.halves()
    for name in ("tokens", "positions", "cache_slots"):
        assert np.array_equal(np.concatenate([getattr(half, name) for half in halves]), getattr(whole, name))
    wanted = [token for each in plan.sequences for token in each.tokens[len(each.tokens) - each.num_sampled :]]
    assert whole.tokens[whole.logits_indices].tolist() == wanted
    first = halves[0]
    sampled = np.concatenate([half.tokens[half.logits_indices] for half in halves])
    assert np.array_equal(sampled, whole.tokens[whole.logits_indices])
    assert abs(len(halves[1].tokens) - len(first.tokens)) <= 3
    for half in halves:
        assert len(half.tokens) > 0
        assert np.array_equal(half.positions[half.query_starts], half.num_computed)
        assert half.num_scheduled.sum() == len(half.tokens)
        assert np.array_equal(half.query_starts, np.cumsum(half.num_scheduled) - half.num_scheduled)
        assert not half.decodes[half.decodes.sum() :].any(), "sequences that decode come first"


class FixedModel:
    """A model whose next token is always 3."""

    config = SimpleNamespace(vocab=5)
    parallel = SimpleNamespace(timer=HostStepTimer(), last=True)

    def allocate_caches(self, blocks: int, block_size: int) -> list[Any]:
        return [SimpleNamespace(keys=torch.empty(blocks, block_size), block_size=block_size)]

    def __call__(self, batch: Any, caches: Any) -> Logits:
        return Logits(torch.eye(5)[3:4], torch.tensor([[3, 1]]))


def test_a_rank_that_does_not_report_samples_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def runner(reports: bool) -> ModelRunner:
        return ModelRunner(FixedModel(), 4, 4, 2, 16, 0, reports=reports)  # type: ignore[arg-type]

    prompt = ScheduledSequence(0, 0, (1, 2), (0,), True, True, SamplingParams(temperature=0.0), "first", ())
    output = runner(True).execute(StepPlan(7, (prompt,)))
    assert output is not None
    assert output.result() == ModelRunnerOutput(7, (3,), (None,))

    def sample(*args: Any) -> None:
        raise AssertionError("it sampled")

    monkeypatch.setattr(Sampler, "sample", sample)
    assert runner(False).execute(StepPlan(7, (prompt,))) is None
    with pytest.raises(AssertionError, match="it sampled"):
        runner(True).execute(StepPlan(7, (prompt,)))


@pytest.mark.full
@pytest.mark.parametrize(("tensor", "stages"), [pytest.param(1, 1, marks=pytest.mark.full), (2, 1), (1, 2)])
def test_static_steps_and_lookahead_change_no_output(folder: Path, tensor: int, stages: int) -> None:
    def run(
        static: tuple[int, ...], lookahead: int, blocks: int
    ) -> tuple[dict[str, list[EngineCoreOutput]], dict[str, int]]:
        options = str(folder), requests(), 7, blocks, static, lookahead, stages
        ranks = interpret(targets.outputs_of, tensor * stages, *options)
        assert all(found == ranks[-1][0] for found, _ in ranks)
        return ranks[-1]

    plain, none = run((), 0, 64)
    assert (none["static"], none["pending"]) == (0, 0)
    assert none["eager"] == none["prompts"] > 10
    assert {finish for _, finish in outputs(plain).values()} == {"stop", "length"}
    ahead, counts = run(SIZES, 1, 64)
    assert outputs(ahead) == outputs(plain)
    assert min(counts["static"], counts["padded"], counts["pending"]) > 10
    assert min(counts["padded prompts"], counts["mixed"], counts["pending mixed"]) > 3
    assert min(counts["silent"], counts["later"]) > 0
    assert counts["eager"] == 0
    assert counts["heads"] == counts["prompts"] - counts["silent"], "the head is computed only for steps that sample"
    for name, progress in plain.items():
        for one, other in zip(progress, ahead[name], strict=True):
            assert (one.logprobs is None) == (other.logprobs is None)
            for mine, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
                assert (mine and mine.logprob) == pytest.approx(theirs and theirs.logprob, abs=1e-4)
    little, counts = run(SIZES[:-1], 1, 19)
    assert counts["preemptions"] > 0
    assert 0 < counts["eager"] < counts["prompts"], "steps that are too long are computed as without static memory"
    assert outputs(little) == outputs(plain)


Outputs = dict[str, list[EngineCoreOutput]]


def run_constrained(
    folder: Path,
    tensor: int,
    stages: int,
    static: tuple[int, ...],
    blocks: int,
    proposer: dict[str, list[int]] | str | None,
) -> tuple[Outputs, dict[str, int]]:
    """Run requests of every kind, with proposals if there is a proposer."""
    wanted = [one for one in constrained_requests()[5::2] if one.request_id != "dead end"] + requests()[1:13]
    tokens = vocabulary(VOCAB, tuple(range(0, 24, 3)))
    options = str(folder), wanted, 7, blocks, static, int(bool(static)), stages, "cpu", "off", tokens, proposer
    ranks = interpret(targets.outputs_of, tensor * stages, *options)
    assert all(found == ranks[-1][0] for found, _ in ranks)
    found: tuple[Outputs, dict[str, int]] = ranks[-1]
    return found


@pytest.fixture(scope="module")
def without_proposals(folder: Path) -> Outputs:
    found = run_constrained(folder, 1, 1, (), 64, None)[0]
    assert {finish for _, finish in outputs(found).values()} == {"stop", "length"}
    return found


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("tensor", "stages", "static", "blocks"),
    [
        (1, 1, (), 64),
        (1, 1, (), 22),
        (2, 1, SIZES, 64),
        pytest.param(1, 2, SIZES, 64, marks=pytest.mark.full),
        pytest.param(2, 1, SIZES, 22, marks=pytest.mark.full),
        pytest.param(2, 2, (), 64, marks=pytest.mark.full),
    ],
)
def test_proposals_change_no_output(
    folder: Path, without_proposals: Outputs, tensor: int, stages: int, static: tuple[int, ...], blocks: int
) -> None:
    """Proposals are right or wrong by chance, and some steps have none."""
    oracle = {name: tokens for name, (tokens, _) in outputs(without_proposals).items()}
    found, counts = run_constrained(folder, tensor, stages, static, blocks, oracle)
    assert_equal(found, without_proposals)
    assert (counts["preemptions"] > 0) == (blocks == 22)
    assert counts["proposed"] > counts["accepted"] > 30
    assert not static or min(counts["static"], counts["pending"]) > 3, "other steps are planned ahead as usual"


def assert_equal(found: Outputs, expected: Outputs) -> None:
    """Check that outputs have the same tokens, and log-probabilities that differ by rounding."""
    assert outputs(found) == outputs(expected)
    for name, progress in expected.items():
        one, other = ([entry for output in each for entry in output.logprobs or ()] for each in (progress, found[name]))
        assert [entry.token for entry in one] == [entry.token for entry in other]
        assert [entry.logprob for entry in one] == pytest.approx([entry.logprob for entry in other], abs=1e-4)


@pytest.mark.parametrize(
    ("tensor", "stages", "static", "blocks", "same"),
    [
        (1, 1, (), 64, True),
        (1, 1, (), 24, False),
        pytest.param(2, 1, SIZES, 64, True, marks=pytest.mark.full),
        pytest.param(1, 2, SIZES, 64, False, marks=pytest.mark.full),
        pytest.param(2, 2, (), 24, True, marks=pytest.mark.full),
    ],
)
def test_a_draft_model_changes_no_output(
    folder: Path,
    tmp_path: Path,
    without_proposals: Outputs,
    tensor: int,
    stages: int,
    static: tuple[int, ...],
    blocks: int,
    same: bool,
) -> None:
    """The draft is the model itself, or one of other weights and another size, with a smaller vocabulary."""
    draft = folder
    if not same:
        torch.manual_seed(1)
        sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.LlamaConfig(vocab_size=VOCAB - 9, max_position_embeddings=256, **sizes)
        transformers.LlamaForCausalLM(config).float().save_pretrained(tmp_path)
        draft = tmp_path
    found, counts = run_constrained(folder, tensor, stages, static, blocks, str(draft))
    assert_equal(found, without_proposals)
    assert counts["proposed"] > (10 if (tensor, stages) == (2, 1) else 30)
    assert counts["accepted"] > 6 if same else counts["accepted"] < 0.3 * counts["proposed"]
    assert (counts["preemptions"] > 0) == (blocks == 24)


@pytest.mark.parametrize(
    ("tensor", "static", "blocks"), [(1, (), 64), (1, (), 21), pytest.param(2, SIZES, 64, marks=pytest.mark.full)]
)
def test_a_draft_that_is_the_model_itself_is_always_right(
    folder: Path, tensor: int, static: tuple[int, ...], blocks: int
) -> None:
    """So its cache holds the tokens of the model's, and it samples by the same noise."""
    params = [SamplingParams(temperature=0.0, max_tokens=25), SamplingParams(seed=3, max_tokens=25, top_k=5)]
    params = [replace(each, ignore_eos=True) for each in params]
    wanted = [Request(f"{number}", (40 + number % 3,) * (3 + number), params[number % 2]) for number in range(9)]
    options = str(folder), wanted, 7, blocks, static, int(bool(static)), 1, "cpu", "off", None, str(folder)
    _, counts = interpret(targets.outputs_of, tensor, *options)[-1]
    assert counts["accepted"] / counts["proposed"] > 0.97
    assert counts["proposed"] > 50
    assert (counts["preemptions"] > 0) == (blocks == 21)


@pytest.mark.every(3)
@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 1), (1, 2)])
def test_prompt_logprobs_on_static_memory(folder: Path, tensor: int, stages: int) -> None:
    """Steps that report them are computed without graphs, between steps on static memory and planned ahead."""
    wanted = [
        Request(one.request_id, one.prompt, replace(one.params, prompt_logprobs=number % 3))
        if number % 2 == 0 else one
        for number, one in enumerate(requests())
    ]  # fmt: skip
    options = str(folder), wanted, 7, 64, SIZES, 1, stages
    ranks = interpret(targets.outputs_of, tensor * stages, *options)
    assert all(found == ranks[-1][0] for found, _ in ranks)
    found, counts = ranks[-1]
    assert 0 < counts["eager"] < counts["prompts"]
    assert min(counts["static"], counts["pending"], counts["later"]) > 0
    reference = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    for request in wanted:
        first, *later = found[request.request_id]
        assert all(output.prompt_logprobs is None for output in later)
        if request.params.prompt_logprobs is None:
            assert first.prompt_logprobs is None
            continue
        with torch.inference_mode():
            expected = reference(torch.tensor([request.prompt])).logits[0].log_softmax(-1)
        assert first.prompt_logprobs is not None
        assert len(first.prompt_logprobs) == len(request.prompt) - 1
        for entry, row, token in zip(first.prompt_logprobs, expected, request.prompt[1:], strict=False):
            assert (entry.token, len(entry.top)) == (token, request.params.prompt_logprobs)
            assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(("tensor", "stages"), [pytest.param(1, 1, marks=pytest.mark.full), (2, 1), (1, 2)])
def test_constraints_hold_on_all_ranks_and_in_steps_planned_ahead(folder: Path, tensor: int, stages: int) -> None:
    wanted, ends = constrained_requests(), tuple(range(0, 24, 3))

    def run(static: tuple[int, ...], lookahead: int, blocks: int) -> tuple[dict[str, Any], dict[str, int]]:
        options = str(folder), wanted, 7, blocks, static, lookahead, stages, "cpu", "off", vocabulary(VOCAB, ends)
        ranks = interpret(targets.outputs_of, tensor * stages, *options)
        assert all(found == ranks[-1][0] for found, _ in ranks)
        return outputs(ranks[-1][0]), ranks[-1][1]

    found, _ = run((), 0, 64)
    for name in ("schema", "greedy schema"):
        tokens, finish = found[name]
        assert finish == "stop"
        jsonschema.validate(json.loads(text_of(tokens)), SCHEMA)
    assert re.fullmatch("(ab|[0-9]){3,6}!", text_of(found["regex"][0]))
    assert text_of(found["choice"][0]) in ("yes", "no", "yesterday")
    assert set(found["allowed"][0]) <= {30, 40, 50}
    assert len(set(found["allowed"][0])) == 2
    assert set(found["bias"][0]) <= {77, 78}
    assert found["long enough"][0][15:] == [3]
    assert not {*ends, 33} & set(found["long enough"][0][:15])
    assert found["dead end"] == ([24 + 97 - 32], "error")
    ahead, counts = run(SIZES, 1, 24)
    assert ahead == found
    assert min(counts["static"], counts["pending"], counts["pending mixed"]) > 3
    assert counts["preemptions"] > 0


@pytest.mark.full
def test_halves_on_static_memory_change_no_output(folder: Path) -> None:
    """Steps of all three sizes are divided: with padding, cut sequences and sequences that wait for their token."""

    def run(way: str) -> tuple[dict[str, list[EngineCoreOutput]], dict[str, int]]:
        ranks = interpret(targets.outputs_of, 2, str(folder), requests(), 7, 64, SIZES, 1, 1, "cpu", way)
        assert all(found == ranks[0][0] for found, _ in ranks)
        return ranks[0]

    whole, none = run("off")
    assert none["divided"] == none["measured"] == 0
    halves, counts = run(BY_COPIES)
    assert counts["divided"] == counts["prompts"] > 10
    assert min(counts["padded prompts"], counts["mixed"], counts["pending mixed"], counts["later"]) > 0
    assert outputs(halves) == outputs(whole)


@pytest.mark.full
def test_halves_on_a_second_stream_change_no_answer(folder: Path) -> None:
    """Sums go by copy engines, in the interpreter."""
    prompts, ways = [list(range(30, 50)), [40, 41], list(range(60, 69))], ("off", BY_COPIES, "auto")
    options = str(folder), "cpu", SIZES, targets.LIMIT, ways, prompts
    for found in interpret(prefill_overlap_targets.answers, 2, *options, env=GPU_COLLECTIVES):
        for first, again, _ in found.values():
            assert first == again == found["off"][0]
        assert {decision.way for decision in found[BY_COPIES][2].values()} == {BY_COPIES}
        assert all(set(decision.median_us) == {SEQUENTIAL, BY_COPIES} for decision in found["auto"][2].values())


@pytest.mark.parametrize("static", [False, True])
def test_invalid_logits_end_only_their_request(folder: Path, static: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    request_list = [
        Request("good", (30, 31), params),
        Request("bad", (30, BAD), params),
        Request("other", (33, 34), params),
    ]
    options = str(folder), request_list, 4, 64, SIZES if static else (), int(static)
    ((found, _),) = interpret(targets.outputs_of, 1, *options)
    assert outputs(found)["bad"] == ([], "error")
    assert "not numbers" in found["bad"][-1].error
    for name in ("good", "other"):
        tokens, finish = outputs(found)[name]
        assert (len(tokens), finish) == (6, "length")


@given(st.integers(1, 600), st.data())
def test_a_decode_step_takes_the_next_size(sequences: int, data: st.DataObject) -> None:
    sizes = decode_capture_sizes(sequences)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == sequences
    count = data.draw(st.integers(1, sequences))
    plan = StepPlan(0, tuple(ScheduledSequence(slot, 3, (1,), (), False, True) for slot in range(count)))
    size = decode_capture_size(plan, sizes)
    assert size is not None
    assert count <= size <= max(count + 7, count * 1.25)
    assert all(size < count or size >= size for size in sizes)


def test_decode_sizes_match_the_documentation() -> None:
    assert decode_capture_sizes(1) == (1,)
    assert decode_capture_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert decode_capture_sizes(128)[4:] == (16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)


@given(st.integers(1, 20000), st.data())
def test_a_step_with_prompts_takes_the_next_size(most: int, data: st.DataObject) -> None:
    sizes = prefill_capture_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    assert len(sizes) <= 56
    count = data.draw(st.integers(1, most))
    padded = min(size for size in sizes if size >= count)
    assert padded <= max(16, 2 * count if count <= 128 else 1.5 * count)
    assert count <= 512 or padded <= max(count + 63, 1.125 * count)


def test_prefill_sizes_match_the_documentation() -> None:
    assert prefill_capture_sizes(16) == (16,)
    assert prefill_capture_sizes(100) == (16, 32, 64, 100)
    assert prefill_capture_sizes(50, 100) == (16, 32, 50, 64, 100)
    assert prefill_capture_sizes(2048) == (
        16,
        32,
        64,
        128,
        192,
        256,
        384,
        *range(512, 1024, 64),
        *range(1024, 2049, 128),
    )


BLOCK, ROWS, WIDTH = 4, 6, 30


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Generate plans with sequences that decode, some of which wait for their token, and chunks of prompts."""
    made = []
    for slot in draw(st.permutations(range(ROWS)))[: draw(st.integers(1, ROWS))]:
        count = draw(st.just(1) | st.integers(2, 40))
        tokens = tuple(draw(st.lists(st.integers(0, 999), min_size=count, max_size=count)))
        drafts = draw(st.sampled_from([0, count - 1])) if count <= 5 else 0
        if count == 1 and draw(st.booleans()):
            tokens = (PENDING_TOKEN,)
        before, do_sample = draw(st.integers(0, BLOCK * WIDTH - 40)), drafts > 0 or draw(st.booleans())
        made.append(ScheduledSequence(slot, before, tokens, (), False, do_sample, drafts=drafts))
    return StepPlan(0, tuple(sorted(made, key=lambda sequence: len(sequence.tokens) > 1 + sequence.drafts)))


SAMPLED = 5 * ROWS
"""The most tokens that such a plan samples."""


@given(plans(), st.integers(1, 50), st.integers(0, 50), st.integers(0, 5), st.integers(0, 9), st.integers(1, 3))
def test_a_step_with_prompts_is_packed(
    plan: StepPlan, most: int, padding: int, cells: int, more: int, parts: int
) -> None:
    """Check every field that a graph reads, token by token, and that the tiles of each part fit into their room."""
    tables = np.random.default_rng(3).permutation(ROWS * WIDTH).astype(np.int32).reshape(ROWS, WIDTH)
    batch = build_input_batch(plan, tables, BLOCK)
    size = sum(len(each.tokens) for each in plan.sequences) + padding
    bounds = part_bounds(size, parts)
    assert [first for first, _ in bounds] + [size] == [0, *(stop for _, stop in bounds)]
    layout = prefill_layout(size, SAMPLED, [max_tiles(stop - first, ROWS, most) + more for first, stop in bounds])
    filled = np.arange(2 * cells, dtype=np.int32).reshape(cells, 2)
    out = np.full(layout.block_updates.start + 2 * cells, 12345, np.int32)
    pack_prefill(batch, filled, most, 77, 88, layout, out)

    tokens, positions, slots, logits_indices, rows, owners = [], [], [], [], [], []
    for sequence in plan.sequences:
        for place, token in enumerate(sequence.tokens, sequence.num_computed):
            tokens.append(-1 - sequence.slot if token == PENDING_TOKEN else token)
            positions.append(place)
            slots.append(tables[sequence.slot, place // BLOCK] * BLOCK + place % BLOCK)
            owners.append((sequence.slot, place))
        for place in range(sequence.num_sampled):
            logits_indices.append(len(tokens) - sequence.num_sampled + place)
            rows.append(77 if sequence.drafts else sequence.slot)
    assert out[layout.tokens].tolist() == tokens + [0] * padding
    assert out[layout.positions].tolist() == positions + [0] * padding
    assert out[layout.cache_slots].tolist() == slots + [88] * padding
    assert out[layout.logits_indices].tolist() == logits_indices + [0] * (SAMPLED - len(logits_indices))
    assert out[layout.logits_rows].tolist() == rows + [77] * (SAMPLED - len(rows))
    assert out[layout.num_block_updates] == cells
    assert out[layout.block_updates].tolist() == list(range(2 * cells))
    covered: list[tuple[int, int] | None] = [(-1, -1)] * size
    for (begin, stop), tiles in zip(bounds, layout.tiles, strict=True):
        for row, first, count, start in out[tiles].reshape(-1, TILE_FIELDS).tolist():
            assert count <= most
            assert begin + first + count <= stop
            for place in range(begin + first, begin + first + count):
                assert covered[place] == (-1, -1), "a token in two tiles"
                covered[place] = (row, start + place - begin - first) if start >= 0 else None
    assert covered == [*owners, *[None] * padding]


@pytest.mark.parametrize(
    "odd",
    [
        ScheduledSequence(1, 0, (1, 2), (0,), False, False),
        ScheduledSequence(1, 0, (1,), (0,), True, True, SamplingParams()),
    ],
)
def test_steps_that_no_graph_serves(odd: ScheduledSequence) -> None:
    usual = ScheduledSequence(0, 3, (PENDING_TOKEN,), (), False, True)
    assert decode_capture_size(StepPlan(0, (usual,)), (1, 2)) == 1
    assert decode_capture_size(StepPlan(0, (usual, odd)), (1, 2)) is None
    assert decode_capture_size(StepPlan(0, (usual,)), ()) is None


def test_a_decode_step_is_packed_with_padding() -> None:
    out = np.full((4, FIELDS), 99, np.int32)
    plan = StepPlan(
        0,
        (ScheduledSequence(6, 8, (41,), (3,), False, True), ScheduledSequence(2, 5, (PENDING_TOKEN,), (), False, True)),
    )
    pack_decode(plan, 4, 9, out)
    assert out.tolist() == [[6, 8, 41, 3], [2, 5, PENDING_TOKEN, -1], [9, 0, 0, -1], [9, 0, 0, -1]]


def test_a_graph_that_was_not_captured_is_not_replayed() -> None:
    """It would compute on the current contents of memory, which belong to the step before."""
    graphs = CudaGraphs(torch.device("cpu"), HostStepTimer())
    calls: list[int] = []
    graphs.get_or_capture("step", lambda: calls.append(1))
    graphs.get("step")()
    assert calls == [1]
    with pytest.raises(KeyError):
        graphs.get("another")


def test_steps_near_a_measured_size_take_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = prefill_capture_sizes(2048)
    tables, last_tokens = torch.zeros(5, 2, dtype=torch.int32), torch.zeros(5, dtype=torch.int64)
    model: Any = SimpleNamespace(
        max_tile_tokens=lambda size: 32,
        config=SimpleNamespace(hidden=8),
        dtype=torch.float32,
        parallel=SimpleNamespace(last=True, timer=None),
    )
    state = DeviceState(model, [], tables, last_tokens, None)
    forms = PrefillForms(model, "off", {})
    made = PrefillGraphs(state, sizes, (4,), CudaGraphs(torch.device("cpu"), HostStepTimer()), forms)
    measured: list[int] = []

    def undecided(self: PrefillForms, size: int) -> bool:
        if size < 512 or size > 1600:
            self.decisions.setdefault(size, Decision(SEQUENTIAL, "too short, or too long", {}, {}))
        return size not in self.decisions

    def decide(self: PrefillForms, size: int, run_of: Any) -> None:
        measured.append(size)
        self.decisions[size] = Decision(BY_COPIES if size < 1200 else SEQUENTIAL, "", {SEQUENTIAL: 1.0}, {})

    monkeypatch.setattr(PrefillForms, "undecided", undecided)
    monkeypatch.setattr(PrefillForms, "decide", decide)
    monkeypatch.setattr(PrefillGraphs, "_prompts", lambda self, size: None)
    made.capture()
    assert measured == [1536, 1152, 832, 576]
    halves = [size for size in sizes if made._parts[size] == HALVES]
    assert halves == [512, 576, 640, 704, 768, 832, 896, 960, 1024, 1152]
    assert list(forms.decisions) == list(reversed(sizes))
    again = PrefillGraphs(state, sizes, (4,), CudaGraphs(torch.device("cpu"), HostStepTimer()), forms)
    again.capture()
    assert again._parts == made._parts
    assert len(measured) == 4


def test_the_packed_step_has_room_for_the_size_that_needs_most() -> None:
    """Smaller sizes may have smaller tiles, whose table may take more room than the tokens of the largest size."""
    tables, last_tokens = torch.zeros(65, 2, dtype=torch.int32), torch.zeros(65, dtype=torch.int64)
    model: Any = SimpleNamespace(
        max_tile_tokens=lambda size: 32 if size > 512 else 8,
        config=SimpleNamespace(hidden=8),
        dtype=torch.float32,
        parallel=SimpleNamespace(last=True),
    )
    state = DeviceState(model, [], tables, last_tokens, None)
    graphs = CudaGraphs(torch.device("cpu"), HostStepTimer())
    made = PrefillGraphs(state, (512, 513), (64,), graphs, PrefillForms(model, "off", {}))
    before = {size: layout.block_updates.start for size, layout in made._layouts.items()}
    assert before[512, 1] > before[513, 1]
    assert made._packed.numel() >= max(before.values()) + 2 * tables.numel()
