"""Threads of a rank for compiled code, which runs without the interpreter lock."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

_Part = tuple[Callable[[int, int], None], int, int, "SimpleQueue[BaseException | None]"]


@functools.cache
def _parts_of_thread(number: int) -> SimpleQueue[_Part]:
    """Start a thread, and return its work queue; a concurrent.futures pool takes three times as long."""
    parts: SimpleQueue[_Part] = SimpleQueue()
    threading.Thread(target=_serve, args=(parts,), name=f"shotcast-compute_{number}", daemon=True).start()
    return parts


os.register_at_fork(after_in_child=_parts_of_thread.cache_clear)


def _serve(parts: SimpleQueue[_Part]) -> None:
    while True:
        run, first, stop, done = parts.get()
        try:
            run(first, stop)
        except BaseException as error:
            done.put(error)
        else:
            done.put(None)
        del run


def in_parallel(run: Callable[[int, int], None], count: int, parts: int | None = None) -> None:
    """Run ``run(first, stop)`` over 0..count, divided among as many threads as PyTorch has, or at most ``parts``."""
    threads = min(torch.get_num_threads(), count if parts is None else parts)
    if threads <= 1:
        run(0, count)
        return
    done: SimpleQueue[BaseException | None] = SimpleQueue()
    for part in range(1, threads):
        _parts_of_thread(part).put((run, count * part // threads, count * (part + 1) // threads, done))
    try:
        run(0, count // threads)
    finally:
        errors = [error for _ in range(1, threads) if (error := done.get()) is not None]
    if errors:
        raise errors[0]
