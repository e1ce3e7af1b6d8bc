"""The ends of the processes of a group, by which an error of the inner library is explained."""

from __future__ import annotations

import dataclasses
import json
import time

import torch.distributed as dist

from shotcast.errors import CollectiveTimeout
from shotcast.launcher.process_watch import ProcessId
from shotcast.process_group.torch_private import own_connection

_LOST = ("Connection closed", "Connection reset", "Connection refused", "Broken pipe", "Socket closed")
_LATE = ("Timed out", "timed out", "imeout")
_SETTLE_S = 0.5
"""Time from the end of a process's connections to the end of the process."""


class ProcessEnds:
    """Knows which processes of a group have ended.

    Args:
        store: of the group.
        rank, world_size: of this rank.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int):
        # a thread may wait in the store that was given, and nobody else is answered meanwhile
        self._store = dist.PrefixStore("shotcast processes", own_connection(store))
        self._rank, self._world_size = rank, world_size
        self._processes: dict[int, ProcessId] = {}
        self._store.set(str(rank), json.dumps(dataclasses.asdict(ProcessId.own())))

    def ended(self) -> list[int]:
        """Return the ranks of this machine whose processes have ended, as far as they had begun."""
        for rank in range(self._world_size):
            if rank not in self._processes and rank != self._rank and self._store.check([str(rank)]):
                self._processes[rank] = ProcessId(**json.loads(self._store.get(str(rank))))
        return [rank for rank, process in sorted(self._processes.items()) if process.has_ended()]

    def meaning(self, op: str, error: Exception, timeout_s: float) -> Exception:
        """Return the error to raise for one of the inner library.

        That is a CollectiveTimeout where ranks did not answer, and ``error`` itself otherwise.
        """
        text = str(error)
        lost = any(part in text for part in _LOST)
        if not lost and not any(part in text for part in _LATE):
            return error
        until, dead = time.monotonic() + _SETTLE_S, self.known()
        while lost and not dead and time.monotonic() < until:
            time.sleep(0.01)
            dead = self.known()
        reason = "dead" if dead else "unreachable" if lost else "late"
        return CollectiveTimeout(self._rank, dead, op, 0, timeout_s, reason)

    def known(self) -> list[int]:
        """Return what :meth:`ended` does, or nothing if the store has ended with its process."""
        try:
            return self.ended()
        except (RuntimeError, dist.DistError):
            return []
