"""Fused operations, work between calls and host time: measurements on CPU ranks, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import bench_modes
import call_modes_targets as targets
import pytest
from call_modes import harness, names
from call_modes.mode_config import ModeConfig
from call_modes.rows import CallRow
from typer.testing import CliRunner

import shotcast
from shotcast.bench.harness import ROUNDS
from shotcast.errors import ConfigError

pytestmark = pytest.mark.timing

CONFIG = ModeConfig(
    op="all_reduce",
    device="cpu",
    dtype="float32",
    sizes=(64, 4096),
    iters=12,
    warmup_iters=2,
    budget_s=0.05,
    timeout_s=90,
)
BETWEEN = dataclasses.replace(CONFIG, between="gemm", hidden=16, inner=4, sizes=(64, 1000))


def test_what_a_library_needs_at_first_leaves_calls_to_time() -> None:
    """Few calls would make a short graph, whose time would be that of its launch."""
    config = dataclasses.replace(BETWEEN, sizes=(64,), iters=30, budget_s=1.0)
    alone_and_between = 2 * (1 + config.warmup_iters + config.iters)
    # on a busy machine, a call may take more than its part of the budget
    found = (shotcast.spawn(targets.first_product_is_slow, 2, config, 1.2, timeout_s=200) for _ in range(5))
    assert [alone_and_between] * 2 in found


def test_between_measures_both_and_names_the_work() -> None:
    rows = harness.run(dataclasses.replace(BETWEEN, algorithms=("ring", "gloo")), 2)
    points = [(row.measure, row.nbytes, row.algorithm, row.work) for row in rows]
    assert points == [
        (measure, nbytes, name, work)
        for measure, work in (("call", ""), ("between", "gemm 4x16"))
        for nbytes in (64, 1024)
        for name in ("ring", "gloo")
    ], "sizes are whole rows"
    assert [row.errors for row in rows] == [0] * 8
    for row in rows:
        assert row.hidden == 16
        assert (row.work_us is not None) == (row.measure == "between")


@pytest.mark.parametrize("algorithm", ["one_shot", "gloo"])
def test_between_takes_the_work_off(algorithm: str) -> None:
    """The call checked after the work finds its input restored, so there are no errors."""
    config, times = dataclasses.replace(BETWEEN, sizes=(64,)), []
    for _ in range(5):  # what a busy machine adds to the work alone is taken off the call, too
        rows, seen = shotcast.spawn(targets.with_slow_work, 2, config, algorithm, timeout_s=200)[0]
        back_to_back, between = rows
        assert (back_to_back.errors, between.errors) == (0, 0)
        assert between.work_us is not None
        assert between.work_us >= 40_000
        assert 7.0 in seen, "the work did not write the tensor that the call reads"
        times = [row.time_us or 0.0 for row in rows]
        if all(9_000 <= time_us < 30_000 for time_us in times):
            return
    pytest.fail(f"a call takes 10 ms, the work 40, and the times were {times}")


def test_calls_in_place_are_timed_on_zeros_after_work() -> None:
    """The tensor is zero even after work between calls wrote it; otherwise values would double until they overflow."""
    config = dataclasses.replace(CONFIG, sizes=(64,), budget_s=100.0, between="gemm", hidden=16)
    seen = shotcast.spawn(targets.values_in_place, 2, config, timeout_s=300)[0]
    assert max(seen) <= 16.0, "the product of 8 numbers up to 1 by up to 1, or an input"
    assert seen.count(0.0) == 1 + config.warmup_iters + config.iters


def test_the_default_product_is_divided_among_the_ranks() -> None:
    rows = harness.run(dataclasses.replace(BETWEEN, inner=0, sizes=(64,), algorithms=("ring",)), 2)
    assert rows[-1].work == "gemm 8x16"


def test_host_time_alone_is_measured() -> None:
    rows = harness.run(dataclasses.replace(CONFIG, host=True, sizes=(64,), algorithms=("two_shot", "gloo")), 2)
    assert [(row.measure, row.algorithm, row.errors) for row in rows] == [("host", "two_shot", 0), ("host", "gloo", 0)]
    for row in rows:
        assert row.time_us is not None
        assert row.time_us > 0
        assert row.allocations is None, "nobody counts on the CPU"


def test_allocations_of_all_ranks_and_rounds_are_counted() -> None:
    config = dataclasses.replace(CONFIG, host=True, sizes=(64,))
    for each in (0, 5):
        rows = shotcast.spawn(targets.allocates, 2, config, each, timeout_s=300)[0]
        assert [row.allocations for row in rows] == [2 * ROUNDS * each]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"op": "all_to_some"}, "no benchmark"),
        ({"iters": 1}, "at least 5"),
        ({"between": "sleep", "hidden": 8}, "no work 'sleep'"),
        ({"between": "gemm"}, "hidden must be"),
        ({"between": "gemm", "hidden": 8, "dtype": "int32"}, "norms and products are of float32"),
        ({"between": "gemm", "hidden": 8, "inner": -1}, "inner"),
        ({"between": "gemm", "hidden": 8, "op": "all_gather"}, "for all-reduces, not for all_gather"),
        ({"between": "gemm", "hidden": 8, "host": True}, "without work"),
        ({"host": True, "eager": True}, "already measures eager calls"),
        ({"op": "all_reduce_rms_norm"}, "hidden must be"),
        ({"op": "all_reduce_rms_norm", "hidden": 8, "dtype": "int8"}, "norms and products"),
        ({"op": "all_reduce_rms_norm", "hidden": 8, "reduction": "max"}, "takes no reduction"),
        ({"op": "all_reduce_rms_norm", "hidden": 8, "algorithms": ("fp8",)}, "unknown algorithms"),
    ],
)
def test_nonsense_is_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        dataclasses.replace(CONFIG, **change)


@pytest.mark.parametrize("op", names.FUSED_OPS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_name_belongs_to_one_family(op: str, device: str) -> None:
    for name in names.known(op, device):
        assert names.is_own(name) != names.is_library(name), name


def test_registered_memory_is_measured_on_request_alone() -> None:
    assert names.NCCL_SYMMETRIC in names.known("all_reduce", "cuda")
    assert names.NCCL_SYMMETRIC not in names.default("all_reduce", "cuda")
    assert names.NCCL_SYMMETRIC not in names.known("all_gather", "cuda")
    asked = dataclasses.replace(CONFIG, device="cuda", algorithms=("nccl", names.NCCL_SYMMETRIC))
    assert asked.implementations() == ("nccl", names.NCCL_SYMMETRIC)
    with pytest.raises(ConfigError, match="leave it out for max"):
        dataclasses.replace(asked, reduction="max")


class TestCommand:
    QUICK = ("--device", "cpu", "--iters", "6", "--seconds", "0.02", "--warmup_iters", "1", "--world-size", "2")

    @pytest.mark.full
    def test_work_between_calls(self, tmp_path: Path) -> None:
        file = tmp_path / "result.json"
        words = ["all-reduce", *self.QUICK, "-b", "256", "-e", "1K", "--algorithms", "one_shot,gloo"]
        words += ["--between", "gemm", "--hidden", "64", "--gemm-k", "8", "--json", str(file)]
        result = CliRunner().invoke(bench_modes.app, words)
        assert result.exit_code == 0, result.output
        points = [(row["measure"], row["work"], row["nbytes"]) for row in json.loads(file.read_text())["rows"]]
        works = (("call", ""), ("between", "gemm 8x64"))
        assert set(points) == {(measure, work, nbytes) for measure, work in works for nbytes in (256, 1024)}
        assert "gemm 8x64 alone" in result.stdout

    @pytest.mark.full
    def test_fused(self, tmp_path: Path) -> None:
        file = tmp_path / "result.json"
        words = ["all-reduce-rms-norm", *self.QUICK, "--norm", "layer", "--hidden", "64", "--tokens", "1,2"]
        result = CliRunner().invoke(bench_modes.app, [*words, "--json", str(file)])
        assert result.exit_code == 0, result.output
        document = json.loads(file.read_text())
        assert {row["op"] for row in document["rows"]} == {"all_reduce_layer_norm"}
        assert document["kernels"]
        assert "above plain: fused" in result.stdout

    @pytest.mark.parametrize("tokens", ["", "0", "1,x", "-1"])
    def test_tokens(self, tokens: str) -> None:
        words = ["all-reduce-rms-norm", "--device=cpu", f"--tokens={tokens}"]
        assert "--tokens takes whole numbers" in str(CliRunner().invoke(bench_modes.app, words).exception)

    def test_allocating_with_out_given_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def rows(algorithm: str) -> list[CallRow]:
            point = CallRow.from_ranks(
                op="all_reduce", device="cuda", world_size=2, dtype="float32", algorithm=algorithm, nbytes=64,
                medians_us=[1.0], p99s_us=[1.0], errors=0, measure="host", allocations=3,
            )  # fmt: skip
            return [point]

        command = ["all-reduce", *self.QUICK, "--host"]
        monkeypatch.setattr(harness, "run", lambda config, world_size: rows("two_shot"))
        result = CliRunner().invoke(bench_modes.app, command)
        assert result.exit_code == 1
        assert "calls with out given allocated GPU memory: two_shot" in result.stderr
        monkeypatch.setattr(harness, "run", lambda config, world_size: rows("nccl"))
        assert CliRunner().invoke(bench_modes.app, command).exit_code == 0
