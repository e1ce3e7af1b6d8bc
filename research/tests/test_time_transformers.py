"""Rows of ``generate`` of Transformers beside those of the engine, in one result, table and picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import engine_results
import plot_results
import pytest
import time_transformers
import torch
import transformers

from shotcast.bench.engine_report import EngineRow


@pytest.mark.timing
def test_rows_of_transformers_are_put_before_those_of_the_engine(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    facts = str(tmp_path / "tiny"), "cpu", "float32"
    own = [
        EngineRow(*facts, layout, "auto", batch, 8, 33, *(1.0,) * 8) for layout in ("1x1", "2x1") for batch in (1, 3)
    ]
    stored, picture = tmp_path / "a.json", tmp_path / "a.png"
    stored.write_text(json.dumps({"command": "shotcast bench engine", "rows": [asdict(row) for row in own]}))
    for _ in range(2):  # a second time replaces the rows
        time_transformers.main([str(stored), "--rounds", "1"])
        rows = engine_results.read(stored)
        assert [(row.layout, row.algorithm, row.batch) for row in rows[:2]] == [
            ("1x1", "transformers", batch) for batch in (1, 3)
        ]
        assert rows[2:] == tuple(own)
    for row in rows[:2]:
        assert row.ttft_ms > 0
        assert row.tokens_per_s <= row.batch * row.output / ((row.ttft_ms + 32 * row.tpot_ms) / 1e3) * 1.05
        assert 0 < row.itl_ms <= 2.05 * row.tpot_ms
        # bytes of weights and of 24 tokens of keys and values, by hand
        a_layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
        nbytes = 4 * (2 * a_layer + 64 + 128 * 64) + row.batch * 24 * 2 * 2 * 64 * 4
        assert row.roofline_ms * row.bandwidth_gbps * 1e6 == pytest.approx(nbytes)
    assert engine_results.cells(rows)[0][:3] == ["1x1", "transformers", "1"]
    assert json.loads(stored.read_text())["command"].startswith("shotcast bench engine && python research/")
    plot_results.main([str(picture), "--kind", "engine", "--json", str(stored)])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_kept_results_name_transformers() -> None:
    kept = Path(__file__).parents[2] / "benchmarks" / "data" / "cpu" / "engine_smollm2_f32.json"
    rows = engine_results.read(kept)
    assert engine_results.cells(rows)[0][:2] == ["1x1", "transformers"]
    config = time_transformers.config_of(rows, 2)
    assert (config.model, config.batches, config.prompt, config.output) == ("smollm2", (1, 4, 16), 64, 64)
