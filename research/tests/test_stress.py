"""research/stress.py: mixed calls whose results are checked, and the record of its runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import stress
import stress_calls
import stress_targets
import torch

import shotcast
from shotcast.collectives import reference

DATA = sorted((Path(__file__).parents[2] / "benchmarks/data").glob("*/stress.json"))
CPU = ("--device", "cpu", "--largest", "65536", "--timeout", "30", "--seed", "5")


@pytest.mark.full
def test_runs_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs.json"
    for world_size, calls in (("2", "120"), ("3", "20"), ("2", "10")):
        assert stress.main([*CPU, "--world-size", world_size, "--calls", calls, "--json", str(file)]) == 0
    assert "seed 5: 120 calls" in capsys.readouterr().out
    record = json.loads(file.read_text())
    assert record["totals"] == {
        "cpu x2": {"runs": 2, "calls": 130, "wrong": 0},
        "cpu x3": {"runs": 1, "calls": 20, "wrong": 0},
    }
    run = record["runs"][0]
    assert sum(run["kinds"].values()) == sum(run["dtypes"].values()) == 120
    assert set(run["kinds"]) >= {"all_reduce", "vendor_reduce", "send_recv", "uneven_all_gather", "fused"}
    assert run["kernels"]["all_reduce/two_shot"]


def test_what_is_wrong_is_named_and_can_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stress, "run", stress_targets.misled)
    file = tmp_path / "runs.json"
    assert stress.main([*CPU, "--world-size", "2", "--calls", "80", "--json", str(file)]) == 1
    record = json.loads(file.read_text())
    wrong = record["runs"][0]["wrong"]
    calls = sorted({one["call"] for one in wrong})
    assert len(wrong) == 2 * len(calls) > 2, "on both ranks"
    assert record["totals"] == {"cpu x2": {"runs": 1, "calls": 80, "wrong": len(calls)}}
    assert all("broadcast" in one["case"] for one in wrong)
    again = ["--world-size", "2", "--calls", "1", "--first", str(calls[-1])]
    assert stress.main([*CPU, *again]) == 1
    assert f"call {calls[-1]} at rank 1: {wrong[-1]['case']}" in capsys.readouterr().out


def test_a_run_in_which_a_rank_fails_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stress, "run", stress_targets.failing)
    file = tmp_path / "runs.json"
    assert stress.main([*CPU, "--world-size", "2", "--calls", "1000", "--json", str(file)]) == 1
    record = json.loads(file.read_text())
    assert "ZeroDivisionError: call " in record["runs"][0]["failed"]
    assert record["totals"]["cpu x2"]["wrong"] == 1


def test_references_follow_the_inputs() -> None:
    plan = stress_calls.Plan("cpu", 5, 0, 0, 0.0, 1 << 13, 200.0, "")
    # compiled CPU ranks have no transport in FP8
    env = {"SHOTCAST_CPU_KERNELS": "interpreter", "TRITON_INTERPRET": "1"}
    assert shotcast.spawn(stress_targets.turning, 2, plan, env=env, timeout_s=300) == [0, 0]


def test_ranks_agree_that_time_is_over() -> None:
    plan = stress_calls.Plan("cpu", 5, 0, 0, 600.0, 1 << 16, 30.0, "")
    assert shotcast.spawn(stress_targets.late_on_one_rank, 2, plan, timeout_s=60) == [(False, True)] * 2


def test_one_bit_is_seen() -> None:
    x = torch.tensor([1.0, float("nan"), 0.0], dtype=torch.bfloat16)
    assert stress_calls.differing(x, x.clone()) == 0
    for changed in (x * torch.tensor([1.0, 1.0, -1.0]).bfloat16(), x + torch.tensor([0.0078125, 0, 0]).bfloat16()):
        assert stress_calls.differing(changed, x) == 1
    wide, other = (torch.tensor([1 + 2j, imaginary], dtype=torch.complex128) for imaginary in (3j, 4j))
    assert stress_calls.differing(wide, other) == 1
    assert stress_calls.differing(x[:2], x) == 1


def test_a_norm_is_seen_that_rounding_does_not_explain() -> None:
    residual = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.linspace(0.5, 2, 64).bfloat16()
    normed = reference.rms_norm(residual, weight, stress_calls.EPS)
    assert stress_calls.beyond_rounding(normed, residual, weight) == 0
    normed[1, 5] *= 1.02
    normed[2, 7] = float("nan")
    assert stress_calls.beyond_rounding(normed, residual, weight) == 2


def test_a_pool_that_is_too_small_is_refused() -> None:
    with pytest.raises(SystemExit):
        stress.main([*CPU, "--world-size", "2", "--largest", "4096"])


@pytest.mark.parametrize("file", DATA, ids=lambda file: file.parent.name)
def test_committed_runs(file: Path) -> None:
    record = json.loads(file.read_text())
    assert record["totals"] == stress.totals(record["runs"])
    assert all(run["kernels"] for run in record["runs"])
