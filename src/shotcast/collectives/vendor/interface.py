"""Interfaces between the parts that serve calls by the vendor library."""

from __future__ import annotations

from typing import Protocol

import torch

from shotcast.wire import CallPlan, HeaderWords


class CallError(Exception):
    """A call by the library ended without a result: the deadline passed, a connection broke, or another rank failed.

    Its ``cause`` is ``deadline``; ``connection`` if one broke, as it does when the process at its other end ends;
    ``elsewhere`` if another rank has told of a fault; or ``other``.
    """

    def __init__(self, text: str, cause: str = "other"):
        super().__init__(text)
        self.cause = cause


class RefusedError(Exception):
    """The library does not serve such a call; nothing was sent."""


class VendorGroup(Protocol):
    """Ranks that are connected by the vendor library: all ranks of a communicator, or the two ends of its messages."""

    library: str

    def run(self, plan: CallPlan, x: torch.Tensor | None, out: torch.Tensor | None) -> None:
        """Make a call. The root of a plan is a rank of this group. Raises CallError or RefusedError."""

    def headers(self, own: HeaderWords) -> list[HeaderWords]:
        """Return the header of every rank, if the library can exchange them before a call; else the own one alone."""

    def set_timeout(self, timeout_s: float) -> None:
        """Change the deadline of later calls."""

    def progress(self) -> tuple[int, int]:
        """Return how many calls the device has begun and ended; equal where calls block the host."""

    def check(self) -> None:
        """Raise CallError if the library knows of calls under way that they cannot complete."""

    def stop(self) -> None:
        """End the calls under way, and let go of the connections. Needs no other rank, and does not block."""

    def close(self) -> None:
        """Let go of the connections when no call is under way. Needs no other rank."""
