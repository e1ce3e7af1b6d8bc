"""The thread that says in the log which calls of this process wait in native kernels, and for whom."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref

from shotcast.collectives.interface import Executor
from shotcast.errors import ClosedError
from shotcast.memory.host_group import StoreGroup
from shotcast.memory.wait_log import WaitLog, wait_text
from shotcast.wire import Wait

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
"""Time between two looks, each a few loads from memory for each communicator."""


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
        _WATCH.add(self)

    def close(self) -> None:
        """End the watch."""
        _WATCH.remove(self)

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


class _WaitWatch:
    """Looks at all communicators, again and again; its thread runs while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: weakref.WeakSet[CallWaits] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()

    def add(self, watched: CallWaits) -> None:
        with self._lock:
            self._watched.add(watched)
            if self._thread is None or not self._thread.is_alive():  # a forked process does not have it
                self._thread = threading.Thread(target=self._run, name="shotcast waits", daemon=True)
                self._thread.start()

    def remove(self, watched: CallWaits) -> None:
        with self._lock:
            self._watched.discard(watched)
            if not self._watched:
                self._idle.set()

    def _run(self) -> None:
        while True:
            self._idle.wait(_PERIOD_S)
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
                    logger.exception("a look at calls that may wait failed; they are looked at again")

    def abandon(self) -> None:
        """Let go of the communicators of the process from which this one was forked."""
        self._lock, self._watched, self._thread = threading.Lock(), weakref.WeakSet(), None
        self._idle = threading.Event()


_WATCH = _WaitWatch()

os.register_at_fork(after_in_child=_WATCH.abandon)
