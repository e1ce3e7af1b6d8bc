"""Time stamps between kernels of a stream, inside a captured graph too, added up where they are taken."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import now_ns


@triton.jit
def begin_kernel(marks, place):
    tl.store(marks + place, now_ns())


@triton.jit
def end_kernel(marks, totals, place):
    """``totals``: for each place nanoseconds between begins and ends, and how often that was."""
    elapsed = now_ns() - tl.load(marks + place)
    tl.store(totals + place * 2, tl.load(totals + place * 2) + elapsed)
    tl.store(totals + place * 2 + 1, tl.load(totals + place * 2 + 1) + 1)


class SpanTimers:
    """Clocks on the device, each with its total.

    Attributes:
        totals: int64 [clocks, 2]: nanoseconds between begins and ends, and how often that was.
    """

    def __init__(self, clocks: int, device: torch.device):
        self._marks = torch.zeros(clocks, dtype=torch.int64, device=device)
        self.totals = torch.zeros(clocks, 2, dtype=torch.int64, device=device)

    def begin(self, clock: int) -> None:
        """What the stream does from here on counts."""
        begin_kernel[(1,)](self._marks, clock, num_warps=1)

    def end(self, clock: int) -> None:
        """To here."""
        end_kernel[(1,)](self._marks, self.totals, clock, num_warps=1)
