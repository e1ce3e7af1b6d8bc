"""The plug-ins in the real classes of vLLM and SGLang, on CPU ranks, where their packages can be imported.

They are too large to install for the tests. The sources of a wheel, unpacked into a folder of PYTHONPATH, will do with
the packages that these import.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import real_host_targets as targets
from fake_hosts import write_entry_points

import shotcast
from shotcast.collectives.choice.table import TableRow, render
from shotcast.integrations import sglang, vllm
from shotcast.wire import NodeShape

pytestmark = pytest.mark.full


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("mode", ["0", "1"])
def test_vllm(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCAST_VLLM", "1")
    assert vllm.unsupported_reason() == ""
    write_entry_points(tmp_path)
    environment = {"VLLM_BATCH_INVARIANT": mode}
    for version, calls, invariant in shotcast.spawn(targets.vllm, 2, str(tmp_path), env=environment, timeout_s=400):
        assert version.startswith("0.")
        assert calls == {"all_reduce": 3, "reduce_scatter": 0, "all_gather": 1, "all_reduce_rms_norm": 0, "declined": 0}
        assert invariant == (mode == "1")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_fuses_sums_with_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCAST_VLLM", "1")
    write_entry_points(tmp_path)
    for matched, calls, names in shotcast.spawn(targets.vllm_fusion, 2, str(tmp_path), timeout_s=400):
        assert matched == 3
        assert calls == {"all_reduce": 1, "reduce_scatter": 0, "all_gather": 0, "all_reduce_rms_norm": 3, "declined": 0}
        assert names.count("shotcast_vllm.all_reduce_rms_norm.default") == 2
        assert names.count("shotcast_vllm.all_reduce_rms_norm_fp8.default") == 1
        assert names.count("vllm.all_reduce.default") == 1, "its weight has another dtype"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("mode", ["0", "1"])
def test_rows_of_vllm_in_ten_batches(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCAST_VLLM", "1")
    write_entry_points(tmp_path)
    table = tmp_path / "table.json"  # three ranks sum in another order by a ring
    rows = [TableRow(4096, "one_shot", None, "eager"), TableRow(float("inf"), "ring", None, "eager")]
    table.write_text(render("cpu", NodeShape(1, 3), {("eager", "all_reduce", "bfloat16"): rows}, {}, []))
    environment = {"VLLM_BATCH_INVARIANT": mode, "SHOTCAST_TABLE": str(table)}
    for sums, norms, algorithms, one_range in shotcast.spawn(
        targets.vllm_rows, 3, str(tmp_path), env=environment, timeout_s=400
    ):
        assert ("ring" in algorithms) == (sums > 1) == (mode == "0")
        assert norms == 1
        assert one_range


_OF_ENGINE = ("vllm", "msgspec", "einops", "cloudpickle", "pybase64", "cachetools", "uvloop", "cpuinfo")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of each case in vLLM's real executor and workers."""
    if missing := [name for name in _OF_ENGINE if importlib.util.find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("engine")
    write_entry_points(folder)
    here = Path(targets.__file__).parent
    path = os.pathsep.join((str(here), *sys.path))
    command = [sys.executable, str(here / "vllm_engine.py"), str(folder), *("sleeps", "compiles", *FAULTS)]
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=True)
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


def test_vllm_gives_workspaces_back_in_sleep(engine: dict[str, Any]) -> None:
    for level in engine["sleeps"]:
        for awake, asleep, half, again in zip(*level, strict=True):
            (kib, calls), (kib_again, calls_again) = awake, again
            assert kib > 256, "both ranks' workspaces"
            assert asleep[0] < kib / 4
            assert half[0] < kib / 4, "the weights alone are awake"
            assert abs(kib_again - kib) < kib / 4
            assert calls == calls_again


def test_sums_of_all_sizes_are_made_before_vllm_serves(engine: dict[str, Any]) -> None:
    """The model's sums have 64 columns; its step had 64 rows and 5 sequences, and vLLM's largest has 100 rows."""
    for sums, gathers, made in engine["compiles"]:
        assert sums == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100]
        assert gathers == [1, 2, 3, 4, 5]
        assert made == [len(sums)] * 2, "before vLLM warms up, and once"


FAULTS = {
    "killed": ("as processes have ended; dead ranks: 1.", 1),
    "raises": ("interrupted ranks: 1.", 1),
    "differs": ("differs between ranks in nbytes; differing ranks: 1.", 1),
    "skips": ("did not complete within its timeout of 4 s (timeout_s); missing ranks: 1.", 4.8),
    "stopped": ("did not complete within its timeout of 4 s (timeout_s); missing ranks: 1.", 4.8),
    "late": ("did not complete within its timeout of 4 s (timeout_s); missing ranks: 1.", 4.8),
    "replayed": ("did not complete within its timeout of 4 s (timeout_s); missing ranks: 1.", 4.8),
    "replayed later": ("did not complete within its timeout of 4 s (timeout_s); missing ranks: 1.", 4.8),
}
"""The errors of steps in which rank 1 has each trouble, and the seconds of 5 within which vLLM gets them."""


@pytest.mark.parametrize("trouble", FAULTS)
def test_vllm_is_told_which_rank(trouble: str, engine: dict[str, Any]) -> None:
    text, within_s = FAULTS[trouble]
    found = engine[trouble]
    assert text in found["error"]
    assert found["seconds"] < within_s
    assert found["burnt"] < 0.3, "nothing spins"


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCAST_SGLANG", "1")
    assert sglang.unsupported_reason() == ""
    write_entry_points(tmp_path)
    for version, calls in shotcast.spawn(targets.sglang, 2, str(tmp_path), timeout_s=400):
        assert version.startswith("0.5.23")
        assert calls == {"all_reduce": 1, "reduce_scatter": 0, "all_gather": 0, "all_reduce_rms_norm": 2, "declined": 0}
