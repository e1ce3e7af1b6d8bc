"""Threads that look at the calls of this process again and again, where nothing else sees them wait."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from typing import Protocol

from shotcast.collectives.interface import Executor
from shotcast.errors import ClosedError
from shotcast.memory.host_group import StoreGroup
from shotcast.memory.wait_log import WaitLog, wait_text
from shotcast.wire import Wait

logger = logging.getLogger(__name__)


class Watched(Protocol):
    """Calls that may wait."""

    def look(self, now: float) -> None:
        """Look at the calls at the time ``now``, of the monotonic clock. Must not block."""


class CallWatch:
    """Looks at all that were added, again and again; its thread runs while there are any.

    It looks every ``period_s`` seconds.
    """

    def __init__(self, name: str, period_s: float) -> None:
        self._name, self.period_s = name, period_s
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Begin with nothing to look at; a forked process has no part in what the one before it watched."""
        self._lock, self._idle = threading.Lock(), threading.Event()
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def add(self, watched: Watched) -> None:
        """Watch an object until it is removed or nobody refers to it."""
        with self._lock:
            self._watched.add(watched)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def remove(self, watched: Watched) -> None:
        """End the watch of an object, if there is one."""
        with self._lock:
            self._watched.discard(watched)
            if not self._watched:
                self._idle.set()

    def _run(self) -> None:
        while True:
            self._idle.wait(self.period_s)
            with self._lock:
                self._idle.clear()
                present = list(self._watched)
                if not present:
                    self._thread = None
                    return
            while present:
                try:
                    present.pop().look(time.monotonic())
                except Exception:
                    logger.exception("%s: a look at calls that may wait failed; they are looked at again", self._name)


LIBRARY_CALLS = CallWatch("shotcast-call-watch", 0.02)
"""Watches calls of the vendor library on devices. A look is a few loads from memory of the host."""
WAITS = CallWatch("shotcast waits", 1.0)
"""Watches calls of native kernels, for the log. A look is a few loads from memory for each communicator."""


class CallWaits:
    """The waits of the calls of one communicator, watched until it is closed or nobody refers to it."""

    def __init__(self, executor: Executor, host: StoreGroup):
        self._executor, self._host = executor, host
        self._last: Wait | None = None
        self._log = WaitLog()
        WAITS.add(self)

    def close(self) -> None:
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
