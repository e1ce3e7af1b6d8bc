"""research/forecast_before.py: forecasts of the runs that the parts of measurements make, and results beside them."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import forecast_before
import pytest
from test_measure import run

from shotcast.errors import ConfigError

DATE = "2026-11-24T12:00:00+00:00"


@pytest.mark.parametrize("gpus", forecast_before.PLANNED)
def test_forecasts_are_of_the_runs_of_the_parts(gpus: int, tmp_path: Path) -> None:
    for part, planned in forecast_before.PLANNED[gpus].items():
        (tmp_path / "asked").unlink(missing_ok=True)
        assert run(tmp_path, part).returncode == 0
        asked = (tmp_path / "asked").read_text().splitlines()
        given = dict(itertools.pairwise(asked))  # the last of an option counts, as on a command line
        assert given["engine"] == f"random:{planned.model}"
        assert given.get("--quantization", "") == planned.quantization
        assert (given["--prompt"], given["--output"]) == (str(planned.prompt), str(planned.output))
        assert given["--layouts"] == ",".join(planned.layouts)
        assert given["--batches"] == ",".join(map(str, planned.sequences))
        assert given["--algorithms"] == ",".join(planned.algorithms)
        assert {planned.layout.ranks for planned in planned.runs()} == {gpus}


def row(**changes: Any) -> dict[str, Any]:
    run_of = {"model": "llama-3.1-8b", "quantization": "", "layout": "4x1", "algorithm": "auto", "sequences": 1}
    run_of |= {"most_sequences": 512, "prompt": 512, "output": 128}
    values = {"ttft_ms": 5.0, "tpot_ms": 1.5, "itl_ms": 1.4, "tokens_per_s": 600.0}
    return run_of | values | {"bars": {"ttft_ms": 0.1, "tpot_ms": 0.05}} | changes


def result(folder: Path, date: str, **changes: Any) -> None:
    values = {"ttft_ms": 4.0, "tpot_ms": 1.5, "itl_ms": 1.4, "tokens_per_s": 600.0}
    one = {"model": "random:llama-3.1-8b", "quantization": "", "layout": "4x1", "algorithm": "auto"}
    one |= {"prompt": 512, "output": 128, **values, **changes}
    rows = [one | {"batch": 1}, one | {"batch": 512}]
    (folder / "engine_8b_x4.json").write_text(json.dumps({"date": date, "rows": rows}))


BEFORE = {"date": DATE, "environment": {"commit": "0123456789abcdef"}, "rows": [row(), row(sequences=64)]}


def test_results_stand_beside_the_forecast_of_the_same_run(tmp_path: Path) -> None:
    result(tmp_path, "2026-11-25T12:00:00+00:00")
    first, second = forecast_before.table(BEFORE, tmp_path).splitlines()[4:]
    assert "| 8b | 4x1 | auto | 1 | 5 ± 10%; 4 (+25%) | 1.5 ± 5%; 1.5 (+0%) |" in first
    assert "| 64 | 5 ± 10% | 1.5 ± 5% |" in second, "it was not measured"


@pytest.mark.parametrize(
    "changes", [{"layout": "2x2"}, {"quantization": "fp8"}, {"prompt": 2048}, {"algorithm": "nccl"}]
)
def test_results_of_other_runs_do_not(changes: dict[str, Any], tmp_path: Path) -> None:
    result(tmp_path, "2026-11-25T12:00:00+00:00", **changes)
    assert "; 4 (" not in forecast_before.table(BEFORE, tmp_path)


def test_results_that_are_older_than_the_forecast_do_not(tmp_path: Path) -> None:
    result(tmp_path, DATE)
    assert "; 4 (" not in forecast_before.table(BEFORE, tmp_path)


def test_files_that_are_no_results_are_named(tmp_path: Path) -> None:
    (tmp_path / "engine_8b.json").write_text('{"rows": []}')
    with pytest.raises(ConfigError, match="is no result of shotcast bench engine"):
        forecast_before.table(BEFORE, tmp_path)


def test_a_forecast_is_of_a_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(forecast_before, "__file__", str(tmp_path / "research" / "forecast_before.py"))
    with pytest.raises(ConfigError, match="names its commit"):
        forecast_before.commit()


def test_a_forecast_is_not_of_changed_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    source = tmp_path / "src" / "source"
    source.parent.mkdir()
    source.write_text("one")
    for command in (["init", "-q"], ["add", "src"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(forecast_before, "__file__", str(tmp_path / "research" / "forecast_before.py"))
    assert len(forecast_before.commit()) == 40
    source.write_text("two")
    with pytest.raises(ConfigError, match="lacks these changes: M src/source"):
        forecast_before.commit()
