"""One process of a machine compiles host code, and others load it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from shotcast.device.cpu.compilation import Schedule
from shotcast.transport.cpu.norm_rows import rows

print("imported", flush=True)
sys.stdin.readline()
print(sum(Schedule(rows).get().stats.cache_hits.values()), flush=True)
"""


def test_one_of_several_processes_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", PROGRAM], **pipes) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout.readline() == "imported\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        assert sorted(int(process.stdout.readline()) for process in processes) == [0, 1]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
