"""Several threads of a rank for compiled code, which runs without the interpreter lock."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="shotcast-compute")


def in_parallel(run: Callable[[int, int], None], count: int, parts: int | None = None) -> None:
    """Run ``run(first, stop)`` over 0..count, divided between as many threads as PyTorch has, or at most ``parts``."""
    threads = min(torch.get_num_threads(), count if parts is None else parts)
    if threads <= 1:
        run(0, count)
        return
    bounds = [count * part // threads for part in range(threads + 1)]
    others = [_pool(threads - 1).submit(run, bounds[part], bounds[part + 1]) for part in range(1, threads)]
    run(bounds[0], bounds[1])
    for other in others:
        other.result()
