"""The harness on GPUs."""

from __future__ import annotations

import pytest
import torch

from shotcast.bench import harness
from shotcast.bench.harness import BenchPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
def test_every_contender(op: str, eager: bool) -> None:
    plan = BenchPlan(
        op=op,
        device="cuda",
        dtype="bfloat16",
        sizes=(8192, 1 << 20),
        iters=60,
        eager=eager,
        budget_s=0.1,
        timeout_s=200,
    )
    rows = harness.run(plan, 2)
    assert {row.algorithm for row in rows} == set(plan.contenders()) - ({"two_shot"} if op != "all_reduce" else set())
    assert [row for row in rows if row.errors or row.time_us is None] == []
