"""The server that ranks are forked from, which imports once what each of them needs.

It may start before this process has imported anything else, so that both import at the same time.
"""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal

from shotcast import env

BLOCKED = {signal.SIGINT, signal.SIGTERM}
"""Signals that the server of the ranks does not take, and that a rank takes once it is prepared for them."""

_PRELOAD = [
    "shotcast.launcher.uncollected",
    "torch",
    "torch.distributed",
    "shotcast.launcher.rank_process",
    "shotcast.collectives.communicator",
]
_LAST = "shotcast.transport.cpu.preload"


def start(*modules: str) -> None:
    """Start the server if it does not run, and return at once. It imports ``modules`` too, if they can be imported.

    The server ends with this process, not by a signal to both, which ranks may have to outlive for a while: it inherits
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
    """Start the server with what the ranks of an engine need, unless this process is a rank that something else
    started."""
    job = env.job()
    if job is None or job.rank == 0:
        start("shotcast.engine.worker", "shotcast.engine.load", "shotcast.engine.rank_channels")


def _new_server() -> None:
    """Create a forkserver for our ranks alone: multiprocessing's own belongs to the caller, with its preloads."""
    global server
    server = multiprocessing.forkserver.ForkServer()


server: multiprocessing.forkserver.ForkServer
_new_server()
os.register_at_fork(after_in_child=_new_server)  # a server serves only the process that started it
