"""Calls in progress in the vendor library, and the connections they run on."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import NamedTuple

from shotcast.collectives.vendor.interface import VendorGroup
from shotcast.memory.wait_log import WaitLog
from shotcast.wire import HeaderWords

_REMEMBERED = 1024
"""The number of device calls whose headers are kept, to compare them if one fails."""


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
