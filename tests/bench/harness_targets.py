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
