"""Watch the processes of the other ranks of a communicator."""

from __future__ import annotations

from collections.abc import Callable

from shotcast.launcher.process_watch import WATCH, ProcessId
from shotcast.memory.host_group import StoreGroup


class PeerWatch:
    """Learns when the process of another rank ends. Construction is collective.

    Attributes:
        gone: the ranks whose processes have ended; grows on the thread of the watch.
    """

    def __init__(self, host: StoreGroup):
        self.gone: set[int] = set()
        self._told: list[Callable[[int], None]] = []
        processes = host.all_gather(ProcessId.own(), what="construction")
        self._ends = []
        for rank, process in enumerate(processes):
            if process != processes[host.rank]:
                self._ends.append(WATCH.add(process, lambda rank=rank: self.ended(rank)))  # type: ignore[misc]
        host.gone = self.gone

    def tell(self, gone: Callable[[int], None]) -> None:
        """Call ``gone(rank)`` for each rank whose process ends or has ended, on any thread."""
        self._told.append(gone)
        for rank in sorted(self.gone):
            gone(rank)

    def ended(self, rank: int) -> None:
        """Tell all of the end of a process, on any thread. Those of other machines are watched elsewhere."""
        if rank in self.gone:
            return
        self.gone.add(rank)
        for gone in self._told:
            gone(rank)

    def close(self) -> None:
        """End the watch. A second call does nothing."""
        ends, self._ends = self._ends, []
        self._told = []
        for end in ends:
            if end is not None:
                end()
