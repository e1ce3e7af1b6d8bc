"""Interfaces between the parts that run calls in the vendor library."""

from __future__ import annotations

from typing import Protocol

import torch

from shotcast.wire import CallPlan, HeaderWords


class CallError(Exception):
    """A library call ended without a result: the deadline passed, a connection broke, or another rank failed.

    Its ``cause`` is ``deadline``; ``connection`` if one broke, for example because its peer process ended;
    ``elsewhere`` if another rank reported a fault; or ``other``.
    """

    def __init__(self, text: str, cause: str = "other"):
        super().__init__(text)
        self.cause = cause


class RefusedError(Exception):
    """The library does not support such a call; nothing was sent."""


class VendorGroup(Protocol):
    """Ranks connected by the vendor library: all ranks of a communicator, or the two ends of its messages."""

    library: str

    def run(self, plan: CallPlan, x: torch.Tensor | None, out: torch.Tensor | None) -> None:
        """Run a call. The root of a plan is a rank of this group. Raises CallError or RefusedError."""

    def headers(self, own: HeaderWords) -> list[HeaderWords]:
        """Return every rank's header if the library can exchange them before a call, otherwise only this rank's."""

    def set_timeout(self, timeout_s: float) -> None:
        """Change the deadline of later calls."""

    def progress(self) -> tuple[int, int]:
        """Return how many calls the device has begun and finished; equal if calls block the host."""

    def check(self) -> None:
        """Raise CallError if the library knows that calls in progress cannot complete."""

    def stop(self) -> None:
        """Abort the calls in progress and drop the connections. Not collective; never blocks."""

    def close(self) -> None:
        """Drop the connections once no call is in progress. Not collective."""
