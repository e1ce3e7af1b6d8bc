"""Connections between the processes of a job on several hosts, for small messages.

They are :mod:`multiprocessing` connections over TCP, whose ends have proved that they know the job's key
(:mod:`shotcast.transport.network.handshake`). An end also learns that the other is gone if its host no longer answers:
the kernel probes, and gives up after the connection's timeout.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from multiprocessing.connection import Connection

from shotcast.errors import ConfigError
from shotcast.hardware.interfaces import listen
from shotcast.transport.network.handshake import HandshakeError, handshake

logger = logging.getLogger(__name__)

_HANDSHAKE_S = 10.0
"""Seconds that a connecting process has for each part of the handshake."""
_PROBES = 3
"""Unanswered probes until the kernel considers the other host gone."""
_LONGEST_SILENCE_S = 86400.0
"""The longest timeout of a connection, limited by the kernel's interval between probes."""


class TcpListener:
    """A listening socket of this host that accepts peers who know the key. Raises ConfigError if it cannot listen.

    Args:
        silence_s: how long another host may give no heartbeat while a connection is open.

    Attributes:
        address: where it listens: an address and a port.
    """

    def __init__(self, address: str, key: bytes, silence_s: float):
        self._key, self._silence_s = key, silence_s
        self._socket = listen(address)
        self.address: tuple[str, int] = (address, self._socket.getsockname()[1])

    def fileno(self) -> int:
        """Return the file descriptor, which is readable when somebody connects."""
        return self._socket.fileno()

    def accept(self, timeout_s: float) -> Connection | None:
        """Return the next connection; None if nobody who knows the key connects within ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while select.select([self._socket], [], [], max(0.0, deadline - time.monotonic()))[0]:
            accepted, peer = self._socket.accept()
            try:
                handshake(accepted, self._key, True, _HANDSHAKE_S)
                return _connection(accepted, self._silence_s)
            except (HandshakeError, OSError) as error:
                accepted.close()
                logger.warning("a connection from %s was refused: %s", peer[0], error)
        return None

    def close(self) -> None:
        """Stop listening; connections stay open."""
        self._socket.close()


def connect(address: tuple[str, int], key: bytes, silence_s: float, timeout_s: float) -> Connection:
    """Connect to a :class:`TcpListener`. Raises ConfigError on failure, including if one end does not know the key."""
    try:
        connected = socket.create_connection(address, timeout_s)
    except OSError as error:
        raise ConfigError(
            f"{address[0]}, port {address[1]}, cannot be reached from {socket.gethostname()}: {error}. "
            "SHOTCAST_SOCKET_IFNAME chooses the interface whose address a host gives to others, and "
            "SHOTCAST_PORT_RANGE the ports that a firewall has to let through"
        ) from error
    try:
        handshake(connected, key, False, _HANDSHAKE_S)
    except HandshakeError as error:
        connected.close()
        raise ConfigError(
            f"{address[0]}, port {address[1]}: {error}. SHOTCAST_SECRET has to be the same on all hosts"
        ) from error
    return _connection(connected, silence_s)


def _connection(end: socket.socket, silence_s: float) -> Connection:
    silence_s = min(max(silence_s, 1.0), _LONGEST_SILENCE_S)
    interval = max(1, round(silence_s / (_PROBES + 1)))
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),  # else a message waits until the one before is acknowledged
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(silence_s * 1000)),
    ):
        end.setsockopt(level, option, value)
    return Connection(end.detach())
