"""Cleanup of communicators that were garbage-collected without being closed.

A communicator may be collected at any moment, in a thread that holds any lock, and while its kernels run. So its
finalizer only queues its resources, and one thread of the process waits for the kernels and closes them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from shotcast.collectives.interface import Executor
from shotcast.collectives.peer_watch import PeerWatch
from shotcast.collectives.stream_order import StreamChain
from shotcast.collectives.vendor.vendor import Vendor
from shotcast.memory import driver

logger = logging.getLogger(__name__)

_LOOK_S = 0.05
"""Polling interval for the end of a capture."""


class Held(NamedTuple):
    """The resources that a communicator must release; none of them refers to it."""

    executor: Executor | None
    vendor: Vendor
    peers: PeerWatch
    chain: StreamChain | None
    device: torch.device

    def close(self) -> None:
        """Wait for the kernels, then close all parts."""
        if self.chain is not None and self.chain.has_eager:
            while (stream := self.chain.last()) is None:  # it is being captured
                time.sleep(_LOOK_S)
            stream.record_event().synchronize()
        self.vendor.close()
        self.peers.close()
        if self.executor is not None:
            self.executor.close()


class _Closer:
    """The thread that closes resources, alive while there are communicators; a forked process has its own."""

    def __init__(self) -> None:
        self._dropped: queue.SimpleQueue[Held | None] = queue.SimpleQueue()
        self._counting = threading.Lock()
        self._watched = 0
        self._thread: threading.Thread | None = None
        self._kept: list[Held] = []

    def watch(self, comm: Any, held: Held) -> weakref.finalize[..., Any]:
        """Close ``held`` once ``comm`` has been collected, unless :meth:`leave` gets the returned value first."""
        with self._counting:
            self._watched += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(self._dropped,), name="shotcast dropped", daemon=True
                )
                self._thread.start()
        end = weakref.finalize(comm, self._dropped.put, held)  # which may be called within itself
        end.atexit = False
        return end

    def leave(self, end: weakref.finalize[..., Any]) -> None:
        """Stop watching a communicator that was closed. The thread has ended after the last one."""
        if end.detach() is None:
            return
        with self._counting:
            self._watched -= 1
            thread = None if self._watched else self._thread
            if thread is not None:
                self._thread = None
                self._dropped.put(None)
                self._dropped = queue.SimpleQueue()  # of the next thread; nothing else will be put into this one
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self, dropped: queue.SimpleQueue[Held | None]) -> None:
        while (held := dropped.get()) is not None:
            if held.chain is not None and held.chain.has_captured:
                self._kept.append(held)  # for replays, of which nobody tells
            else:
                try:
                    with _beside_captures(held.device):
                        held.close()
                except Exception:
                    logger.exception("a communicator that was dropped could not give back all that it held")
            del held
            with self._counting:
                self._watched -= 1
                if not self._watched:
                    self._thread = None
                    return


@contextlib.contextmanager
def _beside_captures(device: torch.device) -> Iterator[None]:
    """Make a GPU current without disturbing captures of other threads.

    A new thread has no driver context, even if PyTorch says that the GPU is current.
    """
    if device.type == "cpu":
        yield
        return
    with torch.cuda.device(device), driver.side_stream(device.index).current(), driver.relaxed():
        yield


CLOSER = _Closer()


def _after_fork() -> None:
    global CLOSER
    _inherited.append(CLOSER)  # what it holds is the maker's
    CLOSER = _Closer()


_inherited: list[_Closer] = []
os.register_at_fork(after_in_child=_after_fork)
