"""Compilation of CPU kernels, once per machine.

Functions are compiled when they are first needed. numba keeps them on disk (beside the sources, or in the user's cache
directory), so other ranks and later runs load them. numba checks only the file in which a function is written; a
schedule also contains code of the files it calls, and numbers that ranks agree on. The cached code therefore carries
the digest of all CPU kernels and of ``wire.py`` instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from numba import njit, types
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

logger = logging.getLogger(__name__)

SCHEDULE_OPTIONS = {"nogil": True, "error_model": "numpy"}
ARITHMETIC_OPTIONS = {"nopython": True, "error_model": "numpy"}
"""The options that all schedules, and all arithmetic, are compiled with."""

_LOCK = threading.Lock()


@functools.cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    package = Path(__file__).parents[2]
    rooms = ("device/cpu", "kernels/cpu", "transport/cpu", "transport/network")
    folders = [sorted((package / room).glob("*.py")) for room in rooms]
    for path in (*itertools.chain(*folders), package / "wire.py"):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def keep_on_disk(compilable: Any) -> None:
    """Switch on numba's cache for ``compilable``, where there is a directory to keep it in."""
    try:
        compilable.enable_caching()
        compilable._cache._cache_file._source_stamp = _sources_digest()
    except (RuntimeError, OSError) as error:
        logger.info("compiled host code of %s is not kept on disk: %s", compilable.__name__, error)


@contextlib.contextmanager
def _one_process_compiles(compilable: Any) -> Iterator[None]:
    """Let one process of the machine compile a function, while others wait to load what it keeps on disk.

    Once it is there, all load at the same time. Without a place on disk each process compiles for itself.
    """
    folder = getattr(getattr(compilable, "_cache", None), "cache_path", None) or ""
    name = f"{compilable.__name__}-{compilable.__module__}-{_sources_digest()[:16]}"
    done = Path(folder, f"{name}.compiled")
    if not folder or done.exists():
        yield
        return
    with contextlib.ExitStack() as held:
        try:
            done.parent.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(open(done.with_suffix(".lock"), "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)  # it ends with the process that has it
        except OSError as error:
            logger.info("%s is compiled by each process: %s", compilable.__name__, error)
        yield
        with contextlib.suppress(OSError):
            done.touch()


class Schedule:
    """A collective as a compiled function: ``function(context, plan, x, out) -> status``.

    It takes four addresses and returns a code of :mod:`shotcast.transport.cpu.waiting`.
    """

    def __init__(self, function: Callable[[int, int, int, int], int]):
        self._function = function
        self._compiled: Callable[[int, int, int, int], int] | None = None

    def ready(self) -> bool:
        """Return whether this process has compiled or loaded the function."""
        return self._compiled is not None

    def get(self) -> Callable[[int, int, int, int], int]:
        """Return the machine code, compiled or loaded on first use; it runs without the interpreter lock."""
        with _LOCK:
            if self._compiled is None:
                dispatcher = njit(**SCHEDULE_OPTIONS)(self._function)
                keep_on_disk(dispatcher)
                with _one_process_compiles(dispatcher):
                    dispatcher.compile(types.int64(types.int64, types.int64, types.int64, types.int64))
                dispatcher.disable_compile()
                self._compiled = dispatcher
            return self._compiled


class Arithmetic:
    """Compiled arithmetic ``function(destination, sources, world_size, count)``, called by its address.

    Schedules call it through a pointer: a schedule compiles once for all dtypes, and the arithmetic once for all
    schedules.
    """

    def __init__(self, function: Callable[[int, int, int, int], None]):
        self._function = function
        self._compiled: Any = None

    def ready(self) -> bool:
        """Return whether this process has compiled or loaded the function."""
        return self._compiled is not None

    def address(self) -> int:
        """Return the address of the machine code, compiled or loaded on first use."""
        with _LOCK:
            if self._compiled is None:
                signature = normalize_signature(types.void(*(types.int64,) * 4))
                function = CFunc(self._function, signature, {}, ARITHMETIC_OPTIONS)
                keep_on_disk(function)
                with _one_process_compiles(function):
                    function.compile()
                self._compiled = function
            return int(self._compiled.address)
