"""The harness on GPUs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from shotcast.bench import harness, implementations
from shotcast.bench.config import BenchConfig
from shotcast.bench.operations import OPERATIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]

CONFIG = BenchConfig(
    op="all_reduce",
    device="cuda",
    dtype="bfloat16",
    sizes=(8192, 1 << 20),
    iters=60,
    budget_s=0.1,
    timeout_s=200,
)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("op", OPERATIONS)
def test_every_implementation(op: str, eager: bool) -> None:
    config = dataclasses.replace(CONFIG, op=op, eager=eager)
    rows = harness.run(config, 2)
    measured = {row.algorithm for row in rows}
    own = {"one_shot", "auto"} | ({"two_shot"} if op == "all_reduce" else set())
    own |= {"ring"} if op in ("all_reduce", "reduce_scatter", "all_gather") else set()
    assert own | set(implementations.baselines(op, "cuda")) <= measured <= set(config.implementations())
    assert [row for row in rows if row.errors or row.time_us is None] == []
