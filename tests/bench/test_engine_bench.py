"""``shotcast bench engine``: its measurements, tables and files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from shotcast.bench import engine_bench, engine_report
from shotcast.cli import app
from shotcast.engine.config import parse_layout
from shotcast.errors import ConfigError
from shotcast.models.presets import preset


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    path = tmp_path_factory.mktemp("tiny")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def rows_of(file: Path) -> list[engine_report.EngineRow]:
    return [engine_report.EngineRow(**row) for row in json.loads(file.read_text())["rows"]]


def headers(rows: list[engine_report.EngineRow]) -> list[str]:
    return [name for name, _ in engine_report.columns(rows)]


def cells(rows: list[engine_report.EngineRow]) -> list[list[str]]:
    return [[text(row) for _, text in engine_report.columns(rows)] for row in rows]


@pytest.mark.full
def test_layouts_and_batches(folder: Path, tmp_path: Path) -> None:
    stored = tmp_path / "a.json"
    options = ["--layouts", "1x1,2x1", "--batches", "1,3", "--prompt", "8", "--output", "33", "--rounds", "1"]
    outputs = ["--json", str(stored)]
    arguments = ["bench", "engine", str(folder), "--algorithms", "auto,nccl", *options, *outputs]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(stored.read_text())
    rows = rows_of(stored)
    assert [(row.layout, row.algorithm, row.batch) for row in rows] == [
        *[("1x1", "auto", batch) for batch in (1, 3)],
        *[("2x1", algorithm, batch) for algorithm in ("auto", "nccl") for batch in (1, 3)],
    ]
    for row in rows:
        assert row.ttft_ms > 0
        assert row.tpot_ms > 0
        # all of a round's tokens within its time, which is no less than a request's own
        assert row.tokens_per_s <= row.batch * row.output / ((row.ttft_ms + 32 * row.tpot_ms) / 1e3) * 1.05
        assert row.roofline == pytest.approx(row.roofline_ms / row.itl_ms)
        # half of the gaps are as long, and all of them fit in
        assert 0 < row.itl_ms <= 2.05 * row.tpot_ms
        # bytes of weights and of 24 tokens of keys and values, by hand; other work may hold up the measured bandwidth
        a_layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
        nbytes = 4 * (2 * a_layer + 64 + 128 * 64) + row.batch * 24 * 2 * 2 * 64 * 4
        ranks = 2 if row.layout == "2x1" else 1
        assert row.roofline_ms * row.bandwidth_gbps * 1e6 == pytest.approx(nbytes / ranks)
        assert (row.communication > 0) == (row.layout == "2x1")
    assert document["environment"]["cpu_model"]
    assert "2x1" in result.output
    shown = cells(rows)
    assert shown[0][:3] == ["1x1", "-", "1"]
    assert f"{rows[-1].tpot_ms:.2f}" in shown[-1]


@pytest.mark.full
def test_ways_of_long_prompts_beside_each_other(folder: Path, tmp_path: Path) -> None:
    stored = tmp_path / "a.json"
    options = ["--layouts", "1x1,2x1", "--batches", "1", "--prompt", "8", "--output", "2", "--rounds", "1"]
    ways = ["--device", "cpu", "--overlap", "off,auto", "--json", str(stored)]
    result = CliRunner().invoke(app, ["bench", "engine", str(folder), *options, *ways])
    assert result.exit_code == 0, result.output
    rows = rows_of(stored)
    assert [(row.layout, row.overlap) for row in rows] == [("1x1", "off"), ("2x1", "off"), ("2x1", "auto")]
    assert headers(rows)[:4] == ["layout", "algorithm", "overlap", "batch"]
    assert [line[2] for line in cells(rows)] == ["-", "off", "auto"]
    assert headers(rows[2:])[:3] == ["layout", "algorithm", "batch"], "the default needs no name"


@pytest.mark.full
def test_speculation_beside_steps_without_it(folder: Path, tmp_path: Path) -> None:
    stored = tmp_path / "a.json"
    options = ["--layouts", "1x1", "--batches", "1,2", "--prompt", "30", "--period", "5", "--output", "40"]
    ngram = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}'
    more = ["--rounds", "1", "--speculative-config", ngram, "--json", str(stored)]
    result = CliRunner().invoke(app, ["bench", "engine", str(folder), *options, *more])
    assert result.exit_code == 0, result.output
    rows = rows_of(stored)
    assert [(row.speculation, row.batch, row.period) for row in rows] == [
        (text, batch, 5) for text in ("", ngram) for batch in (1, 2)
    ]
    assert [row.accepted for row in rows[:2]] == [None, None]
    assert any(row.accepted is not None and 0 < row.accepted <= 1 for row in rows[2:])
    assert headers(rows)[:5] == ["layout", "algorithm", "speculation", "accepted", "batch"]
    assert [line[2] for line in cells(rows)] == ["-", "-", "ngram 3", "ngram 3"]


def test_the_roofline_counts_matrices_as_gpus_keep_them() -> None:
    config = engine_bench.EngineBenchConfig("random:llama-3.1-8b", (), (1,), ("auto",), 8, 2, 1, "cuda")
    model = replace(preset("llama-3.1-8b"), stored_bytes=0.5)
    zeros = dict.fromkeys(("ttft_ms", "tpot_ms", "tokens_per_s", "communication"), 0.0)

    def roofline_ms(stored: bool, device: str) -> float:
        given = model if stored else replace(model, stored_bytes=None)
        point = engine_bench.Layout(1, 1), "auto", 1, "bfloat16", 1000.0, 1.0
        return engine_bench.row_of(replace(config, device=device), given, *point, **zeros).roofline_ms

    plain = roofline_ms(False, "cuda")
    assert roofline_ms(True, "cuda") < 0.4 * plain  # a quarter, and the head
    assert roofline_ms(True, "cpu") == roofline_ms(False, "cpu")


@pytest.mark.parametrize("text", ["4", "4x", "0x1", "ax1", "1x1x1"])
def test_layouts_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="a layout must be TxP"):
        parse_layout(text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"algorithms": ("fast",)}, "'fast'"),
        ({"overlaps": ("off", "half")}, "there is no overlap 'half'; choose from"),
        ({"output": 1}, "output at least 2"),
        ({"period": -1}, "period must be at least 0"),
        ({"speculative_config": '{"method": "ngram"}'}, "needs num_speculative_tokens"),
        ({"batches": (0,)}, "must be at least 1"),
        ({"algorithms": ("gloo",)}, "'gloo'"),
    ],
)
def test_plans_that_measure_nothing(change: dict[str, object], text: str) -> None:
    good = {
        "model": "smollm2",
        "layouts": (engine_bench.Layout(1, 1),),
        "batches": (1,),
        "algorithms": ("auto",),
        "prompt": 8,
        "output": 2,
        "rounds": 1,
        "device": "cpu",
    }
    engine_bench.EngineBenchConfig(**good)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=text):
        engine_bench.EngineBenchConfig(**{**good, **change})  # type: ignore[arg-type]
