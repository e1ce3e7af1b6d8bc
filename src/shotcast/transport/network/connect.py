"""Connections between the ranks of a communicator on different nodes.

Every rank opens a port and publishes its address through the job's store. It connects to its peers on lower nodes, and
peers on higher nodes connect to it. A fresh key also passes through the store. A caller that does not know it, and
SHOTCAST_SECRET if that is set, is rejected.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shotcast.errors import ConfigError
from shotcast.hardware.interfaces import address_of_this_host, listen
from shotcast.hardware.nodes import NodeLayout
from shotcast.memory.host_group import StoreGroup
from shotcast.memory.symmetric import raise_failures
from shotcast.transport.network.handshake import connection_key, handshake, new_key, receive

logger = logging.getLogger(__name__)

PURPOSES = ("data", "control")
_HELLO = struct.Struct("!II8s")
"""The calling rank, the rank that it calls, and the purpose."""
_STRANGER_S = 2.0
"""Time limit for the hello of a connection, which may come from a stranger."""
_RETRY_S = 0.05
_LEAST_ROOM, _ROOM = 1 << 20, 8 << 20
"""Bytes of a connection's receive buffer: the least that beats the kernel's choice, and the most."""
_ADVICE = (
    "SHOTCAST_SOCKET_IFNAME names the network interface that hosts use, SHOTCAST_PORT_RANGE the ports that they open, "
    "and SHOTCAST_SECRET is to be equal on all of them"
)


class Connections(NamedTuple):
    """The connections of a rank."""

    data: dict[int, socket.socket]  # a socket to the peer on each other node
    control: dict[int, socket.socket]  # a second socket to each, for the control plane
    listener: socket.socket  # where other ranks connect
    hellos: Hellos  # makes and verifies hellos

    def close(self) -> None:
        for one in (*self.data.values(), *self.control.values(), self.listener):
            one.close()


def connect(host: StoreGroup, layout: NodeLayout, timeout_s: float) -> Connections:
    """Connect this rank to its peers within ``timeout_s``. Collective.

    Raises ConfigError on all ranks if two of them did not connect, naming the ranks, their addresses and the reason;
    CollectiveTimeout if a rank did not arrive.
    """
    deadline = time.monotonic() + timeout_s
    failure, listener = "", None
    place: tuple[str, int] = ("", 0)
    try:
        listener = listen(address_of_this_host(host.meeting_point or "localhost"))
        make_room(listener)  # connections inherit it
        place = listener.getsockname()[:2]
    except ConfigError as error:
        failure = str(error)
    offers = host.all_gather((place, new_key(), failure), timeout_s)
    if message := "; ".join(f"rank {rank}: {text}" for rank, (_, _, text) in enumerate(offers) if text):
        if listener is not None:
            listener.close()
        raise ConfigError(message)
    assert listener is not None
    places = [(address, port) for (address, port), _, _ in offers]
    hellos = Hellos(host.rank, connection_key(offers[0][1]), places)
    made = Connections({}, {}, listener, hellos)
    try:
        try:
            _connect_peers(made, host.rank, layout, deadline)
        except (OSError, ConfigError) as error:
            failure = str(error)
        raise_failures(host, failure)
    except BaseException:
        made.close()
        raise
    return made


def _connect_peers(made: Connections, rank: int, layout: NodeLayout, deadline: float) -> None:
    """Connect to the peers on lower nodes, and accept peers on higher ones."""
    node, peers = layout.node_of(rank), layout.peers(rank)
    for lower in range(node):
        for purpose in PURPOSES:
            getattr(made, purpose)[lower] = _dial(made.hellos, peers[lower], purpose, deadline, layout)
    awaited = {(higher, purpose) for higher in range(node + 1, layout.nodes) for purpose in PURPOSES}

    def expected(caller: int, purpose: str) -> bool:
        return caller in peers and (layout.node_of(caller), purpose) in awaited

    while awaited:
        made.listener.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            one, _ = made.listener.accept()
        except TimeoutError as error:
            absent = layout.describe(peers[higher] for higher, _ in awaited)
            where = made.listener.getsockname()[0]
            raise ConfigError(f"ranks {absent} did not connect to rank {rank} at {where}; {_ADVICE}") from error
        if (caller := made.hellos.accept(one, expected)) is not None:
            slot = layout.node_of(caller[0]), caller[1]
            awaited.discard(slot)
            getattr(made, slot[1])[slot[0]] = one


def _dial(hellos: Hellos, rank: int, purpose: str, deadline: float, layout: NodeLayout) -> socket.socket:
    """Connect to a peer, which may be late. Raises ConfigError at the deadline."""
    while True:
        try:
            return hellos.dial(rank, purpose, deadline)
        except OSError as error:
            if time.monotonic() > deadline or isinstance(error, TimeoutError):
                address, port = hellos.places[rank]
                where = f"rank {layout.describe([rank])} at {address} port {port}"
                raise ConfigError(f"cannot connect to {where}: {error}; {_ADVICE}") from error
        time.sleep(_RETRY_S)


class Hellos:
    """The opening exchange of connections: both ends prove that they know the key, and the caller identifies itself.

    ``places`` holds the address and port of each rank.
    """

    def __init__(self, rank: int, key: bytes, places: list[tuple[str, int]]):
        self._rank, self._key = rank, key
        self.places = places

    def dial(self, rank: int, purpose: str, deadline: float) -> socket.socket:
        """Connect to ``rank``, and return a nonblocking socket. Raises OSError."""
        address, port = self.places[rank]
        family, kind, protocol, _, place = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        one = socket.socket(family, kind, protocol)
        try:
            make_room(one)
            one.settimeout(max(0.001, deadline - time.monotonic()))
            one.connect(place)
            handshake(one, self._key, listens=False, timeout_s=max(0.001, deadline - time.monotonic()))
            one.sendall(_HELLO.pack(self._rank, rank, purpose.encode()))
        except BaseException:
            one.close()
            raise
        return _ready(one)

    def accept(self, one: socket.socket, expected: Callable[[int, str], bool]) -> tuple[int, str] | None:
        """Identify the rank that has connected, and its purpose; for a stranger, close the connection and return None.

        ``expected(rank, purpose)`` says whether such a connection is wanted.
        """
        try:
            handshake(one, self._key, listens=True, timeout_s=_STRANGER_S)
            one.settimeout(_STRANGER_S)
            caller, called, name = _HELLO.unpack(receive(one, _HELLO.size))
            purpose = name.rstrip(b"\0").decode()
            if called == self._rank and expected(caller, purpose):
                _ready(one)
                return caller, purpose
        except (OSError, ValueError, struct.error) as error:
            logger.info("a connection was turned away: %s", error)
        one.close()
        return None


def make_room(one: socket.socket) -> None:
    """Enlarge the receive buffer so that a whole slice can arrive at once, instead of 64 KB in a first round trip.

    Call it before the socket connects, or on a listener before the connections that inherit the setting arrive. If the
    host allows little (``net.core.rmem_max``), the size is left to the kernel, whose buffers grow over time.
    """
    with contextlib.suppress(OSError, ValueError):
        allowed = int(Path("/proc/sys/net/core/rmem_max").read_text())
        if allowed >= _LEAST_ROOM:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, min(allowed, _ROOM))


def _ready(one: socket.socket) -> socket.socket:
    one.setblocking(False)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one
