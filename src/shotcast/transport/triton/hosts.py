"""The executor of GPU ranks on several hosts: mapped memory within a node, NVSHMEM puts between nodes.

A rank's region lies in NVSHMEM's memory. Kernels cannot put what must arrive no matter what happens to the call, so the
hosts tell each other: that a call is stopped, and that a process has ended.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import cast

from shotcast.errors import ConfigError
from shotcast.memory.nvshmem import HeapLease
from shotcast.transport.network.connect import connect
from shotcast.transport.network.control import ControlPlane
from shotcast.transport.transport import Ranks
from shotcast.transport.triton.executor import TritonExecutor

_LONGEST_LOOK_S, _SHORTEST_LOOK_S = 0.01, 0.001
_LOOKS_PER_TIMEOUT = 500
"""The number of looks at the fault word within a deadline: each rank that data pass through waits a 32nd longer."""
_WORD = 1 << 64
_CONNECT_S = 60.0


class HostsTritonExecutor(TritonExecutor):
    """This rank's side of a communicator whose ranks are on several nodes, equally many consecutive ones on each.

    ``lease(nbytes)`` provides NVSHMEM memory. Construction is collective; it raises on all ranks or on none:
    ConfigError if NVSHMEM is missing or has too little memory or peers cannot connect, and CollectiveTimeout for ranks
    that did not come.
    """

    _puts = True

    def __init__(self, ranks: Ranks, lease: Callable[[int], HeapLease]):
        self._hosts, self._layout_of_nodes, self._ended = ranks.host, ranks.layout, ranks.ended
        super().__init__(ranks, lease, ranks.layout.nodes)
        self._peers = ranks.layout.peers(ranks.host.rank)
        self._told = 0
        self._stop_looking = threading.Event()
        self._control = self._connect()
        self._looker = threading.Thread(target=self._look, name="shotcast faults", daemon=True)
        self._looker.start()

    # -- what the hosts tell each other ---------------------------------------------------------------------------

    def _connect(self) -> ControlPlane:
        made = connect(self._hosts, self._layout_of_nodes, _CONNECT_S)
        for one in (*made.data.values(), made.listener):  # data goes by puts
            one.close()
        return ControlPlane(made.control, lambda epoch: [], self._hear, self._peer_ended)

    def _look(self) -> None:
        """Watch for faults of this rank's calls and tell the peers, until the executor is closed."""
        while not self._stop_looking.wait(
            min(_LONGEST_LOOK_S, max(_SHORTEST_LOOK_S, self.timeout_s / _LOOKS_PER_TIMEOUT))
        ):
            word = self.stopped_word.value & (_WORD - 1)
            if word and word != self._told:
                self._told = word
                with self._marking:
                    if self._closed:
                        return
                    number = next((n for n, one in enumerate(self.workspaces) if one.stopped), 0)
                self._control.tell(number * _WORD + word)

    def _hear(self, message: int) -> None:
        """Stop the calls of a workspace because of a fault on another node."""
        number, word = divmod(message, _WORD)
        with self._marking:
            if self._closed or number >= len(self.workspaces):
                return
            self.workspaces[number].stop(word)
            if not self.stopped_word.value:
                self._told = word
                self.stopped_word.value = word

    def _peer_ended(self, node: int) -> None:
        self._ended(self._peers[node])
        self.mark_gone(self._peers[node])

    # -- state ----------------------------------------------------------------------------------------------------

    def clear(self, epoch: int) -> None:
        """Forget faults and calls, and reconnect. Every rank calls it, between two host barriers.

        Raises ConfigError on a rank whose puts do not end; they could land in what is cleared.
        """
        self._control.part()
        settled = all(cast(HeapLease, one.memory).settle() for one in self.workspaces)
        all_settled = all(self._hosts.all_gather(settled))  # from here on, no rank listens for the end of a connection
        self._control.close()
        if not all_settled:
            raise ConfigError("puts of NVSHMEM to another node do not end; start the processes again")
        super().clear(epoch)
        self._told = 0
        self._hosts.barrier()
        self._control = self._connect()

    def close(self) -> None:
        self._stop_looking.set()
        with contextlib.suppress(RuntimeError):  # at the end of the process, this is the thread itself
            self._looker.join()
        self._control.close()
        super().close()
