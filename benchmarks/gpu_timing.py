"""Shared code of the single-kernel benchmarks: times from captured graphs, and results with their provenance."""

from __future__ import annotations

import datetime
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shotcast.hardware.detect import detect


def seconds_each(call: Callable[[int], Any], turns: int, calls: int) -> float:
    """Return the seconds of one call, as the median over replays of a graph.

    The graph calls ``call`` with 0, 1, ..., turns - 1 in turn, at least ``calls`` times in total.
    """
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
    events = [torch.cuda.Event(enable_timing=True) for _ in range(9)]
    graph.replay()
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    events[-1].synchronize()
    times = sorted(begin.elapsed_time(end) for begin, end in itertools.pairwise(events))
    return times[len(times) // 2] / 1e3 / calls


def copy_gbps() -> float:
    """Return the GB/s that copying memory reaches, counting bytes read and bytes written."""
    sources = [torch.ones(1 << 28, dtype=torch.uint8, device="cuda") for _ in range(2)]
    target = torch.empty_like(sources[0])
    return 2 * target.nbytes / seconds_each(lambda turn: target.copy_(sources[turn]), 2, 24) / 1e9


def write(path: Path, rows: list[dict[str, Any]], made_by: dict[str, str], **measured: float) -> None:
    """Write ``rows`` as JSON with the date, the command, the machine and the fingerprints of the kernels.

    ``measured`` adds figures of the machine.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    environment = detect().as_json() | measured
    result = {
        "date": now,
        "command": " ".join(argument if argument != str(path) else path.name for argument in sys.argv),
        "environment": environment,
        "kernels": made_by,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
