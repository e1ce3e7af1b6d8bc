"""Time stamps between kernels of a stream, inside a captured graph too, added up where they are taken."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import now_ns


@triton.jit
def start_kernel(started_ns, timer):
    tl.store(started_ns + timer, now_ns())


@triton.jit
def stop_kernel(started_ns, totals, timer):
    """``totals``: for each place nanoseconds between begins and ends, and how often that was."""
    elapsed = now_ns() - tl.load(started_ns + timer)
    tl.store(totals + timer * 2, tl.load(totals + timer * 2) + elapsed)
    tl.store(totals + timer * 2 + 1, tl.load(totals + timer * 2 + 1) + 1)


class SpanTimers:
    """Clocks on the device, each with its total.

    Attributes:
        totals: int64 [clocks, 2]: nanoseconds between begins and ends, and how often that was.
    """

    def __init__(self, timers: int, device: torch.device):
        self._started_ns = torch.zeros(timers, dtype=torch.int64, device=device)
        self.totals = torch.zeros(timers, 2, dtype=torch.int64, device=device)

    def start(self, timer: int) -> None:
        """What the stream does from here on counts."""
        start_kernel[(1,)](self._started_ns, timer, num_warps=1)

    def stop(self, timer: int) -> None:
        """To here."""
        stop_kernel[(1,)](self._started_ns, self.totals, timer, num_warps=1)
