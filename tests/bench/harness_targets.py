"""Implementations that misbehave, run by ranks of tests/bench/test_harness.py."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from shotcast.bench import baselines, harness
from shotcast.bench.config import BenchConfig
from shotcast.bench.report import Row


def _with(implementation: Any, config: BenchConfig) -> list[Row]:
    """Measure Gloo with its call replaced by ``implementation(call)``. This process belongs to one test."""
    library = baselines.library_call
    baselines.library_call = lambda *args: implementation(library(*args))  # type: ignore[assignment]
    return harness.measure(config, ("gloo",))


def measured(configs: list[BenchConfig]) -> list[list[Row]]:
    """Measure one configuration after the other."""
    return [harness.measure(config, config.implementations()) for config in configs]


def one_element_off(config: BenchConfig, by: float, rank: int) -> list[Row]:
    def implementation(call: baselines.BenchCall) -> baselines.BenchCall:
        def run() -> None:
            call.run()
            if torch.distributed.get_rank() == rank:
                call.results[0][-1] += by

        return dataclasses.replace(call, run=run)

    return _with(implementation, config)


def wrong_after_a_while(config: BenchConfig) -> list[Row]:
    def implementation(call: baselines.BenchCall) -> baselines.BenchCall:
        calls = 0

        def run() -> None:
            nonlocal calls
            calls += 1
            if calls < 4:
                call.run()  # later calls leave the result as it was

        return dataclasses.replace(call, run=run)

    return _with(implementation, config)


def first_product_is_slow(config: BenchConfig, seconds: float) -> int:
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


def one_rank_sleeps(config: BenchConfig, seconds: float) -> list[Row]:
    """Measure a call that sleeps on rank 1 and does nothing else, so that the times of the ranks differ."""

    def implementation(call: baselines.BenchCall) -> baselines.BenchCall:
        first = True

        def run() -> None:
            nonlocal first
            if first:
                call.run()
                first = False
            elif torch.distributed.get_rank() == 1:
                time.sleep(seconds)

        return dataclasses.replace(call, run=run)

    return _with(implementation, config)


def counts_calls(config: BenchConfig) -> list[int]:
    count = 0

    def implementation(call: baselines.BenchCall) -> baselines.BenchCall:
        def run() -> None:
            nonlocal count
            count += 1
            call.run()

        return dataclasses.replace(call, run=run)

    _with(implementation, config)
    return [count]


class SlowWork:
    """A replacement of the matrix product that takes 40 ms and writes a value that no rank's input holds."""

    name = "sleep"

    def __init__(self, *sizes: object, **more: object) -> None:
        pass

    def __call__(self, out: torch.Tensor) -> None:
        time.sleep(0.040)
        out.fill_(7.0)


def with_slow_work(config: BenchConfig, algorithm: str) -> tuple[list[Row], set[float]]:
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


def values_in_place(config: BenchConfig) -> list[float]:
    """Return the largest value of the input at the start of each timed call back to back."""
    seen = []

    def implementation(call: baselines.BenchCall) -> baselines.BenchCall:
        def run() -> None:
            seen.append(float(call.source.abs().max()))
            call.run()

        return dataclasses.replace(call, run=run)

    _with(implementation, config)
    return seen


def allocates(config: BenchConfig, bursts_each: int) -> list[Row]:
    """Measure host time on ranks that seem to allocate ``bursts_each`` times between two readings of the counter."""
    count = 0

    def allocations(device: torch.device) -> int:
        nonlocal count
        count += bursts_each
        return count

    harness.timers.allocations = allocations  # type: ignore[assignment]
    return harness.measure(config, ("one_shot",))


def wrong_in_one_value(config: BenchConfig, name: str, value: str) -> list[Row]:
    """Measure a fused implementation with one wrong element in one result on rank 1."""
    from shotcast.bench.fused_case import FusedCase

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
