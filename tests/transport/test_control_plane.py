"""The control plane: messages between ranks of different nodes beside the data of calls."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest

from shotcast.transport.network.control import ControlPlane, RankState


def _read(one: socket.socket, count: int) -> list[dict[str, int]]:
    """Return the next messages of a connection."""
    with one.makefile("rb") as lines:
        return [json.loads(lines.readline()) for _ in range(count)]


def test_messages_stay_whole_on_a_connection_that_is_full() -> None:
    """A connection may take a part of a message: the rest follows when the peer reads again."""
    own, peer = socket.socketpair()
    with peer:
        own.setblocking(False)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        peer.settimeout(100)
        state = RankState(header=None, silent_s=0.0, progress=0, gone=False)
        plane = ControlPlane({1: own}, lambda epoch: [state] * 200, lambda word: None, lambda node: None)
        peer.sendall(b"".join(_framed({"ask": number, "epoch": 1}) for number in range(40)))
        for word in range(2000):
            plane.tell(word)
        messages = _read(peer, 2040)
        plane.close()
    assert [message["fault"] for message in messages if "fault" in message] == list(range(2000))
    assert sorted(message["answer"] for message in messages if "answer" in message) == list(range(40))


def test_peers_that_part_at_the_same_time_are_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that has heard the farewell may close its end before this rank's thread has ended."""
    own, peer = socket.socketpair()
    own.setblocking(False)
    ended: list[int] = []
    plane = ControlPlane({1: own}, lambda epoch: [], lambda word: None, ended.append)
    send = plane._send

    def send_and_part(node: int, message: dict[str, Any]) -> bool:
        sent = send(node, message)
        peer.close()
        time.sleep(0.2)
        return sent

    monkeypatch.setattr(plane, "_send", send_and_part)
    plane.close()
    assert ended == []


def _framed(message: dict[str, int]) -> bytes:
    return json.dumps(message).encode() + b"\n"


@pytest.mark.parametrize("for_good", [False, True])
def test_a_peer_that_leaves_for_good_is_told_from_one_that_resets(for_good: bool) -> None:
    own, peer = socket.socketpair()
    ended: list[int] = []
    left: list[int] = []
    for one in (own, peer):
        one.setblocking(False)
    here = ControlPlane({1: own}, lambda epoch: [], lambda word: None, ended.append, left.append)
    there = ControlPlane({0: peer}, lambda epoch: [], lambda word: None, lambda node: None)
    there.part(for_good)
    until = time.monotonic() + 60
    while not here.parted and time.monotonic() < until:
        time.sleep(0.01)
    here.close()
    there.close()
    assert (ended, left) == ([], [1] if for_good else [])


def test_a_plane_that_has_parted_hears_nothing() -> None:
    """It keeps its connection, so that a peer that has not parted hears no end of it."""
    own, peer = socket.socketpair()
    own.setblocking(False)
    heard: list[Any] = []
    with peer:
        peer.settimeout(100)
        plane = ControlPlane({1: own}, lambda epoch: [], heard.append, heard.append)
        plane.part()
        assert _read(peer, 1) == [{"farewell": True}]
        peer.sendall(_framed({"fault": 7}))
        peer.settimeout(0.2)
        with pytest.raises(TimeoutError):
            peer.recv(1)
        plane.tell(8)  # to nobody
        plane.close()
        plane.close()
    assert heard == []
