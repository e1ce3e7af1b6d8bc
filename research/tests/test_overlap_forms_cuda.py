"""research/overlap_forms.py on GPUs: every form runs with right results, or says why it does not."""

from __future__ import annotations

import overlap_forms
import pytest
import torch
from overlap_bench import config
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


def measured(op: str, whole: bool = False, sets: tuple[str, ...] = overlap_forms.SETS[:3]) -> dict[str, OverlapRow]:
    nbytes = 0 if whole else 4 << 20
    small = OverlapConfig(op, "cuda", "bfloat16", 2, nbytes, (1024, 1024, 1024), 1, whole=whole, steps=3,
                          rounds=1, seconds=0.0, sms=(16,), timeout_s=200.0)  # fmt: skip
    return {row.way: row for row in overlap_forms.run(small, sets).rows}


def check(rows: dict[str, OverlapRow]) -> None:
    for row in rows.values():
        assert (row.time_us is None) == bool(row.reason)
        if row.by == "own":
            assert row.time_us is not None, (row.way, row.reason)
    if SHARED:
        assert all(row.reason for row in rows.values() if row.by == "library")
    else:
        assert not [row for row in rows.values() if row.by == "library" and "zero" not in row.way and row.reason]


@pytest.mark.parametrize("op", config.OPS)
def test_every_form(op: str) -> None:
    rows = measured(op)
    check(rows)
    assert {"sequential", "plain", "priority", "16 SMs", "16 SMs, shaped", "library plain"} <= set(rows)
    assert ("library, zero CTAs" in rows) == (op in ("all_gather", "all_to_all"))


@pytest.mark.parametrize("op", config.WHOLE_OPS)
def test_whole_matrices(op: str) -> None:
    rows = measured(op, whole=True)
    check(rows)
    assert "sequential" in rows
    if op != "all_reduce":
        assert {"torch low contention", "torch async TP"} <= set(rows)


def test_the_published_grid() -> None:
    rows = measured("all_to_all", sets=("published",))
    check(rows)
    assert sum("products alone" in name and row.time_us is not None for name, row in rows.items()) == 8
