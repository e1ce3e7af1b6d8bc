"""The store of a job's rendezvous, in a separate process so that the process that starts ranks needs no PyTorch."""

from __future__ import annotations

import multiprocessing
import signal
import socket
from multiprocessing.connection import Connection

from shotcast.launcher.rank_process import Descriptor, RankProcess, die_with

HOST = "127.0.0.1"
_BACKLOG = 1024


class JobStore:
    """A TCPStore on this host that ranks can connect to. It ends with this process, unless closed earlier.

    Attributes:
        port: its port at ``HOST``, which the kernel picks.
    """

    def __init__(self) -> None:
        with socket.create_server((HOST, 0), backlog=_BACKLOG) as listener:
            self.port: int = listener.getsockname()[1]
            alive_r, self._alive = multiprocessing.get_context("forkserver").Pipe(duplex=False)
            self._process = RankProcess(target=_serve, args=(Descriptor(listener.fileno()), self.port, alive_r))
            self._process.name = "shotcast store"
            try:
                self._process.start()
            except BaseException:
                self._alive.close()  # it may run already
                raise
            finally:
                alive_r.close()

    def close(self) -> None:
        """End the process, which frees the port."""
        self._alive.close()
        self._process.join()
        self._process.close()


def _serve(listener: Descriptor, port: int, alive: Connection) -> None:
    import torch.distributed as dist

    die_with(alive.fileno())
    store = dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.number)
    while store is not None:
        signal.pause()
