"""Times of single kernels on a GPU, from captured graphs, and times of kernels that have run in a row for a while."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

MOST_CALLS = 64
"""The most calls of a graph."""
GRAPH_S = 2e-3
"""The seconds that a graph of a short kernel takes, so that its start does not count."""
HEAT_S = 1.5
"""Seconds of products in a row after which the clock has gone down, and no further."""
SUSTAINED_GRAPH_S = 2e-2
"""The seconds of a graph of products that are measured in a row."""
SUSTAINED_S = 0.35
"""Seconds of a kernel that runs in a row after that; the second half counts."""


class CapturedCalls(NamedTuple):
    """A graph of some calls."""

    graph: torch.cuda.CUDAGraph
    calls: int


def captured(call: Callable[[int], Any], turns: int, calls: int) -> CapturedCalls:
    """Capture ``call`` with 0, 1, ..., turns - 1 in turn, at least ``calls`` times in total."""
    calls = -(-calls // turns) * turns
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(calls):
            call(number % turns)
    return CapturedCalls(graph, calls)


def seconds_each(call: Callable[[int], Any], turns: int, calls: int, replays: int = 8) -> float:
    """Return the seconds of one call, as the median over replays of a graph.

    The graph calls ``call`` with 0, 1, ..., turns - 1 in turn, at least ``calls`` times in total.
    """
    graph, calls = captured(call, turns, calls)
    graph.replay()
    return median(_replayed(graph, replays)) / calls


def calls_of(call: Callable[[int], Any], graph_s: float, most: int = MOST_CALLS) -> int:
    """Return how many calls take about ``graph_s``, by one that is made now; the call must have been made before."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call(0)
    end.record()
    end.synchronize()
    return max(1, min(most, round(graph_s / max(1e-6, begin.elapsed_time(end) / 1e3))))


def time_us(call: Callable[[int], Any], turns: int) -> float:
    """Return the microseconds of a call alone, in a graph that takes a few milliseconds."""
    call(0)
    return 1e6 * seconds_each(call, turns, calls_of(call, GRAPH_S), 5)


def sustained_us(graphs: Sequence[CapturedCalls], heat_s: float = HEAT_S, each_s: float = SUSTAINED_S) -> list[float]:
    """Return the microseconds of a call of each graph, while all of them run one after the other without a pause.

    Args:
        graphs: of calls that take turns on data that no cache holds.
        heat_s: seconds in which the graphs run in turn before any is timed.
        each_s: seconds of replays of each graph; the second half is timed.
    """
    once_s = []
    for graph, _ in graphs:
        graph.replay()  # the first replay takes longer
        once_s += _replayed(graph, 1)
    for _ in range(round(heat_s / sum(once_s)) + 1):
        for graph, _ in graphs:
            graph.replay()
    times = []
    for (graph, calls), taken_s in zip(graphs, once_s, strict=True):
        count = max(4, round(each_s / taken_s))
        times.append(1e6 * median(_replayed(graph, count)[count // 2 :]) / calls)
    return times


def _replayed(graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
    """Return the seconds of each replay; they are enqueued one after the other."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    events[-1].synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(events)]
