"""The thread that watches calls of the vendor library on devices, where nothing else sees them wait."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Protocol

logger = logging.getLogger(__name__)

_PERIOD_S = 0.02
"""Time between two looks, each a few loads from memory of the host."""


class Watched(Protocol):
    """Calls on a device that may have to be aborted."""

    def look(self, now: float) -> None:
        """Look at the calls at the time ``now``, of the monotonic clock. Must not block."""


class CallWatch:
    """Looks at all that were added, again and again. One a process; its thread runs while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def add(self, watched: Watched) -> None:
        """Watch an object until it is removed or nobody refers to it."""
        with self._lock:
            self._watched.add(watched)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="shotcast-call-watch", daemon=True)
                self._thread.start()

    def remove(self, watched: Watched) -> None:
        """End the watch of an object, if there is one."""
        with self._lock:
            self._watched.discard(watched)

    def _run(self) -> None:
        while True:
            with self._lock:
                present = list(self._watched)
                if not present:
                    self._thread = None
                    return
            while present:
                try:
                    present.pop().look(time.monotonic())
                except Exception:
                    logger.exception("a look at calls of the vendor library failed; they are looked at again")
            time.sleep(_PERIOD_S)


WATCH = CallWatch()
