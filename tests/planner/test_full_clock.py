"""Products in a row take longer than those of a GPU that has rested, in steps, engines and plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shotcast.cost.calibration import KernelFit
from shotcast.cost.inference import FULL_CLOCK_US, KernelCost, sustained_kind
from shotcast.engine.scheduler import SchedulerConfig
from shotcast.engine.step_plan import StepPlan
from shotcast.hardware import cluster
from shotcast.models.config import ModelConfig
from shotcast.models.presets import preset
from shotcast.planner.calibration import Calibration, load
from shotcast.planner.collectives import CollectiveCosts
from shotcast.planner.expert_model import EXPERT_PRESETS
from shotcast.planner.plan import Job, plan
from shotcast.planner.step import Layout, StepModel, StepWork
from shotcast.simulator.serving import Arrival, StepTimes, serve

DGX = cluster.load("dgx-h200")


def with_sustained(slower: float) -> Calibration:
    """Return the calibration of the H200, where arithmetic in a row takes ``slower`` times as long; 0 for unknown."""
    known = load("NVIDIA H200")
    kinds = {kind: fit for kind, fit in known.kinds.items() if not kind.startswith("sustained")}
    for fp8 in (False, True) if slower else ():
        cost = kinds[f"product_many_rows{'_fp8' if fp8 else ''}"].cost
        slow = KernelCost(cost.fixed_us, cost.first_rate, cost.second_rate / slower)
        kinds[sustained_kind(fp8)] = KernelFit(slow, 0.03, 0.05, 9)
    return replace(known, kinds=kinds)


def model(config: ModelConfig, slower: float, quantization: str = "") -> StepModel:
    calibration = with_sustained(slower)
    return StepModel(config, Layout(1, 1), calibration, CollectiveCosts.on(DGX, calibration.link), quantization)


PROMPTS = StepWork(0, 0.0, ((512, 0),) * 4, 4)


@pytest.mark.parametrize("quantization", ["", "fp8"])
@pytest.mark.parametrize("config", [preset("llama-3.1-8b"), *map(EXPERT_PRESETS.get, ("mixtral-8x7b", "deepseek-v3"))])
def test_products_of_many_rows_take_longer_in_a_row(config: ModelConfig, quantization: str) -> None:
    (rested,) = model(config, 0, quantization).stages(PROMPTS)
    (row,) = model(config, 1.2, quantization).stages(PROMPTS)
    assert rested.saved_us == 0
    assert row.time_us - row.saved_us == pytest.approx(rested.time_us)
    slower = {name for name, time_us in row.parts.items() if time_us > rested.parts[name] * 1.01}
    products = {"qkv", "output", "gate_up", "down"} & row.parts.keys()
    assert slower >= products
    # 2048 rows are 512 for each expert of Mixtral, and 64 for each of DeepSeek-V3's, which kernels of few rows multiply
    assert ("experts" in slower) == (config == EXPERT_PRESETS["mixtral-8x7b"])
    assert not slower & {"norm", "rotation", "embedding"}


def test_few_rows_and_reading_weights_keep_their_time() -> None:
    one, three = model(preset("llama-3.1-70b"), 0), model(preset("llama-3.1-70b"), 3.0)
    for sequences in (1, 16, 64):
        work = StepWork(sequences, 500.0, (), sequences)
        assert one.stages(work) == three.stages(work)
    slightly = model(preset("llama-3.1-70b"), 1.1)
    (many,) = slightly.stages(StepWork(80, 500.0, (), 80))
    assert many.saved_us < 0.02 * many.time_us, "80 rows read weights longer than they compute"


def test_an_engine_that_has_rested_begins_at_the_full_clock() -> None:
    """Prompts of one step each of 1 s in a row, which the full clock makes 5 ms shorter."""

    def times(arrivals: list[float]) -> list[float]:
        def timer(plan: StepPlan) -> StepTimes:
            return StepTimes([1.0], [0.0], saved_s=[0.005])

        config = SchedulerConfig(64, 100, 16, 4096, 512, False, 1, 1)
        requests = serve([Arrival(time, 100, 1) for time in arrivals], config, timer).requests
        return [round(request.ttft_s, 6) for request in requests]

    left = FULL_CLOCK_US / 1e6 - 2 * 0.005
    assert times([0.0, 10.0, 20.0]) == [0.995] * 3
    assert times([0.0, 0.0, 0.0, 0.0]) == pytest.approx([0.995, 1.99, 2.99 - left, 3.99 - left])


def test_a_plan_has_a_first_token_at_the_full_clock() -> None:
    """A short prompt ends before all that can be saved is used up; steps with many sequences are in a row."""
    points = [
        next(
            point
            for point in plan(Job(preset("llama-3.1-8b"), "8b", "", DGX, 1, 512, 64), with_sustained(slower)).points
            if point.sequences == 256
        )
        for slower in (0, 1.2)
    ]
    assert points[0].ttft_ms == pytest.approx(points[1].ttft_ms)
    assert points[0].tokens_per_s > 1.1 * points[1].tokens_per_s
    long = Job(preset("llama-3.1-70b"), "70b", "fp8", DGX, 1, 32768, 64)
    first, slower_first = (plan(long, with_sustained(slower)).points[0].ttft_ms for slower in (0, 1.2))
    assert slower_first - first > 5 * FULL_CLOCK_US / 1e3
