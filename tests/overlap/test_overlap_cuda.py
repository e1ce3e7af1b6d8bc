"""Overlap on GPUs: every wait is needed, graphs replay it, and results have the bits of the contract.

Run with ``pytest -m gpu``. The races need one GPU, the rest two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import overlap_targets as targets
import pytest
import torch
from test_controller import PLANS, Waits
from test_linear import check_block, check_block_by_rows

from shotcast.collectives.rank_device import enough_gpus
from shotcast.launcher.spawn import spawn
from shotcast.overlap.controller import Controller
from shotcast.overlap.lanes import StreamLanes
from shotcast.overlap.schedule import Compute, Schedule

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
two_gpus = pytest.mark.skipif(not enough_gpus(2), reason="two GPUs")
CYCLES = 2_000_000
"""Cycles that a delayed step sleeps: about a millisecond."""


class Rank:
    """A stand-in for a communicator; the race is within one GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)


class Steps:
    """Steps that compute on the GPU: each has one more than the sum of what it needs."""

    def __init__(self, plan: Schedule, late: int):
        self.plan = plan
        self._late = late
        self.before = torch.zeros((), dtype=torch.int64, device="cuda")
        self.values = {step.name: torch.zeros_like(self.before) for step in plan.steps}

    def reset(self) -> None:
        for value in (self.before, *self.values.values()):
            value.fill_(-1000)
        torch.cuda.synchronize()
        torch.cuda._sleep(CYCLES)
        self.before.zero_()

    def works(self) -> dict[str, Callable[..., Any]]:
        def work(number: int) -> Callable[..., None]:
            step = self.plan.steps[number]

            def run(*communicator: Any) -> None:
                if self._late == (0 if isinstance(step, Compute) else 1):
                    torch.cuda._sleep(CYCLES)
                total = self.before + 1
                for name in step.after:
                    total = total + self.values[name]
                self.values[step.name].copy_(total)

            return run

        return {step.name: work(number) for number, step in enumerate(self.plan.steps)}

    def results(self) -> dict[str, int]:
        """Return what the current stream sees now, before other streams go on."""
        seen = {name: value.clone() for name, value in self.values.items()}
        torch.cuda.synchronize()
        return {name: int(value) for name, value in seen.items()}

    def expected(self) -> dict[str, int]:
        values: dict[str, int] = {}
        for step in self.plan.steps:
            values[step.name] = 1 + sum(values[name] for name in step.after)
        return values


def right(plan: Schedule, late: int, left_out: int | None) -> tuple[bool, int]:
    lanes = StreamLanes(Rank())  # type: ignore[arg-type]
    waits = Waits(lanes, left_out)
    steps = Steps(plan, late)
    steps.reset()
    Controller(lanes).run(plan, steps.works(), steps.works())
    return steps.results() == steps.expected(), waits.made


@pytest.mark.parametrize("name", PLANS)
def test_streams_wait_as_much_as_they_must(name: str) -> None:
    plan = PLANS[name]
    for late in (0, 1):
        good, made = right(plan, late, None)
        assert good
    for left_out in range(made):
        tries = (right(plan, late, left_out)[0] for _ in range(5) for late in (0, 1))  # other work may delay one
        assert not all(tries), f"wait {left_out} is not needed"


@pytest.mark.parametrize("name", PLANS)
def test_a_graph_replays_a_schedule(name: str) -> None:
    plan = PLANS[name]
    lanes, steps = StreamLanes(Rank()), Steps(plan, 1)  # type: ignore[arg-type]
    controller = Controller(lanes)
    controller.run(plan, steps.works(), steps.works())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        controller.run(plan, steps.works(), steps.works())
    for _ in range(3):
        steps.reset()
        graph.replay()
        assert steps.results() == steps.expected()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL, which a graph can capture, and Gloo cannot")
def test_every_way_gives_the_bits_of_the_contract() -> None:
    results = spawn(targets.all_ways, 2, "cuda", timeout_s=300)
    for found in results:
        for number in range(len(targets.SIZES)):
            expected = targets.expected_sum(2, number)
            for way in ("sequential", "plain", "priority", "8 SMs", "auto"):
                for form in (way, f"{way} again", f"{way} captured"):
                    assert torch.equal(found[form][number], expected), form


@two_gpus
def test_linear_layers() -> None:
    check_block("cuda", 2e-3)


@two_gpus
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_with_sequence_parallelism(dtype: torch.dtype) -> None:
    ways = ["sequential", "plain"]
    results = spawn(targets.block_by_rows, 2, ways, "cuda", dtype, 16, timeout_s=300)
    check_block_by_rows(results, 0.01 if dtype == torch.bfloat16 else 2e-3, dtype)
