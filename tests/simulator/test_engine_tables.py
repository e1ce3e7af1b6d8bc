"""Measured runs of the engine, predicted by constants that no run of an engine was fitted to."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean

import forecast
import pytest

from shotcast.errors import ConfigError
from shotcast.hardware import catalog, cluster
from shotcast.planner.calibration import Calibration, load
from shotcast.planner.collectives import CollectiveCosts
from shotcast.planner.step import Layout
from shotcast.simulator.engine_runs import METRICS, EngineRun, error_bar, other_kernels, predict, runs

ROOT = Path(__file__).parent.parent.parent
DATA = ROOT / "benchmarks" / "data"


@cache
def costs() -> tuple[Calibration, CollectiveCosts]:
    calibration = load("NVIDIA H200")
    return calibration, CollectiveCosts.on(cluster.load("dgx-h200"), calibration.link)


def errors(found: list[EngineRun], calibration: Calibration) -> dict[str, list[float]]:
    every: dict[str, list[float]] = {name: [] for name in METRICS}
    for run in found:
        for name, value in predict(run, calibration, costs()[1]).items():
            every[name].append(value / run.values[name] - 1)
    return every


def check(found: list[EngineRun]) -> None:
    """Steps and throughput: 15% on average, 25% at worst. First tokens too, but where the host's time is most of it."""
    every = errors(found, costs()[0])
    for name in ("tpot_ms", "itl_ms", "tokens_per_s"):
        assert fmean(map(abs, every[name])) < 0.15, name
        assert max(map(abs, every[name])) < 0.25, name
    assert fmean(map(abs, every["ttft_ms"])) < 0.15
    for run, error in zip(found, every["ttft_ms"], strict=True):
        assert abs(error) < (0.35 if run.values["ttft_ms"] < 15 else 0.25), run
        assert 0.01 < error_bar(run, *costs()) < 0.15


def test_runs_of_few_sequences() -> None:
    found = [run for run in runs(DATA / "h200") if run.sequences <= 32]
    assert len(found) == 20
    assert {run.model.split(":")[0] for run in found} == {"llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"}
    check(found)


@pytest.mark.full
def test_runs_of_1_to_512_sequences() -> None:
    found = list(runs(DATA / "h200"))
    assert len(found) == 50
    # the cache of 70B in FP8 on one GPU has no room for 512 sequences, which is not simulated
    crowded = [run for run in found if (run.model, run.quantization, run.sequences) == ("llama-3.1-70b", "fp8", 512)]
    assert len(crowded) == 1
    check([run for run in found if run not in crowded])


@pytest.mark.full
def test_the_page_has_these_figures() -> None:
    page = (ROOT / "docs" / "reference" / "planner.md").read_text()
    assert forecast.filled(page, forecast.tables(DATA / "h200", "NVIDIA H200", "dgx-h200")) == page


def test_what_the_page_says_of_many_sequences() -> None:
    """Each later token: with many sequences predictions are too fast but for one, mostly by more than error bars."""
    page = (ROOT / "docs" / "reference" / "planner.md").read_text()
    rows = re.findall(r"^\| \S+(?: FP8)? \| \dx\d \| (\d+) \|.*?\(([+-]\d+)%\) \| (\d+)% \|", page, re.MULTILINE)
    assert len(rows) == 50
    many = [(int(error), int(bar)) for sequences, error, bar in rows if int(sequences) >= 128]
    assert sum(error >= 0 for error, _ in many) == 1
    assert sum(-error > bar for error, bar in many) > len(many) / 2
    said = " ".join(page.split())
    assert (
        "each later token is predicted too fast in all runs but one, in most of them by more than the error bar" in said
    )


def test_runs_of_one_gpu_have_the_kernels_of_the_calibration() -> None:
    found = [run for run in runs(DATA / "h200") if run.layout == Layout(1, 1)]
    assert len(found) == 13
    assert not any(other_kernels(run, costs()[0]) for run in found)


def test_a_page_without_markers() -> None:
    with pytest.raises(ConfigError, match=r"the page has no <!-- benchmarks/forecast\.py -->"):
        forecast.filled("a page", "a table")


def test_another_gpu_by_its_data_sheet() -> None:
    """Kernels of the H200 predict the H100 by the ratios of the data sheets alone."""
    h100 = next(spec for spec in catalog.CATALOG if spec.name == "H100 SXM")
    found = [run for run in runs(DATA / "h100") if run.sequences <= 16]
    every = errors(found, costs()[0].scaled_to(h100))
    for name in ("tpot_ms", "itl_ms", "tokens_per_s"):
        assert max(map(abs, every[name])) < 0.15, every


def test_kernels_of_another_version_are_named() -> None:
    calibration = costs()[0]
    run = next(runs(DATA / "h200"))
    assert "all_reduce/one_shot" in other_kernels(run, calibration)
    assert other_kernels(replace(run, kernels=dict(calibration.kernels) | {"kernels.new": "1"}), calibration) == []


def test_what_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "engine_x.json").write_text('{"rows": [{"batch": 1}]}')
    with pytest.raises(ConfigError, match=r"engine_x\.json is no result of shotcast bench engine"):
        list(runs(tmp_path))
