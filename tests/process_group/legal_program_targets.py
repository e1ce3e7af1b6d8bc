"""Faults that ranks of tests/process_group/test_legal_programs.py have planted, and what they draw."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from program_draw import draw


def texts(seed: int, numbers: range, device: str, world_size: int) -> list[str]:
    """Return programs as this rank draws them."""
    return [draw(seed, number, device, world_size).text() for number in numbers]


def wrong_sums() -> None:
    """Let the last rank add one to the last element of a sum of more than 100 elements."""
    right = dist.all_reduce

    @functools.wraps(right)
    def all_reduce(x: Any, op: Any, group: Any = None, async_op: bool = False) -> Any:
        work = right(x, op, group, async_op)
        if work is None and len(x) > 100 and op == dist.ReduceOp.SUM and dist.get_rank() == dist.get_world_size() - 1:
            x[-1] += 1
        return work

    dist.all_reduce = all_reduce


class NotWaited:
    """A call that nobody waits for."""

    def __init__(self, work: Any):
        self.work = work

    def wait(self) -> None:
        """Do nothing."""


def dropped_waits() -> None:
    """Let waits for asynchronous sums return at once."""
    right = dist.all_reduce

    @functools.wraps(right)
    def all_reduce(x: Any, op: Any, group: Any = None, async_op: bool = False) -> Any:
        work = right(x, op, group, async_op)
        return NotWaited(work) if async_op else work

    dist.all_reduce = all_reduce


class Held:
    """A call that is made behind the next asynchronous one, or where somebody waits for it."""

    last: Held | None = None

    def __init__(self, make: Callable[[], Any]):
        self.make, self.work = make, None

    def release(self) -> None:
        if self.work is None:
            self.work = self.make()
            Held.last = None

    def wait(self) -> None:
        self.release()
        self.work.wait()


def swapped_calls() -> None:
    """Let rank 0 make an asynchronous sum behind the asynchronous broadcast or sum that comes next."""
    if dist.get_rank():
        return

    def held(right: Any, holds: bool) -> Any:
        @functools.wraps(right)
        def call(*args: Any, async_op: bool = False, **how: Any) -> Any:
            def make() -> Any:
                return right(*args, async_op=async_op, **how)

            if async_op and holds and Held.last is None:
                Held.last = Held(make)
                return Held.last
            work = make()
            if async_op and Held.last is not None:
                Held.last.release()
            return work

        return call

    dist.all_reduce, dist.broadcast = held(dist.all_reduce, True), held(dist.broadcast, False)


def hanging_barriers() -> None:
    """Let no barrier end."""
    dist.barrier = lambda group=None: time.sleep(3600)
