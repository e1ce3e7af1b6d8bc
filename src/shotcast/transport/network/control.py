"""The control plane: messages between ranks on different nodes other than the data of calls.

A thread in each process serves one connection to each peer, even while this rank is busy computing. It hears of faults,
notices immediately when a peer ends, and reports which ranks of its node have begun a call.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shotcast.wire import HeaderWords

logger = logging.getLogger(__name__)

_LONGEST_MESSAGE = 1 << 20
"""The most bytes of a message, which is a line of JSON."""


class RankState(NamedTuple):
    """One rank's state as another rank of its node sees it."""

    header: HeaderWords | None  # of the requested call; None if the rank has not begun it
    silent_s: float  # the time since the rank was last seen waiting in a call
    progress: int  # the steps that the rank has completed
    gone: bool  # its process has ended


class ControlPlane:
    """The connections of one rank to its peers, and the thread that serves them.

    Args:
        connections: a socket to the peer on each other node.
        answer: ``answer(epoch)`` returns the states of this node's ranks, in local rank order.
        faulted: ``faulted(word)`` is called if a peer reports a fault.
        ended: ``ended(node)`` is called if the connection to a peer ends without a farewell.
        left: ``left(node)`` is called if a peer says farewell for good.
    """

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        answer: Callable[[int], list[RankState]],
        faulted: Callable[[int], None],
        ended: Callable[[int], None],
        left: Callable[[int], None] = lambda node: None,
    ):
        self._connections = dict(connections)
        self._answer, self._faulted, self._ended, self._left = answer, faulted, ended, left
        self._lock = threading.Lock()
        self._came = threading.Condition()
        self._answers: dict[int, dict[int, list[RankState]]] = {}
        self._numbers = itertools.count()
        self._buffers = dict.fromkeys(connections, b"")
        self._unsent = dict.fromkeys(connections, b"")
        self._parting = self._closing = self._closed = False
        self.ended: set[int] = set()
        self.parted: set[int] = set()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="shotcast control plane", daemon=True)
        self._thread.start()

    def tell(self, word: int) -> None:
        """Report a fault to all peers."""
        for node in self._connections:
            self._send(node, {"fault": word})

    def ask(self, epoch: int, patience_s: float) -> dict[int, list[RankState]]:
        """Query the states of ranks on other nodes for call ``epoch``; return them by node, if it answers."""
        number = next(self._numbers)
        self._answers[number] = {}
        try:
            asked = [node for node in self._connections if self._send(node, {"ask": number, "epoch": epoch})]
            deadline = time.monotonic() + patience_s
            with self._came:
                while len(self._answers[number]) < len([node for node in asked if node not in self.ended]):
                    left = deadline - time.monotonic()
                    if left <= 0 or not self._came.wait(left):
                        break
                return dict(self._answers[number])
        finally:
            del self._answers[number]

    def _send(self, node: int, message: dict[str, Any]) -> bool:
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            if node in self.ended or node in self.parted or self._closing:
                return False
            self._unsent[node] += line
            return self._flush(node)

    def _flush(self, node: int) -> bool:
        """Send as much as the connection accepts, and leave the rest to the thread. The caller holds the lock."""
        try:
            sent = self._connections[node].send(self._unsent[node])
        except BlockingIOError:
            sent = 0
        except OSError as error:
            logger.info("nothing can be told to node %d: %s", node, error)
            self._unsent[node] = b""
            return False
        self._unsent[node] = self._unsent[node][sent:]
        if self._unsent[node]:
            os.eventfd_write(self._wake, 1)
        return True

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ, -1)
            for node, one in self._connections.items():
                selector.register(one, selectors.EVENT_READ, node)
            while not self._closing:
                for key, events in selector.select():
                    if key.data < 0:
                        os.eventfd_read(self._wake)
                    elif events & selectors.EVENT_READ and not self._read(key.data):
                        selector.unregister(key.fileobj)
                    elif events & selectors.EVENT_WRITE:
                        with self._lock:
                            self._flush(key.data)
                for node, unsent in self._unsent.items():
                    if (one := self._connections[node]) in selector.get_map():
                        selector.modify(one, selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0), node)

    def _read(self, node: int) -> bool:
        """Handle the messages that a peer has sent. Returns whether its connection continues."""
        try:
            data = self._connections[node].recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError as error:
            logger.info("the connection to node %d ended: %s", node, error)
            data = b""
        try:
            if data:
                *lines, self._buffers[node] = (self._buffers[node] + data).split(b"\n")
                if len(self._buffers[node]) > _LONGEST_MESSAGE:
                    raise ValueError(f"a message of more than {_LONGEST_MESSAGE} bytes")
                for line in lines:
                    self._serve(node, json.loads(line))
                return True
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("node %d sent a message that cannot be read: %s", node, error)
        if node not in self.parted and not self._parting:
            with self._came:
                self.ended.add(node)
                self._came.notify_all()
            self._ended(node)
        return False

    def _serve(self, node: int, message: dict[str, Any]) -> None:
        if "fault" in message:
            self._faulted(int(message["fault"]))
        elif "ask" in message:
            states = [(state.header, *state[1:]) for state in self._answer(int(message["epoch"]))]
            self._send(node, {"answer": message["ask"], "ranks": states})
        elif "answer" in message:
            ranks = [
                RankState(None if header is None else HeaderWords(*header), silent_s, progress, gone)
                for header, silent_s, progress, gone in message["ranks"]
            ]
            with self._came:
                if message["answer"] in self._answers:
                    self._answers[message["answer"]][node] = ranks
                    self._came.notify_all()
        elif "farewell" in message:
            if message.get("left"):
                self._left(node)
            self.parted.add(node)

    def part(self, for_good: bool = False) -> None:
        """Say farewell and stop listening; connections stay open until :meth:`close`. A second call does nothing.

        If all peers part before any of them closes, none mistakes a closed connection for a dead process.
        """
        if self._parting:
            return
        self._parting = True  # a peer that also parts says no farewell to a node that it has heard one from
        for node in self._connections:
            self._send(node, {"farewell": True, "left": True} if for_good else {"farewell": True})
        with self._lock:
            self._closing = True
        os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def close(self) -> None:
        """Part, and close the connections. A second call does nothing."""
        self.part(for_good=True)
        if self._closed:
            return
        self._closed = True
        os.close(self._wake)
        for one in self._connections.values():
            with contextlib.suppress(OSError):
                one.close()
