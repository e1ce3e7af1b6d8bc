"""Products in a row take longer than those of a GPU that has rested, in steps, engines and plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpu_calibration.least_squares import Fit

from shotcast.cost.inference import FULL_CLOCK_US, KernelCost, sustained_kind
from shotcast.engine.scheduler import SchedulerConfig
from shotcast.engine.step_plan import StepPlan
from shotcast.hardware import cluster
from shotcast.models.config import ModelConfig
from shotcast.models.presets import preset
from shotcast.planner.calibration import Calibration, load
from shotcast.planner.collectives import CollectiveCosts
from shotcast.planner.plan import Query, plan
from shotcast.planner.step import Layout, StepModel, StepWork
from shotcast.simulator.serving import Arrival, StepTimes, serve

DGX = cluster.load("h200x8")


def with_sustained(slower: float) -> Calibration:
    """Return the calibration of the H200, where arithmetic in a row takes ``slower`` times as long; 0 for unknown."""
    known = load("NVIDIA H200")
    kinds = {kind: fit for kind, fit in known.kinds.items() if not kind.startswith("sustained")}
    for fp8 in (False, True) if slower else ():
        cost = kinds[f"product_many_rows{'_fp8' if fp8 else ''}"].cost
        slow = KernelCost(cost.fixed_us, cost.first_rate, cost.second_rate / slower)
        kinds[sustained_kind(fp8)] = Fit(slow, 0.03, 0.05, 9)
    return replace(known, kinds=kinds)


def model(config: ModelConfig, slower: float, quantization: str = "") -> StepModel:
    calibration = with_sustained(slower)
    return StepModel(config, Layout(1, 1), calibration, CollectiveCosts.on(DGX, calibration.link), quantization)


PROMPTS = StepWork(0, 0.0, ((512, 0),) * 4, 4)


@pytest.mark.parametrize("quantization", ["", "fp8"])
def test_products_of_many_rows_take_longer_in_a_row(quantization: str) -> None:
    config = preset("llama-3.1-8b")
    (rested,) = model(config, 0, quantization).stages(PROMPTS)
    (row,) = model(config, 1.2, quantization).stages(PROMPTS)
    assert rested.saved_us == 0
    assert row.time_us - row.saved_us == pytest.approx(rested.time_us)
    slower = {name for name, time_us in row.parts.items() if time_us > rested.parts[name] * 1.01}
    assert slower >= {"qkv", "output", "gate_up", "down"}
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
    """Prompts of one step each of 1 s in a row, which the full clock makes 0.8 ms shorter."""

    def times(arrivals: list[float]) -> list[float]:
        def timer(plan: StepPlan) -> StepTimes:
            return StepTimes([1.0], [0.0], saved_s=[0.0008])

        config = SchedulerConfig(64, 100, 16, 4096, 512, False, 1, 1)
        requests = serve([Arrival(time, 100, 1) for time in arrivals], config, timer).requests
        return [round(request.ttft_s, 6) for request in requests]

    left = FULL_CLOCK_US / 1e6 - 2 * 0.0008
    assert times([0.0, 10.0, 20.0]) == [1.0, 0.9992, 0.9992], "it begins after work"
    assert times([0.0, 10.0, 10.0, 10.0, 10.0])[1:] == pytest.approx([0.9992, 1.9984, 2.9984 - left, 3.9984 - left])


@pytest.mark.parametrize(("layout", "prompt", "slower"), [((1, 1), 512, 1.2), ((1, 2), 512, 1.2), ((1, 2), 2048, 2.0)])
def test_stages_that_wait_for_a_prompt_rest(layout: tuple[int, int], prompt: int, slower: float) -> None:
    """The first stage rests while the request comes and the host plans, others besides while those before compute."""
    query = Query(preset("llama-3.1-8b"), "8b", "", DGX, layout[1], prompt, 64)

    def first_us(slower: float) -> float:
        found = plan(query, with_sustained(slower)).points
        return next(1e3 * point.ttft_ms for point in found if (point.layout, point.sequences) == (Layout(*layout), 1))

    calibration = with_sustained(slower)
    steps = StepModel(query.model, Layout(*layout), calibration, CollectiveCosts.on(DGX, calibration.link))
    work = StepWork(0, 0.0, ((prompt, 0),), 1)
    saved_us = [stage.saved_us for stage in steps.stages(work)]
    left_us = max(0.0, saved_us[0] - steps.client_us - steps.host_us(work))
    left_us += sum(max(0.0, each - FULL_CLOCK_US) for each in saved_us[1:])
    assert first_us(slower) - first_us(0) == pytest.approx(left_us, abs=0.1)
    assert (left_us > 0) == (slower == 2.0 or layout == (1, 1))


def test_steps_of_many_prompts_are_in_a_row() -> None:
    points = [
        next(
            point
            for point in plan(Query(preset("llama-3.1-8b"), "8b", "", DGX, 1, 512, 64), with_sustained(slower)).points
            if point.sequences == 256
        )
        for slower in (0, 1.2)
    ]
    assert points[0].tokens_per_s > 1.1 * points[1].tokens_per_s


@pytest.mark.parametrize(("name", "hidden"), [("llama-3.1-70b", True), ("llama-3.1-8b", False)])
def test_the_host_is_hidden_but_for_first_tokens(name: str, hidden: bool) -> None:
    """A host of 6 ms a step: 70B in FP8 takes longer for a token, 8B does not, so it waits for the host."""
    quick = with_sustained(0)
    slow = replace(quick, host=replace(quick.host, fixed_us=6000.0, client_us=quick.host.client_us + 500.0))
    before, after = (
        next(point for point in plan(Query(preset(name), name, "fp8", DGX, 1, 512, 64), each).points)
        for each in (quick, slow)
    )
    added_ms = (6000.0 - quick.host.fixed_us + 500.0) / 1e3
    assert after.ttft_ms - before.ttft_ms == pytest.approx(added_ms)
    if hidden:
        assert after.tpot_ms == before.tpot_ms > 6
    else:
        assert before.tpot_ms < 6 < after.tpot_ms < 7
