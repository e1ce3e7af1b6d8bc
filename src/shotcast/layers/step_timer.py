"""How long a rank's steps take, and how much of that its communication."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

_STEP, _COMMUNICATION = 0, 1
_EMPTY = 64
"""Spans that are timed with nothing in them, to know what a stamp takes."""


class StepTimer(Protocol):
    """Seconds since the start."""

    @property
    def step_s(self) -> float: ...
    @property
    def communication_s(self) -> float: ...
    def step(self) -> contextlib.AbstractContextManager[None]: ...
    def communication(self) -> contextlib.AbstractContextManager[None]: ...


class HostStepTimer:
    """On CPU ranks, where a call returns when it is done: all of it, waiting included."""

    def __init__(self) -> None:
        self.step_s = self.communication_s = 0.0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.step_s += time.perf_counter() - started

    @contextlib.contextmanager
    def communication(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.communication_s += time.perf_counter() - started


class DeviceStepTimer:
    """On a GPU: stamps by kernels of their own, in the steps for which :attr:`recording` is on, and of these alone.

    A stamp takes as long as a kernel with nothing to do, about a microsecond. That is measured once, between stamps
    that follow each other, and taken off what is told; what is left of a call is how much later the next kernel starts
    for it, at most: without stamps, that kernel loads weights meanwhile.
    """

    def __init__(self, device: torch.device):
        from shotcast.kernels.triton.timestamps import SpanTimers

        self._timers = SpanTimers(2, device)
        self._host_totals = torch.zeros(2, 2, dtype=torch.int64).pin_memory()
        self._arrived = torch.cuda.Event()
        self._latest_totals = [[0, 0], [0, 0]]
        self._cost: TimestampCost | None = None
        self.recording = False

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        with self._span(_STEP):
            yield

    @contextlib.contextmanager
    def communication(self) -> Iterator[None]:
        with self._span(_COMMUNICATION):
            yield

    @contextlib.contextmanager
    def _span(self, timer: int) -> Iterator[None]:
        if not self.recording:
            yield
            return
        self._timers.start(timer)
        yield
        self._timers.stop(timer)

    def calibrate(self) -> None:
        """Measure what a stamp takes. Waits for the device; outside a capture, before the first stamped step."""
        if self._cost is not None:
            return
        graph = torch.cuda.CUDAGraph()
        self._empty_spans()  # the first use compiles
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._empty_spans()
        graph.replay()
        self._timers.totals.zero_()
        graph.replay()
        (all_ns, _), (spans_ns, _) = self._timers.totals.tolist()
        self._cost = TimestampCost(spans_ns / _EMPTY, all_ns / _EMPTY)
        self._timers.totals.zero_()

    def _empty_spans(self) -> None:
        self._timers.start(_STEP)
        for _ in range(_EMPTY):
            self._timers.start(_COMMUNICATION)
            self._timers.stop(_COMMUNICATION)
        self._timers.stop(_STEP)

    def fetch(self) -> None:
        """Have the totals sent to the host, after a stamped step; unless they are on the way, as of a step before."""
        if self._receive():
            self._host_totals.copy_(self._timers.totals, non_blocking=True)
            self._arrived.record()

    def _receive(self) -> bool:
        """Whether what was sent has arrived, and counts."""
        arrived = self._arrived.query()
        if arrived:
            self._latest_totals = self._host_totals.tolist()
        return arrived

    @property
    def step_s(self) -> float:
        self._receive()
        (step_ns, steps), (_, calls) = self._latest_totals
        return 0.0 if self._cost is None else self._cost.step_s(step_ns, steps, calls)

    @property
    def communication_s(self) -> float:
        self._receive()
        nanoseconds, calls = self._latest_totals[_COMMUNICATION]
        return 0.0 if self._cost is None else self._cost.communication_s(nanoseconds, calls)


class TimestampCost(NamedTuple):
    """Nanoseconds between the stamps of a span with nothing in it, and by which such a span delays what follows."""

    span_ns: float
    delay_ns: float

    def communication_s(self, nanoseconds: float, calls: int) -> float:
        """Seconds of so many calls, with spans of ``nanoseconds`` in all."""
        return max(0.0, nanoseconds - calls * self.span_ns) / 1e9

    def step_s(self, nanoseconds: float, steps: int, calls: int) -> float:
        """Seconds of so many steps, with spans of ``nanoseconds`` in all, had their calls no spans of their own."""
        return max(0.0, nanoseconds - steps * self.span_ns - calls * self.delay_ns) / 1e9
