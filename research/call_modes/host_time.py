"""The host's part of a call, and the GPU memory that calls allocate."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shotcast.bench.timers import Timer

BURST = 64
"""Calls enqueued before the host waits for the GPU: far fewer than a launch queue holds (about 1000)."""


def host(call: Callable[[], Any], count: int, synchronize: Callable[[], Any]) -> Timer:
    """Time the host's part of a call: bursts of :data:`BURST` calls, each followed by an untimed wait.

    A sample is the time of a burst divided by its calls. A full queue would make the host wait for the GPU.
    """
    bursts = -(-count // BURST)

    def timed() -> np.ndarray:
        clock = time.perf_counter_ns
        times_ns = np.empty(bursts)
        for i in range(bursts):
            synchronize()
            start = clock()
            for _ in range(BURST):
                call()
            times_ns[i] = clock() - start
        synchronize()
        return times_ns / BURST / 1e3

    return timed


def allocations(device: torch.device) -> int | None:
    """Return how often PyTorch's caching allocator has handed out GPU memory; None on the CPU, which has no counter."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.memory_stats(device)["allocation.all.allocated"])
