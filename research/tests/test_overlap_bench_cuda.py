"""The benchmark of overlap on GPUs: every form runs with right results, or says why it does not."""

from __future__ import annotations

import pytest
import torch
from overlap_bench import config, measure
from overlap_bench.config import OverlapConfig
from overlap_bench.result import OverlapRow

from shotcast.collectives.rank_device import enough_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not enough_gpus(2), reason="two GPUs, or one that ranks share"),
]
SHARED = torch.cuda.device_count() < 2
"""NCCL refuses ranks that share a GPU."""


def measured(op: str, whole: bool = False) -> dict[str, OverlapRow]:
    nbytes = 0 if whole else 4 << 20
    small = OverlapConfig(op, "cuda", "bfloat16", 2, nbytes, (1024, 1024, 1024), 1, whole=whole, steps=3,
                          rounds=1, seconds=0.0, sms=(16,), timeout_s=200.0)  # fmt: skip
    return {row.way: row for row in measure.run(small).rows}


def check(rows: dict[str, OverlapRow]) -> None:
    for row in rows.values():
        assert (row.time_us is None) == bool(row.reason)
        if row.by == "own":
            assert row.time_us is not None, (row.way, row.reason)
    if SHARED:
        assert all(row.reason for row in rows.values() if row.by == "library")
    else:
        assert not [row for row in rows.values() if row.by == "library" and row.reason]


@pytest.mark.parametrize("op", config.OPS)
def test_every_form(op: str) -> None:
    rows = measured(op)
    check(rows)
    assert {"sequential", "plain", "priority", "16 SMs", "library plain"} <= set(rows)


@pytest.mark.parametrize("op", config.WHOLE_OPS)
def test_whole_matrices(op: str) -> None:
    rows = measured(op, whole=True)
    check(rows)
    assert "sequential" in rows
