"""Watch the processes of a communicator's other ranks, and learn when they leave or stop it."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from shotcast.launcher.process_watch import WATCH, ProcessId, tell
from shotcast.memory.host_group import StoreGroup

_ALARM = "/alarm"
"""The suffix of the token that notifies processes of failed calls."""


class PeerWatch:
    """Detects when the process of another rank ends, or closes the communicator. Construction is collective.

    A rank that closes it, or whose call of the vendor library fails, notifies the processes on its machine. Processes
    on other machines learn it from their connections and from the store.

    Attributes:
        gone: the ranks whose processes have ended, and those that have left; grows on the thread of the watch.
        left: the ones among ``gone`` that have left.
        alarmed: the last generation of the library's connections in which a call of another rank failed; -1 for none.
    """

    def __init__(self, host: StoreGroup):
        self.gone: set[int] = set()
        self._told: list[Callable[[int], None]] = []
        self.left: set[int] = set()
        self.alarmed = -1
        self._rank, token = host.rank, secrets.token_hex(8)
        self._ends: list[Callable[[], None] | None] = []
        if host.world_size > 1:
            self._ends.append(WATCH.hear(token, self.departed))
            self._ends.append(WATCH.hear(token + _ALARM, self._hear_alarm, at_once=True))
        self._token = token
        processes = self._processes = host.all_gather((ProcessId.own(), token), what="construction")
        self._peers = [peer for peer in processes if peer[0] != processes[host.rank][0]]
        for rank, (process, _) in enumerate(processes):
            if process != processes[host.rank][0]:
                self._ends.append(WATCH.add(process, lambda rank=rank: self.ended(rank)))  # type: ignore[misc]
        host.gone, host.left = self.gone, self.left

    def tell(self, gone: Callable[[int], None]) -> None:
        """Call ``gone(rank)``, on any thread, for each rank that ends or leaves, or has already done so."""
        self._told.append(gone)
        for rank in sorted(self.gone):
            gone(rank)

    def ended(self, rank: int) -> None:
        """Report a rank that is gone, on any thread. Ranks of other machines are watched elsewhere."""
        if rank in self.gone:
            return
        self.gone.add(rank)
        for gone in self._told:
            gone(rank)

    def departed(self, rank: int, _: int = -1) -> None:
        """Report a rank that has left, on any thread."""
        self.left.add(rank)
        self.ended(rank)

    def hear(self, name: str, told: Callable[[int, int], None]) -> None:
        """Call ``told(number, descriptor)`` on the watch's thread for each message that other ranks :meth:`send`.

        It ends with the watch. The descriptor is an open file, or -1.
        """
        self._ends.append(WATCH.hear(f"{self._token}/{name}", told))

    def send(self, rank: int, name: str, number: int, descriptor: int = -1) -> None:
        """Send a rank a number and optionally an open file. Does nothing if the rank does not listen."""
        process, token = self._processes[rank]
        tell(process, f"{token}/{name}", number, descriptor)

    def _hear_alarm(self, generation: int, _: int) -> None:
        self.alarmed = max(self.alarmed, generation)

    def listen(self) -> None:
        """Update ``alarmed`` with the alarms that ranks of this machine have raised."""
        WATCH.listen()

    def alarm(self, generation: int) -> None:
        """Notify the others that a library call has failed here, on connections of this generation."""
        for process, token in self._peers:
            tell(process, token + _ALARM, generation)

    def leave(self) -> None:
        """Notify the others that this rank has made its last call, and that its data are in place for peers."""
        for process, token in self._peers:
            tell(process, token, self._rank)
        self._peers = []

    def close(self) -> None:
        """End the watch. A second call does nothing."""
        ends, self._ends = self._ends, []
        self._told = []
        for end in ends:
            if end is not None:
                end()
