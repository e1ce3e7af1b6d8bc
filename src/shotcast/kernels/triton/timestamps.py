"""Timers between kernels of a stream, usable inside a captured graph. Totals are accumulated on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import now_ns


@triton.jit
def start_kernel(started_ns, timer):
    """Record the current time as the start of a span."""
    tl.store(started_ns + timer, now_ns())


@triton.jit
def stop_kernel(started_ns, totals, timer):
    """Add the span since the start to ``totals``: for each timer, the nanoseconds and the number of its spans."""
    elapsed = now_ns() - tl.load(started_ns + timer)
    tl.store(totals + timer * 2, tl.load(totals + timer * 2) + elapsed)
    tl.store(totals + timer * 2 + 1, tl.load(totals + timer * 2 + 1) + 1)


class SpanTimers:
    """Timers on the device, each with a total.

    Attributes:
        totals: int64 [timers, 2]: the total nanoseconds and the number of spans.
    """

    def __init__(self, timers: int, device: torch.device):
        self._started_ns = torch.zeros(timers, dtype=torch.int64, device=device)
        self.totals = torch.zeros(timers, 2, dtype=torch.int64, device=device)

    def start(self, timer: int) -> None:
        """Start a span of the stream's work."""
        start_kernel[(1,)](self._started_ns, timer, num_warps=1)

    def stop(self, timer: int) -> None:
        stop_kernel[(1,)](self._started_ns, self.totals, timer, num_warps=1)
