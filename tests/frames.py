"""Count the Python functions of the package that a repeated call runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import shotcast

_PACKAGE = str(Path(shotcast.__file__).parent)
_OPERANDS = {"put_tensors", "norm_addresses"}
"""Functions that a bound call runs before it launches anything."""


class Frames:
    """The functions of the package that run on this thread, and on those that begin within the context."""

    def __init__(self) -> None:
        self._found: list[str] | None = None

    def __enter__(self) -> Frames:
        threading.setprofile(self._take)
        sys.setprofile(self._take)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def of(self, call: Callable[[], Any]) -> list[str]:
        """Return the functions that ``call`` runs until it launches a kernel or a compiled function, in their order.

        Those of another thread are among them if ``call`` waits for it.
        """
        found = self.all_of(call)
        bound = next(at for at, name in enumerate(found) if name.endswith("BoundCall.run"))
        launch = next((at for at in range(bound + 1, len(found)) if found[at] not in _OPERANDS), len(found))
        return found[:launch]

    def all_of(self, call: Callable[[], Any]) -> list[str]:
        """Return all functions that ``call`` runs."""
        self._found = found = []
        call()
        self._found = None
        return found

    def _take(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and self._found is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            self._found.append(frame.f_code.co_qualname)
