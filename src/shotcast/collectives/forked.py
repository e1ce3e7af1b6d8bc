"""Refuse communicators in forked processes, which share memory, counters and sockets with their parent.

Both processes would advance the same counters, so the sums of all ranks would be wrong. A hook that runs in the child
of a fork turns its copies into objects that refuse every use. Calls in the parent cost nothing extra.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from typing import Any

from shotcast.errors import ShotcastError

_READABLE = frozenset({"rank", "world_size", "device", "name", "max_bytes", "close"})

_living: weakref.WeakSet[Any] = weakref.WeakSet()
_maker = 0
"""The process that created the live communicators."""


def watch(comm: Any) -> None:
    """Make ``comm`` refuse any use in processes forked from this one from now on.

    There, closing it does nothing, and its identifying attributes stay readable. Nothing that it holds is released
    before the child ends, since its memory, groups and sockets belong to the parent.
    """
    global _maker
    if not _maker:
        os.register_at_fork(after_in_child=_refuse_all)  # children inherit it
    _maker = os.getpid()
    _living.add(comm)


def _refuse_all() -> None:
    for comm in list(_living):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(comm))  # it is never collected, not even when Python ends
        kind: Any = type(comm)
        comm.__class__ = _refusing(kind, _maker)
    _living.clear()


@functools.cache
def _refusing(kind: Any, maker: int) -> Any:
    """Return the subclass of ``kind`` whose instances refuse any use, naming the process ``maker``."""

    class Refusing(kind):
        def __getattribute__(self, name: str) -> Any:
            if name in _READABLE or (name.startswith("__") and name.endswith("__")):
                return super().__getattribute__(name)
            call = "" if name.startswith("_") else f"{name}: "
            raise ShotcastError(
                f"{call}this communicator belongs to process {maker}, and this is process {os.getpid()}, forked from "
                f"it. A forked process cannot take part in calls: make them in process {maker}, or start ranks of "
                f"their own (torchrun, shotcast.spawn)"
            )

        def close(self) -> None:
            """Do nothing: the resources belong to the parent."""

        def __repr__(self) -> str:
            return f"Communicator(rank={self.rank}, world_size={self.world_size}, of process {maker})"

    return Refusing
