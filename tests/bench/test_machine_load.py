"""Measurements are refused on a machine whose cores others use."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from shotcast.bench import machine_load
from shotcast.errors import ConfigError


def test_busy_cores_are_counted() -> None:
    """A process that never sleeps counts as one core, whatever else runs."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        try:
            time.sleep(0.2)
            before = os.times().elapsed
            busy = machine_load.busy_cores(0.4)
            assert os.times().elapsed - before >= 0.39
            assert 0.8 < busy < (os.cpu_count() or 1) + 0.1
        finally:
            spinning.kill()


@pytest.mark.parametrize(
    ("busy", "ranks", "refused"), [(0.1, 4, False), (1.0, 4, True), (1.0, 3, False), (1.5, 3, True), (9.0, 1, True)]
)
def test_ranks_need_cores_of_their_own(
    busy: float, ranks: int, refused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr(machine_load, "busy_cores", lambda: busy)
    if not refused:
        machine_load.require_quiet(ranks, False)
        assert not caplog.records
        return
    with pytest.raises(ConfigError, match=rf"other processes use {min(busy, 4):.1f} of 4 cores.*--force"):
        machine_load.require_quiet(ranks, False)
    machine_load.require_quiet(ranks, True)
    assert "the times will be theirs, too" in caplog.text
