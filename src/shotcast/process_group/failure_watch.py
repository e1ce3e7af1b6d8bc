"""The departed ranks of a group, which explain errors of the inner library."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time

import torch.distributed as dist

from shotcast.launcher.process_watch import ProcessId
from shotcast.memory.members import Members, cause_of, departed

_SETTLE_S = 0.5
"""Time from the end of a process's connections to the end of the process."""


class FailureWatch:
    """Tracks which processes of a group have ended, and which ranks have left it, using a dedicated store."""

    def __init__(self, store: dist.Store, rank: int, world_size: int):
        self._store = store
        self._rank, self._world_size = rank, world_size
        self._processes: dict[int, ProcessId] = {}
        self._left: set[int] = set()
        self._store.set(str(rank), json.dumps(dataclasses.asdict(ProcessId.own())))

    def known(self) -> list[int]:
        """Return the ranks of this machine whose processes have ended, among those that had begun.

        Returns none if the store has ended with its process.
        """
        with contextlib.suppress(RuntimeError, dist.DistError):
            for rank in range(self._world_size):
                if rank not in self._processes and rank != self._rank and self._store.check([str(rank)]):
                    self._processes[rank] = ProcessId(**json.loads(self._store.get(str(rank))))
            return [rank for rank, process in sorted(self._processes.items()) if process.has_ended()]
        return []

    def leave(self) -> None:
        """Notify the others that this rank has made its last call, if the store answers."""
        with contextlib.suppress(RuntimeError, dist.DistError):
            self._store.set(f"left/{self._rank}", "")

    def left(self) -> set[int]:
        """Return the ranks that have left, if the store answers."""
        with contextlib.suppress(RuntimeError, dist.DistError):
            others = (rank for rank in range(self._world_size) if rank != self._rank and rank not in self._left)
            self._left.update(rank for rank in others if self._store.check([f"left/{rank}"]))
        return self._left

    def gone(self) -> list[int]:
        """Return the ranks that have departed: their processes have ended, or they have left."""
        return sorted(self.left().union(self.known()))

    def meaning(self, op: str, error: Exception, timeout_s: float, members: Members) -> Exception:
        """Translate an error of the inner library to the error to raise.

        This is a CollectiveTimeout if ranks did not answer, and otherwise ``error``.
        """
        cause = cause_of(error)
        if not cause:
            return error
        lost = cause == "connection"
        until, gone = time.monotonic() + _SETTLE_S, self.gone()
        while lost and not gone and time.monotonic() < until:
            time.sleep(0.01)
            gone = self.gone()
        guilty, reason = departed(gone, self.left()) if gone else ([], "unreachable" if lost else "late")
        return members.timeout(guilty, op, 0, timeout_s, reason)
