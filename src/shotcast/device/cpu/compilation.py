"""Compiling the host code, once per machine.

Functions are compiled when first needed and kept by numba on disk (beside the sources, or in the user's cache
directory), so other ranks and later runs load them. numba looks only at the file a function is written in; a schedule
also contains code of the files it calls, and numbers that ranks agree on, so the kept code carries the digest of all
compiled host code and of ``wire.py`` instead.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit, types
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

logger = logging.getLogger(__name__)

_LOCK = threading.Lock()


@functools.cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    package = Path(__file__).parents[2]
    folders = [sorted((package / room / "cpu").glob("*.py")) for room in ("device", "kernels", "transport")]
    for path in (*itertools.chain(*folders), package / "wire.py"):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def keep_on_disk(compilable: Any) -> None:
    """Switches numba's cache on for ``compilable``, where there is a directory to keep it in."""
    try:
        compilable.enable_caching()
        compilable._cache._cache_file._source_stamp = _sources_digest()
    except (RuntimeError, OSError) as error:
        logger.info("compiled host code of %s is not kept on disk: %s", compilable.__name__, error)


class Schedule:
    """``function(context, plan, x, out) -> status``: four addresses in, a code of :mod:`shotcast.transport.cpu.waiting`
    out."""

    def __init__(self, function: Callable[[int, int, int, int], int]):
        self._function = function
        self._compiled: Callable[[int, int, int, int], int] | None = None

    def ready(self) -> bool:
        """Whether this process has it compiled or loaded."""
        return self._compiled is not None

    def get(self) -> Callable[[int, int, int, int], int]:
        """The machine code, compiled or loaded on first use; it runs without the interpreter lock."""
        with _LOCK:
            if self._compiled is None:
                dispatcher = njit(nogil=True, error_model="numpy")(self._function)
                keep_on_disk(dispatcher)
                dispatcher.compile(types.int64(types.int64, types.int64, types.int64, types.int64))
                dispatcher.disable_compile()
                self._compiled = dispatcher
            return self._compiled


class Arithmetic:
    """``function(destination, sources, world_size, count)``, reached by its address.

    Schedules call it through a pointer: they compile once for all dtypes, and this once for all schedules.
    """

    def __init__(self, function: Callable[[int, int, int, int], None]):
        self._function = function
        self._compiled: Any = None

    def ready(self) -> bool:
        """Whether this process has it compiled or loaded."""
        return self._compiled is not None

    def address(self) -> int:
        """Where the machine code lies, compiled or loaded on first use."""
        with _LOCK:
            if self._compiled is None:
                signature = normalize_signature(types.void(*(types.int64,) * 4))
                function = CFunc(self._function, signature, {}, {"nopython": True, "error_model": "numpy"})
                keep_on_disk(function)
                function.compile()
                self._compiled = function
            return int(self._compiled.address)
