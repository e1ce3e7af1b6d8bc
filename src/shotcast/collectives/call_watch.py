"""Threads that poll this process's calls if nothing else notices that they wait."""

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
from shotcast.memory.members import WaitLog, wait_text
from shotcast.wire import Wait

logger = logging.getLogger(__name__)


class Watched(Protocol):
    """Calls that may wait, and that a :class:`CallWatch` polls."""

    def look(self, now: float) -> None:
        """Check the calls at the monotonic time ``now``. Must not block."""


class CallWatch:
    """Polls all added objects; its thread runs while there are any.

    It polls every ``period_s`` seconds.
    """

    def __init__(self, name: str, period_s: float) -> None:
        self._name, self.period_s = name, period_s
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Start with nothing to watch; a forked process does not inherit its parent's watches."""
        self._lock, self._idle = threading.Lock(), threading.Event()
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def add(self, watched: Watched) -> None:
        """Watch an object until it is removed or garbage-collected."""
        with self._lock:
            self._watched.add(watched)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def remove(self, watched: Watched) -> None:
        """Stop watching an object, if it is watched."""
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
"""Watches calls of the vendor library on devices. Each poll is a few loads from host memory."""
WAITS = CallWatch("shotcast waits", 1.0)
"""Watches calls of native kernels, for the log. Each poll is a few host-memory loads per communicator."""


class CallWaits:
    """The waits of one communicator's calls, watched until it is closed or garbage-collected."""

    def __init__(self, executor: Executor, host: StoreGroup):
        self._executor, self._host = executor, host
        self._last: Wait | None = None
        self._log = WaitLog()
        WAITS.add(self)

    def close(self) -> None:
        WAITS.remove(self)

    def look(self, now: float) -> None:
        """Log the call that is waiting, if there is one, at the monotonic time ``now``."""
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
