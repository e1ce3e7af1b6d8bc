"""Measurements are refused on a machine whose cores others use, before they begin and when they are done."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import machine_load_targets
import pytest
from typer.testing import CliRunner

import shotcast
from shotcast.bench import cpu_calibration, harness, machine_load, tune
from shotcast.cli import app
from shotcast.cost.inference import HostCost
from shotcast.errors import ConfigError
from shotcast.planner import cpu_rows
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
        with machine_load.quiet(needed, False):
            pass
        assert not caplog.records
        return
    message = rf"other processes use {min(busy, 4):.1f} of 4 cores, .* needs {needed}.*Nothing is written.*--force"
    with pytest.raises(ConfigError, match=message), machine_load.quiet(needed, False):
        pytest.fail("measured")
    with machine_load.quiet(needed, True):
        pass
    assert "other processes use" in caplog.text


@pytest.mark.parametrize(("worked_s", "refused"), [(5.0, False), (8.0, True)])
def test_work_of_others_meanwhile_counts(
    worked_s: float, refused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Four ranks on four cores take 10 or 20 s, and others may use 0.3 of a core."""
    seconds = [10.0, 3.0]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr(machine_load, "busy_cores", lambda: 0.0)
    monkeypatch.setattr(machine_load, "_others_s", lambda: seconds[1])
    monkeypatch.setattr(machine_load.time, "monotonic", lambda: seconds[0])

    def measured(force: bool) -> None:
        with machine_load.quiet(4, force):
            seconds[0] += 10 if refused else 20
            seconds[1] += worked_s

    if not refused:
        measured(False)
        assert not caplog.records
        return
    with pytest.raises(ConfigError, match=r"other processes used 0\.8 of 4 cores.*the times are theirs, too.*--force"):
        measured(False)
    measured(True)
    assert "other processes used 0.8 of 4 cores" in caplog.text


WORK = """
import sys, time
until = time.process_time() + float(sys.argv[1])
while time.process_time() < until:
    pass
"""


def test_work_of_descendants_is_our_own(tmp_path: Path) -> None:
    """A child that runs counts, one that has ended, and a child of either."""
    script, nested = tmp_path / "work.py", tmp_path / "nested.py"
    script.write_text(WORK)
    nested.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, {str(script)!r}, '0.3'])\ninput()")
    before = machine_load._own_s()
    subprocess.run([sys.executable, script, "0.3"], check=True)
    ended = machine_load._own_s() - before
    assert 0.28 < ended < 2, "an interpreter takes a while to begin"
    with subprocess.Popen([sys.executable, nested], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        until = time.monotonic() + 60
        while machine_load._own_s() - before < ended + 0.28 and time.monotonic() < until:
            time.sleep(0.05)
        assert ended + 0.28 <= machine_load._own_s() - before < ended + 3
        process.stdin.write(b"\n")


def test_ranks_that_have_ended_are_our_own() -> None:
    before = machine_load._own_s()
    worked_s = sum(shotcast.spawn(machine_load_targets.work, 2, 0.4))
    assert worked_s > 0.7
    assert machine_load._own_s() - before > worked_s - 0.1


@pytest.mark.parametrize("command", [["tune", "--device", "cpu", "-g", "2"], ["calibrate"]])
def test_nothing_is_written_on_a_machine_that_became_busy(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a table nor a calibration, unless it is forced."""
    machine = SimpleNamespace(
        calibration=SimpleNamespace(as_json=lambda: "{}", kinds={}, part="A CPU", host=HostCost(1, 1, 1, False, "")),
        cluster="name: a",
    )
    monkeypatch.setattr(tune, "run", lambda config, world_size: ("A CPU", NodeShape(1, 2), []))
    monkeypatch.setattr(cpu_calibration, "calibrate", lambda *arguments, **options: machine)
    monkeypatch.setattr(cpu_rows, "residuals", lambda kinds: {})
    monkeypatch.setattr(machine_load, "busy_cores", lambda: 0.0)
    others_s, seconds = itertools.count(0.0, 100.0), itertools.count(0.0, 10.0)
    monkeypatch.setattr(machine_load, "_others_s", lambda: next(others_s))
    monkeypatch.setattr(machine_load.time, "monotonic", lambda: next(seconds))
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
