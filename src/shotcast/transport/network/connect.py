"""Connections between the ranks of a communicator that are peers on different nodes.

Every rank opens a port for the time of this, tells all ranks where through the job's store, and connects to its peers
on lower nodes; those on higher ones connect to it. The hello of a connection says which ranks it joins and what for,
with a proof (HMAC) of a key: SHOTCAST_SECRET, if it is set, and a number that passes through the store. Whoever does
not know both is turned away.
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
from collections.abc import Iterable
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


class Connections(NamedTuple):
    """The sockets of this rank to its peers, by node."""

    data: dict[int, socket.socket]
    control: dict[int, socket.socket]

    def close(self) -> None:
        for one in (*self.data.values(), *self.control.values()):
            one.close()


class Hosts(HostGroup, Protocol):
    """The ranks of a communicator, from which those of one node can be taken."""

    @property
    def name(self) -> str: ...
    @property
    def meeting_point(self) -> str: ...
    def part(self, ranks: Iterable[int], name: str) -> HostGroup: ...


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
    try:
        listener = listen(address_of_this_host(host.meeting_point or "localhost"))
        place = listener.getsockname()[:2]
    except ConfigError as error:
        failure, place = str(error), ("", 0)
    offers = host.all_gather((place, secrets.token_hex(16), failure), timeout_s)
    if message := "; ".join(f"rank {rank}: {text}" for rank, (_, _, text) in enumerate(offers) if text):
        if listener is not None:
            listener.close()
        raise ConfigError(message)
    assert listener is not None
    key = hashlib.sha256(f"{env.secret()}\0{offers[0][1]}".encode()).digest()
    made = Connections({}, {})
    maker = _Maker(host.rank, layout, key, [token for _, token, _ in offers], f"{host.name}/{generation}", deadline)
    try:
        with listener:
            try:
                maker.connect([tuple(place) for place, _, _ in offers], listener, made)
            except (OSError, ConfigError) as error:
                failure = str(error)
        raise_failures(host, failure)
    except BaseException:
        made.close()
        raise
    return made


class _Maker:
    """Makes the connections of one rank. ``tokens``: a random number of each rank, which its hellos must answer to."""

    def __init__(self, rank: int, layout: NodeLayout, key: bytes, tokens: list[str], name: str, deadline: float):
        self._rank, self._layout, self._key, self._tokens = rank, layout, key, tokens
        self._name, self._deadline = name, deadline
        self._peers = layout.peers(rank)
        self._node = layout.node_of(rank)

    def connect(self, places: list[tuple[str, int]], listener: socket.socket, made: Connections) -> None:
        """Connect to the peers on lower nodes, and accept those on higher ones, into ``made``."""
        for node in range(self._node):
            for purpose in PURPOSES:
                one = self._dial(places[self._peers[node]], node)
                getattr(made, purpose)[node] = one
                hello = {"from": self._rank, "to": self._peers[node], "purpose": purpose, "name": self._name}
                _send(one, {**hello, "proof": self._proof("dials", hello)})
        self._accept(listener, made)
        for node in range(self._node):
            for purpose in PURPOSES:
                one = getattr(made, purpose)[node]
                hello = {"from": self._peers[node], "to": self._rank, "purpose": purpose, "name": self._name}
                answer = self._receive(one, self._deadline, f"rank {self._peers[node]}")
                if not hmac.compare_digest(str(answer.get("proof")), self._proof("accepts", hello)):
                    raise ConfigError(f"rank {self._peers[node]} did not prove that it knows SHOTCAST_SECRET")
        for purpose in PURPOSES:
            for one in getattr(made, purpose).values():
                one.setblocking(False)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _proof(self, role: str, hello: dict[str, Any]) -> str:
        """Return the proof that goes with a hello to the rank ``hello["to"]``."""
        text = json.dumps([role, self._tokens[hello["from"]], self._tokens[hello["to"]], hello], sort_keys=True)
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()

    def _dial(self, place: tuple[str, int], node: int) -> socket.socket:
        who = f"rank {self._peers[node]} (node {self._layout.names[node]}) at {place[0]} port {place[1]}"
        while True:
            left = self._deadline - time.monotonic()
            try:
                return socket.create_connection(place, max(0.001, left))
            except OSError as error:
                if left < 0 or isinstance(error, TimeoutError):
                    raise ConfigError(
                        f"cannot connect to {who}: {error}; SHOTCAST_SOCKET_IFNAME names the network interface that "
                        "hosts use, and SHOTCAST_PORT_RANGE the ports that they open"
                    ) from error
            time.sleep(_RETRY_S)

    def _accept(self, listener: socket.socket, made: Connections) -> None:
        """Accept the peers on higher nodes; whoever else comes is turned away."""
        awaited = {(node, purpose) for node in range(self._node + 1, self._layout.nodes) for purpose in PURPOSES}
        while awaited:
            left = self._deadline - time.monotonic()
            listener.settimeout(max(0.001, left))
            try:
                one, _ = listener.accept()
            except TimeoutError as error:
                absent = self._layout.describe(self._peers[node] for node, _ in awaited)
                raise ConfigError(
                    f"ranks {absent} did not connect to rank {self._rank} at {listener.getsockname()[0]}; "
                    "SHOTCAST_SOCKET_IFNAME names the network interface that hosts use, and SHOTCAST_SECRET is to be "
                    "equal on all of them"
                ) from error
            try:
                hello = self._receive(one, min(self._deadline, time.monotonic() + _STRANGER_S), "a stranger")
                proof = str(hello.pop("proof", ""))
                slot = self._layout.node_of(int(hello["from"])), str(hello["purpose"])
                right = hello["to"] == self._rank and hello["name"] == self._name and slot in awaited
                if not right or not hmac.compare_digest(proof, self._proof("dials", hello)):
                    raise ConfigError("a stranger")
                back = {**hello, "from": self._rank, "to": hello["from"]}
                _send(one, {"proof": self._proof("accepts", back)})
            except (OSError, ConfigError, ValueError, KeyError, TypeError, IndexError, StopIteration):
                one.close()
                continue
            awaited.discard(slot)
            getattr(made, slot[1])[slot[0]] = one

    def _receive(self, one: socket.socket, deadline: float, who: str) -> dict[str, Any]:
        one.settimeout(max(0.001, deadline - time.monotonic()))
        (length,) = _LENGTH.unpack(_exactly(one, _LENGTH.size, who))
        if length > _LONGEST_HELLO:
            raise ConfigError(f"{who} sent what is no hello")
        message = json.loads(_exactly(one, length, who))
        if not isinstance(message, dict):
            raise ConfigError(f"{who} sent what is no hello")
        return message


def _send(one: socket.socket, message: dict[str, Any]) -> None:
    text = json.dumps(message).encode()
    one.sendall(_LENGTH.pack(len(text)) + text)


def _exactly(one: socket.socket, nbytes: int, who: str) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = b""
        with contextlib.suppress(ConnectionResetError):
            part = one.recv(nbytes - len(data))
        if not part:
            raise ConfigError(f"{who} closed the connection; SHOTCAST_SECRET is to be equal on all hosts")
        data += part
    return data
