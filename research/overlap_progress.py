"""The form that ranks are at: what ends when a form by another library ends or stops the ranks.

Rank 0 notes the form in a file that its parent reads when the ranks have ended. So the parent knows which form to leave
out. A rank whose form continues for too long ends itself.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from shotcast import env

logger = logging.getLogger(__name__)

LIMIT_S = 150.0
"""The longest time of one form, its compilation included."""
_BYTES = 256
_OWN, _OTHER = "own", "other"


class Progress:
    """The form that this rank is at.

    Args:
        file: where rank 0 notes it.
    """

    def __init__(self, file: Path):
        self._name, self._since = "", time.monotonic()
        self._noted: mmap.mmap | None = None
        job = env.job()
        if job is not None and job.rank == 0:
            with file.open("r+b") as opened:
                self._noted = mmap.mmap(opened.fileno(), _BYTES)

    def at(self, name: str, own: bool) -> None:
        """Note that ``name`` begins."""
        self._name, self._since = name, time.monotonic()
        if self._noted is not None:
            self._noted[:] = f"{_OWN if own else _OTHER} {name}".encode().ljust(_BYTES, b"\0")[:_BYTES]

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """End the process when one form takes too long, until the scope ends."""
        over = threading.Event()
        self._since = time.monotonic()

        def look() -> None:
            while not over.wait(1.0):
                if time.monotonic() - self._since > LIMIT_S:
                    logger.error("%s did not end within %g s; this rank ends", self._name, LIMIT_S)
                    os._exit(1)

        threading.Thread(target=look, name="overlap progress", daemon=True).start()
        try:
            yield
        finally:
            over.set()


def new_file(folder: Path) -> Path:
    """Return a new file for a note."""
    file = folder / "progress"
    file.write_bytes(bytes(_BYTES))
    return file


def other_form(file: Path) -> str:
    """Return the form of another library that was noted last; empty if it was ours, or none."""
    own, _, name = file.read_bytes().rstrip(b"\0").decode(errors="replace").partition(" ")
    return name if own == _OTHER else ""
