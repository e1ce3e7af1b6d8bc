"""Measurements are refused on a machine whose cores others use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from shotcast.bench import cpu_calibration, harness, machine_load, tune
from shotcast.cli import app
from shotcast.cost.inference import HostCost
from shotcast.errors import ConfigError
from shotcast.wire import NodeShape


def test_busy_cores_are_counted() -> None:
    """A process that never sleeps counts as one core, whatever else runs."""
    with subprocess.Popen([sys.executable, "-uc", "print()\nwhile True: pass"], stdout=subprocess.PIPE) as spinning:
        try:
            assert spinning.stdout is not None
            spinning.stdout.readline()
            before = os.times().elapsed
            busy = machine_load.busy_cores(0.4)
            assert os.times().elapsed - before >= 0.39
            assert 0.8 < busy < (os.cpu_count() or 1) + 0.1
        finally:
            spinning.kill()


@pytest.mark.parametrize(
    ("busy", "needed", "refused"), [(0.1, 4, False), (1.0, 4, True), (1.0, 3, False), (1.5, 3, True), (9.0, 1, True)]
)
def test_a_measurement_needs_cores_of_its_own(
    busy: float, needed: int, refused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr(machine_load, "busy_cores", lambda: busy)
    if not refused:
        machine_load.require_quiet(needed, False)
        assert not caplog.records
        return
    message = rf"other processes use {min(busy, 4):.1f} of 4 cores, .* needs {needed}.*Nothing is written.*--force"
    with pytest.raises(ConfigError, match=message):
        machine_load.require_quiet(needed, False)
    machine_load.require_quiet(needed, True)
    assert "other processes use" in caplog.text


@pytest.mark.parametrize("command", [["tune", "--device", "cpu", "-g", "2"], ["calibrate"]])
def test_nothing_is_written_on_a_busy_machine(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a table nor a calibration, unless it is forced."""
    machine = SimpleNamespace(
        calibration=SimpleNamespace(as_json=lambda: "{}", kinds={}, part="A CPU", host=HostCost(1, 1, 1, False, "")),
        cluster="name: a",
    )
    monkeypatch.setattr(tune, "run", lambda config, world_size: ("A CPU", NodeShape(1, 2), []))
    monkeypatch.setattr(cpu_calibration, "calibrate", lambda *arguments, **options: machine)
    monkeypatch.setattr(machine_load, "busy_cores", lambda: len(os.sched_getaffinity(0)))
    file = tmp_path / "result.json"
    command = [*command, "-o", str(file)]
    if command[0] == "calibrate":
        command += ["--cluster", str(tmp_path / "cluster.yaml")]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2, refused.output
    assert "Nothing is written" in refused.stderr
    assert not list(tmp_path.iterdir())
    forced = CliRunner().invoke(app, [*command, "--force"])
    assert forced.exit_code == 0, forced.output
    assert file.exists()


def test_a_comparison_warns_of_a_busy_machine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is shown all the same: algorithms are compared with each other under the same load."""
    monkeypatch.setattr(machine_load, "busy_cores", lambda: len(os.sched_getaffinity(0)))
    monkeypatch.setattr(harness, "run", lambda config, world_size: [])
    result = CliRunner().invoke(app, ["bench", "all-reduce", "--device", "cpu", "-g", "2"])
    assert result.exit_code == 2
    assert "times measured now would be theirs, too" in caplog.text
