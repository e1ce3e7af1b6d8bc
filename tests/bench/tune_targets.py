"""Functions that the ranks of tests/bench/test_tune.py run; each process belongs to one test."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

import shotcast
from shotcast.bench import baselines, tune
from shotcast.collectives.choice.choice import Candidate


def _with(
    change: Callable[[Candidate, baselines.BenchCall], Callable[[], Any]], config: tune.TuneConfig
) -> list[tune.TunePoint]:
    """Tune with each candidate's call replaced by ``change(candidate, call)``."""
    made = tune.TuneCase.call

    def call(self: Any, name: str, candidate: Candidate) -> baselines.BenchCall:
        right = made(self, name, candidate)
        return dataclasses.replace(right, run=change(candidate, right))

    tune.TuneCase.call = call  # type: ignore[method-assign]
    return tune.measure(config)[2]


def _slow(candidate: Candidate) -> bool:
    """Return whether the candidate is not two-shot; these are slowed so that two-shot, were it right, would win."""
    return candidate.algorithm != "two_shot"


def one_is_wrong(config: tune.TuneConfig, rank: int) -> list[tune.TunePoint]:
    """Tune with a two-shot that is by far the fastest, but wrong in one element on one rank."""

    def change(candidate: Candidate, call: baselines.BenchCall) -> Callable[[], Any]:
        def run() -> None:
            call.run()
            if _slow(candidate):
                time.sleep(0.003)
            elif dist.get_rank() == rank:
                call.results[0][-1] += 1.0

        return run

    return _with(change, config)


def one_launch_is_wrong(config: tune.TuneConfig) -> list[tune.TunePoint]:
    """Tune with a two-shot that is right by default, and wrong but fastest with any other chunk."""

    def change(candidate: Candidate, call: baselines.BenchCall) -> Callable[[], Any]:
        def run() -> None:
            call.run()
            if candidate.algorithm != "two_shot":
                time.sleep(0.05)  # so that two-shot is near the fastest, however busy the cores are
            elif candidate.launch.chunk_bytes:
                call.results[0][0] = float("nan")
            else:
                time.sleep(0.01)

        return run

    return _with(change, config)


def nothing_is_right(config: tune.TuneConfig) -> str:
    def change(candidate: Candidate, call: baselines.BenchCall) -> Callable[[], Any]:
        return lambda: call.results[0].zero_()

    try:
        _with(change, config)
    except shotcast.ShotcastError as error:
        return str(error)
    return ""


def ranks_differ(config: tune.TuneConfig) -> list[tune.TunePoint]:
    """Tune with one-shot and the vendor slow on rank 0, and two-shot slow on rank 1. The ring is slow on no rank."""
    slow = {0: ("one_shot", "vendor"), 1: ("two_shot",)}

    def change(candidate: Candidate, call: baselines.BenchCall) -> Callable[[], Any]:
        def run() -> None:
            call.run()
            dist.barrier()  # so that a rank that sleeps delays nobody else's clock for the call before
            if candidate.algorithm in slow[dist.get_rank()]:
                time.sleep(0.02)

        return run

    return _with(change, config)


def by_table(counts: list[int], op: str) -> list[tuple[str, str, str, list[float]]]:
    """Return what explain says of calls, with elements of their results."""
    said = []
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        for count in counts:
            x = torch.full([count], float(comm.rank + 1))
            if op == "all_reduce":
                got = comm.all_reduce(x)
                explained = comm.explain(x, op)
            else:
                got = comm.all_gather(x)
                explained = comm.explain(got, op)
            said.append((explained.source, explained.reason, explained.algorithm, [float(got[0]), float(got[-1])]))
    return said


def captured(count: int) -> tuple[Any, Any, list[float]]:
    """On GPUs, return what explain says outside and inside a capture, and the result of a replay."""
    with shotcast.Communicator(device="cuda", timeout_s=100) as comm:
        x = torch.full([count], float(comm.rank + 1), device=comm.device)
        out = torch.empty_like(x)
        eager = comm.explain(x)
        comm.all_reduce(x, out=out)  # compiles what the capture needs, which is another kernel
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            inside = comm.explain(x)
            comm.all_reduce(x, out=out)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        comm.check()
        return eager, inside, out.tolist()
