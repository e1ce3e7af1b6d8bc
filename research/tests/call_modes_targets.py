"""Implementations that misbehave, run by ranks of the tests of call_modes."""

from __future__ import annotations

import dataclasses
import time

import torch
from call_modes import harness, host_time
from call_modes.fused_case import FusedCase
from call_modes.mode_config import ModeConfig
from call_modes.rows import CallRow

from shotcast.bench import baselines


def first_product_is_slow(config: ModeConfig, seconds: float) -> int:
    """Return the number of all matrix products."""
    products = 0
    usual = harness.MeasuredGemm.__call__

    def run(gemm: harness.MeasuredGemm, out: torch.Tensor) -> None:
        nonlocal products
        products += 1
        time.sleep(seconds if products == 1 else 0)
        usual(gemm, out)

    harness.MeasuredGemm.__call__ = run  # type: ignore[method-assign]
    harness.measure(config, ("gloo",))
    return products


class SlowWork:
    """A replacement of the matrix product that takes 40 ms and writes a value that no rank's input holds."""

    name = "sleep"

    def __init__(self, *sizes: object, **more: object) -> None:
        pass

    def __call__(self, out: torch.Tensor) -> None:
        time.sleep(0.040)
        out.fill_(7.0)


def with_slow_work(config: ModeConfig, algorithm: str) -> tuple[list[CallRow], set[float]]:
    """Measure a call that takes 10 ms; return the rows, and the values that the calls found in their input."""
    harness.MeasuredGemm = SlowWork  # type: ignore[assignment, misc]
    seen = set()

    def slowed(call: baselines.BenchCall) -> baselines.BenchCall:
        def run() -> None:
            seen.add(float(call.source.view(-1)[0]))
            time.sleep(0.010)
            call.run()

        return dataclasses.replace(call, run=run)

    own, library = baselines.own_call, baselines.library_call
    baselines.own_call = lambda *args: slowed(own(*args))  # type: ignore[assignment]
    baselines.library_call = lambda *args: slowed(library(*args))  # type: ignore[assignment]
    return harness.measure(config, (algorithm,)), seen


def values_in_place(config: ModeConfig) -> list[float]:
    """Return the largest value of the input at the start of each timed call back to back."""
    seen = []
    library = baselines.library_call

    def implementation(call: baselines.BenchCall) -> baselines.BenchCall:
        def run() -> None:
            seen.append(float(call.source.abs().max()))
            call.run()

        return dataclasses.replace(call, run=run)

    baselines.library_call = lambda *args: implementation(library(*args))  # type: ignore[assignment]
    harness.measure(config, ("gloo",))
    return seen


def allocates(config: ModeConfig, bursts_each: int) -> list[CallRow]:
    """Measure host time on ranks that seem to allocate ``bursts_each`` times between two readings of the counter."""
    count = 0

    def allocations(device: torch.device) -> int:
        nonlocal count
        count += bursts_each
        return count

    host_time.allocations = allocations  # type: ignore[assignment]
    return harness.measure(config, ("one_shot",))


def wrong_in_one_value(config: ModeConfig, name: str, value: str) -> list[CallRow]:
    """Measure a fused implementation with one wrong element in one result on rank 1."""
    calls = FusedCase.calls

    def spoiled(case: FusedCase, names: object) -> list[baselines.BenchCall]:
        calls_made = []
        for call in calls(case, names):  # type: ignore[arg-type]

            def values(call: baselines.BenchCall = call) -> dict[str, torch.Tensor]:
                output = {key: tensor.clone() for key, tensor in call.output.items()}
                if torch.distributed.get_rank() == 1:
                    output[value].view(-1)[3] += 1.0
                return output

            calls_made.append(dataclasses.replace(call, values=values))
        return calls_made

    FusedCase.calls = spoiled  # type: ignore[assignment, method-assign]
    return harness.measure(config, (name,))
