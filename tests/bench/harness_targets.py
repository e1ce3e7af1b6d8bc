"""Contenders that misbehave, run by ranks of tests/bench/test_harness.py."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from shotcast.bench import baselines, harness
from shotcast.bench.report import Row


def _with(contender: Any, plan: harness.BenchPlan) -> list[Row]:
    """Measure Gloo with ``contender(call)`` in its place; this process belongs to one test."""
    library = baselines.library
    baselines.library = lambda *args: contender(library(*args))  # type: ignore[assignment]
    return harness.measure(plan, ("gloo",))


def one_element_off(plan: harness.BenchPlan, by: float, rank: int) -> list[Row]:
    def contender(call: baselines.Call) -> baselines.Call:
        def run() -> None:
            call.run()
            if torch.distributed.get_rank() == rank:
                call.results[0][-1] += by

        return dataclasses.replace(call, run=run)

    return _with(contender, plan)


def wrong_after_a_while(plan: harness.BenchPlan) -> list[Row]:
    def contender(call: baselines.Call) -> baselines.Call:
        calls = 0

        def run() -> None:
            nonlocal calls
            calls += 1
            if calls < 4:
                call.run()  # later calls leave the result as it was

        return dataclasses.replace(call, run=run)

    return _with(contender, plan)


def one_rank_sleeps(plan: harness.BenchPlan, seconds: float) -> list[Row]:
    """Rank 1's calls do nothing but take long; nobody waits for them, so ranks differ."""

    def contender(call: baselines.Call) -> baselines.Call:
        first = True

        def run() -> None:
            nonlocal first
            if first:
                call.run()
                first = False
            elif torch.distributed.get_rank() == 1:
                time.sleep(seconds)

        return dataclasses.replace(call, run=run)

    return _with(contender, plan)


def counts_calls(plan: harness.BenchPlan) -> list[int]:
    made = 0

    def contender(call: baselines.Call) -> baselines.Call:
        def run() -> None:
            nonlocal made
            made += 1
            call.run()

        return dataclasses.replace(call, run=run)

    _with(contender, plan)
    return [made]
