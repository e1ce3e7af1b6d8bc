"""Timers: each takes a call and a number of calls per round, and returns a function that times one round.

That function returns samples in microseconds per call.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

REPLAYS_PER_ROUND = 4

Timer = Callable[[], np.ndarray]


def cpu(call: Callable[[], Any], count: int) -> Timer:
    """Time each call with a clock."""

    def timed() -> np.ndarray:
        clock = time.perf_counter_ns
        times_ns = np.empty(count)
        for i in range(count):
            start = clock()
            call()
            times_ns[i] = clock() - start
        return times_ns / 1e3

    return timed


def eager(call: Callable[[], Any], count: int) -> Timer:
    """Time calls enqueued one by one, with CUDA events between them."""

    def timed() -> np.ndarray:
        call()  # absorbs the different starts of the ranks
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        marks[-1].synchronize()
        return np.array([a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks)])

    return timed


def graph(call: Callable[[], Any], count: int) -> Timer:
    """Time replays of one graph.

    ``count`` calls are spread over :data:`REPLAYS_PER_ROUND` replays (fewer when there are fewer calls).
    """
    replays = min(REPLAYS_PER_ROUND, count)
    calls_per_graph = -(-count // replays)
    captured = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread queries events meanwhile, so only this thread's calls must be capturable.
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        for _ in range(calls_per_graph):
            call()
    captured.replay()
    torch.cuda.synchronize()

    def timed() -> np.ndarray:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        captured.replay()  # absorbs the different starts of the ranks
        marks[0].record()
        for mark in marks[1:]:
            captured.replay()
            mark.record()
        marks[-1].synchronize()
        return np.array([a.elapsed_time(b) * 1e3 / calls_per_graph for a, b in itertools.pairwise(marks)])

    return timed
