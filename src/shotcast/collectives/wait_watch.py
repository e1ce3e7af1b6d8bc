"""The log of calls of this process that wait in native kernels, and for whom."""

from __future__ import annotations

import contextlib

from shotcast.collectives.call_watch import WAITS
from shotcast.collectives.interface import Executor
from shotcast.errors import ClosedError
from shotcast.memory.host_group import StoreGroup
from shotcast.memory.wait_log import WaitLog, wait_text
from shotcast.wire import Wait


class CallWaits:
    """The waits of the calls of one communicator, watched until it is closed or nobody refers to it.

    Args:
        executor: makes the calls.
        host: the ranks.
    """

    def __init__(self, executor: Executor, host: StoreGroup):
        self._executor, self._host = executor, host
        self._last: Wait | None = None
        self._log = WaitLog()
        WAITS.add(self)

    def close(self) -> None:
        """End the watch."""
        WAITS.remove(self)

    def look(self, now: float) -> None:
        """Mention the call that waits, if there is one, at the time ``now`` of the monotonic clock."""
        wait = self._executor.wait()
        if wait != self._last:
            self._last, self._log = wait, WaitLog()
        if wait is not None:
            self._log.look(now - wait.since, lambda: self._text(wait, now))

    def _text(self, wait: Wait, now: float) -> str:
        ranks: list[int] = []
        with contextlib.suppress(ClosedError):  # it was closed meanwhile
            ranks = self._executor.awaited(wait)
        return wait_text(self._host.members, ranks, wait.op, wait.epoch, now - wait.since, self._executor.timeout_s)
