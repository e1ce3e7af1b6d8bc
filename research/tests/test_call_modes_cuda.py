"""Fused operations, work between calls and host time on GPUs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from call_modes import harness, names
from call_modes.mode_config import ModeConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]

CONFIG = ModeConfig(
    op="all_reduce",
    device="cuda",
    dtype="bfloat16",
    sizes=(8192, 1 << 20),
    iters=60,
    budget_s=0.1,
    timeout_s=200,
)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_fused(dtype: str) -> None:
    hidden = 1024
    sizes = tuple(tokens * hidden * (4 if dtype == "float32" else 2) for tokens in (1, 16, 64))
    config = dataclasses.replace(CONFIG, op="all_reduce_rms_norm", dtype=dtype, hidden=hidden, sizes=sizes)
    rows = harness.run(config, 2)
    assert {row.algorithm for row in rows} == set(config.implementations())
    assert [row for row in rows if row.errors or row.time_us is None] == []
    assert {row.tokens for row in rows} == {1, 16, 64}


@pytest.mark.parametrize("op", ["all_reduce", "all_reduce_rms_norm"])
def test_work_between(op: str) -> None:
    """A product with 16 MB of weights takes microseconds, and so does the rest of the call."""
    names = ("one_shot", "two_shot", "nccl")
    sizes = (16 << 10, 256 << 10)
    config = dataclasses.replace(
        CONFIG, op=op, algorithms=names, sizes=sizes, between="gemm", hidden=8192, inner=1024, iters=400
    )
    rows = harness.run(config, 2)
    points = {(row.measure, row.nbytes, row.algorithm): row for row in rows}
    assert set(points) == {(measure, size, name) for measure in config.measures for size in sizes for name in names}
    for (measure, nbytes, name), row in points.items():
        assert row.errors == 0
        assert row.time_us is not None
        if measure == "between":
            assert row.work == "gemm 1024x8192"
            assert row.work_us is not None
            assert 1.0 < row.work_us < 100.0
            back_to_back = points["call", nbytes, name].time_us
            assert back_to_back is not None
            assert 0.2 * back_to_back < row.time_us < 5 * back_to_back + 10


def test_host_time_and_no_allocation() -> None:
    config = dataclasses.replace(CONFIG, host=True, iters=1000)
    rows = harness.run(config, 2)
    assert [row for row in rows if row.errors or row.time_us is None] == []
    for row in rows:
        assert row.time_us is not None
        assert 0.5 < row.time_us < 1000
        assert row.allocations is not None
        if names.is_own(row.algorithm):
            assert row.allocations == 0, row.algorithm


def test_fused_host_time_and_no_allocation() -> None:
    names = ("one_shot", "two_shot", "auto", "fp8_static", "fp8_dynamic", "plain")
    config = dataclasses.replace(
        CONFIG, op="all_reduce_rms_norm", hidden=1024, sizes=(2048, 32 << 10), host=True, iters=500, algorithms=names
    )
    rows = harness.run(config, 2)
    assert {(row.algorithm, row.allocations) for row in rows} == {(name, 0) for name in names}


def test_nccl_on_registered_memory() -> None:
    rows = harness.run(dataclasses.replace(CONFIG, algorithms=("nccl", "nccl_symmetric")), 2)
    assert [(row.algorithm, row.errors) for row in rows] == [("nccl", 0), ("nccl_symmetric", 0)] * 2
    assert all(row.time_us for row in rows)
