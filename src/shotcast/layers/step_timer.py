"""The time of a rank's steps, and the part of it spent in communication."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

_STEP, _COMMUNICATION = 0, 1
_EMPTY = 64
"""The number of empty spans timed to measure the cost of a timestamp."""


class HostStepTimer:
    """The timer of CPU ranks, where calls return when they are done. Communication includes waiting."""

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
    """The timer of a GPU. Kernels take timestamps only in steps for which :attr:`recording` is on.

    A timestamp takes as long as an empty kernel, about a microsecond. This cost is measured once, between consecutive
    timestamps, and subtracted from the results. The remaining error per call is at most the delay of the next kernel,
    which would load weights meanwhile without timestamps.
    """

    def __init__(self, device: torch.device):
        from shotcast.kernels.triton.timestamps import SpanTimers

        self._timers = SpanTimers(2, device)
        self._host_totals = torch.zeros(2, 2, dtype=torch.int64, device="cpu").pin_memory()
        self._arrived = torch.cuda.Event()
        self._latest_totals = [[0, 0], [0, 0]]
        # nanoseconds that a span has more than its work, and by which its timestamps delay the work around it
        self._span_ns = self._delay_ns = 0.0
        self._calibrated = self.recording = False

    def step(self) -> contextlib.AbstractContextManager[None]:
        return self._span(_STEP)

    def communication(self) -> contextlib.AbstractContextManager[None]:
        return self._span(_COMMUNICATION)

    @contextlib.contextmanager
    def _span(self, timer: int) -> Iterator[None]:
        if not self.recording:
            yield
            return
        self._timers.start(timer)
        yield
        self._timers.stop(timer)

    def calibrate(self) -> None:
        """Measure the cost of a timestamp. Waits for the device; call this outside a capture, before the first recorded
        step."""
        if self._calibrated:
            return
        graph = torch.cuda.CUDAGraph()
        self._empty_spans()  # the first use compiles
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._empty_spans()
        graph.replay()
        self._timers.totals.zero_()
        graph.replay()
        (all_ns, _), (spans_ns, _) = self._timers.totals.tolist()
        self._span_ns, self._delay_ns, self._calibrated = spans_ns / _EMPTY, all_ns / _EMPTY, True
        self._timers.totals.zero_()

    def _empty_spans(self) -> None:
        self._timers.start(_STEP)
        for _ in range(_EMPTY):
            self._timers.start(_COMMUNICATION)
            self._timers.stop(_COMMUNICATION)
        self._timers.stop(_STEP)

    def fetch(self) -> None:
        """Start copying the totals to the host after a recorded step, unless an earlier copy is in progress."""
        if self._receive():
            self._host_totals.copy_(self._timers.totals, non_blocking=True)
            self._arrived.record()

    def _receive(self) -> bool:
        """Return whether the last copy has arrived, and read its totals if so."""
        arrived = self._arrived.query()
        if arrived:
            self._latest_totals = self._host_totals.tolist()
        return arrived

    @property
    def step_s(self) -> float:
        self._receive()
        (step_ns, steps), (_, calls) = self._latest_totals
        return max(0.0, step_ns - steps * self._span_ns - calls * self._delay_ns) / 1e9

    @property
    def communication_s(self) -> float:
        self._receive()
        nanoseconds, calls = self._latest_totals[_COMMUNICATION]
        return max(0.0, nanoseconds - calls * self._span_ns) / 1e9


StepTimer = HostStepTimer | DeviceStepTimer
"""A timer of the seconds spent in steps and in communication since the start."""
