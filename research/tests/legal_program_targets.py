"""Faults that ranks of tests/process_group/test_legal_programs.py have planted, and what they draw."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from program_draw import census, draw
from program_ranks import Orders, Ranks, Run
from program_steps import Collective, Program, Step, every_step


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


# -- programs of GPUs, on CPU ranks -----------------------------------------------------------------------------------


class EmulatedStream:
    """A stream of a device that does everything at once."""

    def wait_stream(self, other: EmulatedStream) -> None:
        """Do nothing: the other one has done everything."""


class EmulatedGraph:
    """Steps that are made again."""

    def __init__(self) -> None:
        self.steps: list[tuple[Run, Step]] = []

    def replay(self) -> None:
        for run, step in self.steps:
            run.capturing = True
            run.make(step)
            run.capturing = False


class EmulatedGPU:
    """The part of torch.cuda that programs use."""

    def __init__(self) -> None:
        self.stream = EmulatedStream()
        self.graph: EmulatedGraph | None = None

    @contextlib.contextmanager
    def inside(self, stream: EmulatedStream, graph: EmulatedGraph | None) -> Iterator[None]:
        before, self.stream, self.graph = self.stream, stream, graph
        try:
            yield
        finally:
            self.stream, self.graph = before, None

    def patches(self) -> dict[str, Any]:
        return {
            "CUDAGraph": EmulatedGraph,
            "_sleep": lambda cycles: time.sleep(cycles / 2e9),
            "current_stream": lambda: self.stream,
            "graph": lambda graph, stream: self.inside(stream, graph),
            "stream": lambda stream: self.inside(stream, None),
            "synchronize": lambda: None,
        }


class NoPlace:
    """A place that nobody reads."""

    def at(self, number: int, step: int = -1, inner: int = -1) -> None:
        """Do nothing."""


def emulated_gpu(seed: int, programs: int, replays_do_nothing: bool) -> tuple[int, int]:
    """Run programs of GPUs on CPU tensors. Return how many replays there were, and how many programs went wrong."""
    gpu, make = EmulatedGPU(), Run.make

    def make_or_capture(run: Run, step: Step) -> None:
        if gpu.graph is None:
            make(run, step)
        elif not replays_do_nothing:
            gpu.graph.steps.append((run, step))

    ranks = Ranks(Orders("cpu", "shotcast", 30.0), NoPlace())  # type: ignore[arg-type]
    ranks.streams, ranks.capturing = [gpu.stream, EmulatedStream(), EmulatedStream()], EmulatedStream()  # type: ignore
    replays = wrong = 0
    with mock.patch.multiple(torch.cuda, **gpu.patches()), mock.patch.object(Run, "make", make_or_capture):
        for number in range(programs):
            program = draw(seed, number, "cuda", 2)
            if is_small(program):
                replays += census(program).get("replay", 0)
                wrong += bool(ranks.run(program, number))
    dist.destroy_process_group()
    return replays, wrong


def is_small(program: Program) -> bool:
    """Return whether a program suits CPU ranks: little data, small products, and no averages."""
    steps = list(every_step(program.steps))
    if max(slot.nbytes for slot in program.slots) > 1 << 18 or any(getattr(one, "size", 0) > 256 for one in steps):
        return False
    return not any(isinstance(one, Collective) and one.reduction == "avg" for one in steps)
