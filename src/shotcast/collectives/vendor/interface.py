"""Errors, connected ranks and calls in progress: shared by the parts that run calls in the vendor library."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import NamedTuple, Protocol

import torch

from shotcast.memory.members import WaitLog
from shotcast.wire import CallPlan, HeaderWords

_REMEMBERED = 1024
"""The number of device calls whose headers are kept, to compare them if one fails."""


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


class Begun(NamedTuple):
    """A call that this rank has begun, and its deadline."""

    op: str
    number: int
    header: HeaderWords | None
    timeout_s: float


@dataclasses.dataclass
class Connected:
    """Connected ranks, and the known facts about their calls."""

    group: VendorGroup
    members: tuple[int, ...]
    generation: int  # of the connections
    calls: int = 0  # how many this rank has made
    recent: deque[Begun] = dataclasses.field(default_factory=lambda: deque(maxlen=_REMEMBERED))  # the last of them
    # some call was captured in a graph, so the device may begin more calls than this rank has made
    captured: bool = False
    waiting: int = -1  # the number of the call that the device waited in at the last look; -1 for none
    since: float = 0.0  # the time of the first look at that
    log: WaitLog = dataclasses.field(default_factory=WaitLog)  # what the log says of that

    def begun(self, number: int, timeout_s: float) -> Begun:
        """Return the call that the device began as its ``number``-th; ``timeout_s`` is the default deadline."""
        known = [] if self.captured else [one for one in self.recent if one.number == number]
        return known[0] if known else Begun("a captured call" if self.captured else "a call", number, None, timeout_s)
