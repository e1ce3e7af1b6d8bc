"""The server that ranks are forked from, which imports their common dependencies once.

It may start before this process has imported anything else, so that both import concurrently.
"""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal

from shotcast import env

BLOCKED = {signal.SIGINT, signal.SIGTERM}
"""Signals that the rank server blocks, and that a rank unblocks once it is ready for them."""

_PRELOAD = [
    "shotcast.launcher.uncollected",
    "torch",
    "torch.distributed",
    "shotcast.launcher.rank_process",
    "shotcast.collectives.communicator",
]
_LAST = "shotcast.transport.cpu.preload"


def start(*modules: str) -> None:
    """Start the server unless it is running, and return at once. It also imports ``modules``, if they can be imported.

    The server ends with this process, not by a signal to both, which ranks may need to outlive briefly: it inherits
    both signals blocked. (It ignores SIGINT itself, but only after its imports.)
    """
    env.socket_dir()
    server.set_forkserver_preload([*_PRELOAD, *modules, _LAST])
    multiprocessing.resource_tracker.ensure_running()  # otherwise the server starts it, which unblocks them
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:
        server.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def start_for_engine() -> None:
    """Start the server with the dependencies of engine ranks, unless this process is a rank started elsewhere."""
    job = env.job()
    if job is None or job.rank == 0:
        start("shotcast.engine.worker", "shotcast.engine.load", "shotcast.engine.rank_channels")


def _new_server() -> None:
    """Create a forkserver only for our ranks, since multiprocessing's belongs to the caller, with its preloads."""
    global server
    server = multiprocessing.forkserver.ForkServer()


server: multiprocessing.forkserver.ForkServer
_new_server()
os.register_at_fork(after_in_child=_new_server)  # a server serves only the process that started it
