"""Random checkpoints in quantized formats: the engine's readers take them, and their weights are of the usual size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from quantized_checkpoint import CYCLES, DEVIATION, FORMATS, write

from shotcast import LLM, SamplingParams
from shotcast.layers.quantized import Float8Rows, GroupedRows
from shotcast.models.presets import preset
from shotcast.models.source import open_checkpoint

SMALL = replace(preset("llama-3.1-8b:2"), hidden=256, intermediate=384, heads=4, kv_heads=2, head_dim=64, vocab=96)


@pytest.mark.parametrize("form", FORMATS)
def test_any_format_is_read(tmp_path: Path, form: str) -> None:
    write(SMALL, form, tmp_path / "made")
    checkpoint = open_checkpoint(str(tmp_path / "made"))
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        values = checkpoint.read(name)
        assert tuple(values.shape) == SMALL.tensors()[name]
        assert 0.8 * DEVIATION < values.std() < 1.2 * DEVIATION
        kept = checkpoint.read_stored(name)
        assert isinstance(kept, Float8Rows if form == "fp8" else GroupedRows)
    assert checkpoint.config.layers == 2
    checkpoint.close()


@pytest.mark.parametrize("vocab", [96, 100])
def test_each_token_is_followed_by_the_next_of_its_cycle(tmp_path: Path, vocab: int) -> None:
    write(replace(SMALL, vocab=vocab), CYCLES, tmp_path / "made")
    prompt, last = [5, 31, 70], [vocab - 1]
    with LLM(str(tmp_path / "made"), device="cpu") as llm:
        greedy = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        outputs = llm.generate([prompt, last], greedy)
    assert outputs[0].tokens == [71, 72, 73, 74, 75]
    first = 96 if vocab > 96 else 64
    assert outputs[1].tokens == [first + n % (vocab - first) for n in range(5)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("source", ["ngram", "draft_model"])
def test_proposals_predict_it_without_changing_it(tmp_path: Path, source: str, device: str) -> None:
    write(SMALL, CYCLES, tmp_path / "made")
    write(replace(SMALL, layers=1, hidden=128, heads=2, kv_heads=1), CYCLES, tmp_path / "draft")
    prompts = [[first] for first in (3, 40, 70)]
    greedy = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    options: dict[str, object] = {"method": source, "num_speculative_tokens": 5}
    options |= {"prompt_lookup_max": 3} if source == "ngram" else {"model": str(tmp_path / "draft")}
    with LLM(str(tmp_path / "made"), device=device) as llm:
        plain = [output.tokens for output in llm.generate(prompts, greedy)]
    with LLM(str(tmp_path / "made"), device=device, speculative_config=options) as llm:
        assert [output.tokens for output in llm.generate(prompts, greedy)] == plain
        stats = llm.stats()
    assert plain[0] == [(4 + n) % 32 for n in range(200)]
    assert stats.accepted_tokens == stats.proposed_tokens > 50
