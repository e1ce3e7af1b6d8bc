"""Connections between the ranks of a communicator on different nodes.

Every rank opens a port and tells all ranks where, through the job's store. It connects to its peers on lower nodes,
and those on higher ones connect to it. The hello of a connection says which ranks it joins and what for, with a proof
(HMAC) of a key: SHOTCAST_SECRET, if it is set, and a number that passes through the store. Whoever does not know both
is turned away.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from shotcast import env
from shotcast.errors import ConfigError
from shotcast.hardware.interfaces import address_of_this_host, listen
from shotcast.hardware.nodes import NodeLayout
from shotcast.memory.symmetric import HostGroup, raise_failures

PURPOSES = ("data", "control")
_LENGTH = struct.Struct("!I")
_LONGEST_HELLO = 4096
_STRANGER_S = 2.0
"""The limit for the hello of a connection, which may be a stranger's."""
_RETRY_S = 0.05
_ADVICE = (
    "SHOTCAST_SOCKET_IFNAME names the network interface that hosts use, SHOTCAST_PORT_RANGE the ports that they open, "
    "and SHOTCAST_SECRET is to be equal on all of them"
)


class Hosts(HostGroup, Protocol):
    """The ranks of a communicator, from which those of one node can be taken."""

    @property
    def name(self) -> str: ...
    @property
    def meeting_point(self) -> str: ...
    def part(self, ranks: Iterable[int], name: str) -> HostGroup: ...


class Connections(NamedTuple):
    """The connections of a rank.

    Attributes:
        data, control: a socket to the peer on each other node.
        listener: where other ranks connect.
        hellos: makes and verifies hellos.
    """

    data: dict[int, socket.socket]
    control: dict[int, socket.socket]
    listener: socket.socket
    hellos: Hellos

    def close(self) -> None:
        for one in (*self.data.values(), *self.control.values(), self.listener):
            one.close()


def connect(host: Hosts, layout: NodeLayout, generation: int, timeout_s: float) -> Connections:
    """Connect this rank with its peers. Collective.

    Args:
        host: all ranks of the communicator. The route to where they meet chooses this host's address where no
            interface is named.
        generation: how often they have connected before.
        timeout_s: the limit for all of it.

    Raises:
        ConfigError: on all ranks, if two of them did not connect: with the ranks, their addresses and the reason.
        CollectiveTimeout: a rank did not come.
    """
    deadline = time.monotonic() + timeout_s
    failure, listener = "", None
    place: tuple[str, int] = ("", 0)
    try:
        listener = listen(address_of_this_host(host.meeting_point or "localhost"))
        place = listener.getsockname()[:2]
    except ConfigError as error:
        failure = str(error)
    offers = host.all_gather((place, secrets.token_hex(16), failure), timeout_s)
    if message := "; ".join(f"rank {rank}: {text}" for rank, (_, _, text) in enumerate(offers) if text):
        if listener is not None:
            listener.close()
        raise ConfigError(message)
    assert listener is not None
    hellos = Hellos(
        host.rank,
        layout,
        hashlib.sha256(f"{env.secret()}\0{offers[0][1]}".encode()).digest(),
        [token for _, token, _ in offers],
        [(address, port) for (address, port), _, _ in offers],
        f"{host.name}/{generation}",
    )
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
    """Connect to the peers on lower nodes, and accept those on higher ones."""
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
    """The beginnings of connections, in which both ends prove who they are.

    Args:
        rank: of this process.
        key: what both ends must know.
        tokens: a random number of each rank, by rank; a proof holds for these alone.
        places: the address and the port of each rank, by rank.
        name: of the communicator and its generation.
    """

    def __init__(
        self,
        rank: int,
        layout: NodeLayout,
        key: bytes,
        tokens: list[str],
        places: list[tuple[str, int]],
        name: str,
    ):
        self._rank, self._layout, self._key, self._tokens, self._name = rank, layout, key, tokens, name
        self.places = places

    def dial(self, rank: int, purpose: str, deadline: float) -> socket.socket:
        """Connect to ``rank``, and return the socket, which never blocks. Raises OSError."""
        one = socket.create_connection(self.places[rank], max(0.001, deadline - time.monotonic()))
        try:
            hello = {"from": self._rank, "to": rank, "purpose": purpose, "name": self._name}
            _send(one, {**hello, "proof": self._proof("dials", hello)})
            answer = _receive(one, deadline)
            if not hmac.compare_digest(str(answer.get("proof")), self._proof("accepts", hello)):
                raise OSError(f"rank {rank} did not prove who it is")
        except BaseException:
            one.close()
            raise
        return _ready(one)

    def accept(self, one: socket.socket, expected: Callable[[int, str], bool]) -> tuple[int, str] | None:
        """Return which rank has connected, and the purpose; None, and close it, if it is a stranger.

        Args:
            expected: ``expected(rank, purpose)``: whether such a connection is wanted.
        """
        try:
            hello = _receive(one, time.monotonic() + _STRANGER_S)
            proof, caller, purpose = str(hello.pop("proof", "")), int(hello["from"]), str(hello["purpose"])
            known = 0 <= caller < len(self._tokens) and hello["to"] == self._rank and hello["name"] == self._name
            if known and hmac.compare_digest(proof, self._proof("dials", hello)) and expected(caller, purpose):
                _send(one, {"proof": self._proof("accepts", hello)})
                _ready(one)
                return caller, purpose
        except (OSError, ValueError, KeyError, TypeError):
            pass
        one.close()
        return None

    def _proof(self, role: str, hello: dict[str, Any]) -> str:
        """Return the proof of the end of a connection that dials, or accepts it."""
        text = json.dumps([role, self._tokens[hello["from"]], self._tokens[hello["to"]], hello], sort_keys=True)
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()


def _ready(one: socket.socket) -> socket.socket:
    one.setblocking(False)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one


def _send(one: socket.socket, message: dict[str, Any]) -> None:
    text = json.dumps(message).encode()
    one.sendall(_LENGTH.pack(len(text)) + text)


def _receive(one: socket.socket, deadline: float) -> dict[str, Any]:
    """Return a message. Raises OSError if none comes, ValueError if it is none."""
    (length,) = _LENGTH.unpack(_exactly(one, _LENGTH.size, deadline))
    if length > _LONGEST_HELLO:
        raise ValueError("this is no hello")
    message = json.loads(_exactly(one, length, deadline))
    if not isinstance(message, dict):
        raise ValueError("this is no hello")
    return message


def _exactly(one: socket.socket, nbytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < nbytes:
        one.settimeout(max(0.001, deadline - time.monotonic()))
        part = b""
        with contextlib.suppress(ConnectionResetError):
            part = one.recv(nbytes - len(data))
        if not part:
            raise ConnectionError("the other end closed the connection")
        data += part
    return data
