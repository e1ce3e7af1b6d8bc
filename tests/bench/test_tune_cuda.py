"""Tuning on GPUs, and tables that treat captured and eager calls differently."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import tune_targets as targets

import shotcast
from shotcast.bench import tune, tune_table
from shotcast.collectives.choice.table import TableRow, parse, render
from shotcast.collectives.registry import registered
from shotcast.wire import LaunchShape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]


def test_both_modes() -> None:
    config = tune.TuneConfig(
        ops=tune.OPS,
        device="cuda",
        dtypes=("bfloat16",),
        sizes=(8192, 1 << 20),
        modes=("graph", "eager"),
        seconds=0.2,
        timeout_s=400,
    )
    part, shape, points = tune.run(config, 2)
    assert part == torch.cuda.get_device_name(0)
    assert tune_table.wrong(points) == []
    assert {point.key for point in points} == {(mode, op, "bfloat16") for op in config.ops for mode in config.modes}
    for point in points:
        times = [one.time_us for one in (point.choice.best, *point.choice.others)]
        assert all(0.5 < time_us < 5000 for time_us in times), point
    text = tune_table.document(part, shape, points, device="cuda", environment={}, command="", seconds=0.2)
    assert parse(text, "t", registered()).rows.keys() == {point.key for point in points}


def test_captured_and_eager_calls_take_their_own_rows(tmp_path: Path) -> None:
    part, path = torch.cuda.get_device_name(0), tmp_path / "t.json"
    rows = {
        ("graph", "all_reduce", "float32"): [TableRow(float("inf"), "two_shot", LaunchShape(16, 256, 2), "graph")],
        ("eager", "all_reduce", "float32"): [TableRow(float("inf"), "one_shot", None, "eager")],
    }
    path.write_text(render(part, 2, rows, {}, []))
    for eager, captured, total in shotcast.spawn(
        targets.captured, 2, 30_000, env={"SHOTCAST_TABLE": str(path)}, timeout_s=100
    ):
        assert (eager.mode, eager.algorithm, eager.source) == ("eager", "one_shot", "user table")
        assert (captured.mode, captured.algorithm, captured.source) == ("graph", "two_shot", "user table")
        assert (captured.launch.programs, captured.launch.block_words, captured.launch.num_warps) == (16, 256, 2)
        assert total == [3.0] * 30_000
