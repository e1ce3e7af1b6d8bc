"""The scripts of examples/frameworks on two GPUs, by the backend "shotcast" and by NCCL."""

from __future__ import annotations

import frameworks
import pytest
import torch
from test_frameworks import COMPILED, SCRIPTS, check

from shotcast.launcher.spawn import spawn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank"),
]


@pytest.mark.parametrize(("name", "arguments"), [*SCRIPTS.items(), *COMPILED.items()])
def test_results_are_those_by_nccl_and_the_same_on_every_run(name: str, arguments: tuple[str, ...]) -> None:
    order = [(name, backend, arguments) for backend in ("nccl", "shotcast", "shotcast")]
    by_rank = spawn(frameworks.runs, 2, order, timeout_s=300)
    check(name, {name: [list(ranks) for ranks in zip(*by_rank, strict=True)]}, "nccl")


def test_accelerates_own_script() -> None:
    (run, _) = spawn(frameworks.run, 2, "accelerate_script", "shotcast", timeout_s=300)
    assert run.own_calls > 0
