"""research/compare_sources.py: two versions of the sources, measured in turn."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compare_sources
import pytest

COMMAND = ("--", "all-reduce", "--device", "cpu", "-b", "8K", "-e", "8K")


@pytest.fixture
def before(tmp_path: Path) -> Path:
    (tmp_path / "earlier/shotcast").mkdir(parents=True)
    return tmp_path / "earlier"


def measure_with(times: dict[bool, Sequence[float | None]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have ``shotcast bench`` report these times, by whether the sources are those of now, round after round."""
    sources = []

    def run(command: list[str], env: dict[str, str], **_: Any) -> None:
        sources.append(env["PYTHONPATH"])
        now = Path(env["PYTHONPATH"]) == compare_sources.NOW
        file = Path(command[command.index("--json") + 1])
        number = int(file.stem.rpartition("_")[2])
        rows = [{"algorithm": name, "nbytes": 8192, "time_us": times[now][number]} for name in ("one_shot", "ring")]
        file.write_text(json.dumps({"rows": rows if now else rows[:1]}))

    monkeypatch.setattr(compare_sources, "subprocess", SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL))
    return sources


def test_medians_of_rounds_that_take_turns(tmp_path: Path, before: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = measure_with({False: (4.0, 5.0, 4.2), True: (4.2, 4.2, 9.0)}, monkeypatch)
    options = ["--before", str(before), "--rounds", "3", "--json", str(tmp_path / "out.json")]
    assert compare_sources.main([*options, "--most", "2", *COMMAND]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["compared"] == [{"name": "one_shot/8192", "before_us": 4.2, "now_us": 4.2, "growth_percent": 0.0}], (
        "what only one version has is left out"
    )
    now = str(compare_sources.NOW)
    assert sources == [str(before), now, now, str(before), str(before), now]
    measure_with({False: (4.0, 4.0, 4.0), True: (4.2, 4.2, 4.2)}, monkeypatch)
    assert compare_sources.main([*options, "--most", "2", *COMMAND]) == 1
    assert compare_sources.main([*options, "--most", "6", *COMMAND]) == 0


def test_wrong_results_and_absent_sources(
    tmp_path: Path, before: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure_with({False: (4.0,), True: (None,)}, monkeypatch)
    options = ["--rounds", "1", "--json", str(tmp_path / "out.json")]
    with pytest.raises(ArithmeticError, match="one_shot, ring"):
        compare_sources.main(["--before", str(before), *options, *COMMAND])
    with pytest.raises(SystemExit):
        compare_sources.main(["--before", str(tmp_path), *options, *COMMAND])
    assert "earlier_sources.sh makes one" in capsys.readouterr().err
