"""Messages between two ranks on different nodes, on a dedicated one-way connection.

The sender connects before its first message. A thread of the receiver accepts the connection, so a short message can be
sent before its receiver asks for it, as inside a node. A message is one frame with its number on the connection.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from shotcast.device.cpu.atomics import load, store
from shotcast.device.cpu.compilation import CompiledSchedule
from shotcast.device.cpu.lazy_numba import njit
from shotcast.transport.cpu.host_call import HostCall
from shotcast.transport.cpu.layout import DEADLINE, HEADER, MESSAGE_NUMBER, NBYTES, NETWORK, ROOT
from shotcast.transport.cpu.waiting import ABORTED, is_stopped
from shotcast.transport.network.connect import Hellos
from shotcast.transport.network.frames import add_frame, begin_transfer, transfer
from shotcast.transport.network.layout import RECEIVES, SENDS

_SLICE_S = 0.02
"""Time between checks for faults while a rank waits for a connection."""
_FIRST_TRY_S, _LAST_TRY_S = 0.25, 2.0
"""Time limits of the first attempt to connect and of later ones, during which faults are not checked."""


@njit(error_model="numpy")
def _message(context: int, plan: int, data: int, kind: int) -> int:
    if is_stopped(context):
        return ABORTED
    store(context + DEADLINE, 0)
    network, descriptor, number = load(context + NETWORK), load(plan + ROOT), load(plan + MESSAGE_NUMBER)
    header, word = load(plan + HEADER), load(plan + HEADER + 8)
    begin_transfer(network)
    add_frame(network, kind, descriptor, 0, number, header, word, data, load(plan + NBYTES), 0)
    return transfer(context, network)


def send(context: int, plan: int, x: int, out: int) -> int:
    """Send nbytes at x over the connection of the plan; ``out`` is unused."""
    return _message(context, plan, x, SENDS)


def recv(context: int, plan: int, x: int, out: int) -> int:
    """Receive nbytes from the connection of the plan into out; ``x`` is unused.

    Returns MISMATCHED if another message is next.
    """
    return _message(context, plan, out, RECEIVES)


_SENDING = CompiledSchedule(send)
_RECEIVING = CompiledSchedule(recv)

SEND = HostCall(schedule=_SENDING)
RECV = HostCall(schedule=_RECEIVING)
SEND_HEADER = HostCall(schedule=_SENDING, header_only=True)
RECV_HEADER = HostCall(schedule=_RECEIVING, header_only=True)


class MessageConnections:
    """The message connections of one rank, opened when they are first needed.

    Closing this object closes the listener.
    """

    def __init__(self, listener: socket.socket, hellos: Hellos):
        self._listener, self._hellos = listener, hellos
        self._came = threading.Condition()
        self._sending: dict[int, socket.socket] = {}
        self._receiving: dict[int, socket.socket] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="shotcast messages", daemon=True)
        self._thread.start()

    def to(self, rank: int, deadline: float, goes_on: Callable[[], bool]) -> int | None:
        """Return the descriptor of the connection to ``rank``; None at the deadline or when ``goes_on()`` is False."""
        patience_s = _FIRST_TRY_S
        while rank not in self._sending:
            if (now := time.monotonic()) >= deadline or not goes_on():
                return None
            try:
                self._sending[rank] = self._hellos.dial(rank, "message", min(deadline, now + patience_s))
            except OSError:
                time.sleep(_SLICE_S)
                patience_s = min(2 * patience_s, _LAST_TRY_S)
        return self._sending[rank].fileno()

    def of(self, rank: int, deadline: float, goes_on: Callable[[], bool]) -> int | None:
        """Return the descriptor of the connection from ``rank``; None at the deadline or if ``goes_on()`` is False."""
        with self._came:
            while rank not in self._receiving:
                if time.monotonic() >= deadline or not goes_on():
                    return None
                self._came.wait(_SLICE_S)
            return self._receiving[rank].fileno()

    def _run(self) -> None:
        self._listener.settimeout(None)
        while True:
            try:
                one, _ = self._listener.accept()
            except OSError:
                return  # the listener was closed
            caller = self._hellos.accept(one, lambda rank, purpose: purpose == "message")
            if caller is None:
                continue
            with self._came:
                if self._closing or caller[0] in self._receiving:
                    one.close()
                    continue
                self._receiving[caller[0]] = one
                self._came.notify_all()

    def close(self) -> None:
        with self._came:
            self._closing = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for one in (*self._sending.values(), *self._receiving.values()):
            one.close()
