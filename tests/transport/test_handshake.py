"""The handshake of connections between hosts: who knows the key gets in, and nobody else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from shotcast.transport.network.handshake import HandshakeError, connection_key, handshake, new_key

KEY = b"k" * 32


def outcomes(client: Callable[[socket.socket], None], key: bytes = KEY, timeout_s: float = 60.0) -> list[str]:
    """Return what the listening end, and then the other end, got from a handshake."""
    ends = socket.socketpair()
    found = ["", ""]

    def run(number: int, action: Callable[[], None]) -> None:
        with ends[number]:
            try:
                action()
                assert ends[number].gettimeout() is None
                found[number] = "proved"
            except HandshakeError as error:
                found[number] = str(error)

    listening = threading.Thread(target=run, args=(0, lambda: handshake(ends[0], key, True, timeout_s)))
    listening.start()
    run(1, lambda: client(ends[1]))
    listening.join(100)
    assert not listening.is_alive()
    return found


def test_both_ends_that_know_the_key_are_let_in() -> None:
    assert outcomes(lambda end: handshake(end, KEY, False, 60.0)) == ["proved", "proved"]


def test_another_key_is_refused_on_both_ends() -> None:
    listening, connecting = outcomes(lambda end: handshake(end, b"x" * 32, False, 60.0))
    assert listening == "the other end does not know the key of this job"
    assert connecting.startswith("the other end closed the connection: it does not know the key")


def test_a_listener_that_does_not_know_the_key_is_refused() -> None:
    def impostor(end: socket.socket) -> None:
        end.sendall(b"n" * 32)
        end.recv(32)
        end.recv(32)
        end.sendall(b"p" * 32)

    ends = socket.socketpair()
    with ends[0], ends[1]:
        thread = threading.Thread(target=impostor, args=(ends[0],))
        thread.start()
        with pytest.raises(HandshakeError, match="does not know the key of this job"):
            handshake(ends[1], KEY, False, 60.0)
        thread.join(100)


def test_a_proof_that_is_sent_back_is_refused() -> None:
    """Both ends take the role that connects: who does not know the key could relay the other's own proof."""
    ends = socket.socketpair()

    def reflect() -> None:
        ends[0].sendall(ends[0].recv(32))
        ends[0].sendall(ends[0].recv(32))

    with ends[0], ends[1]:
        thread = threading.Thread(target=reflect)
        thread.start()
        with pytest.raises(HandshakeError, match="does not know the key"):
            handshake(ends[1], KEY, False, 60.0)
        thread.join(100)


def test_a_silent_stranger_is_not_waited_for() -> None:
    def silent(end: socket.socket) -> None:
        end.settimeout(100)
        while end.recv(32):
            pass
        end.settimeout(None)

    listening, _ = outcomes(silent, timeout_s=0.1)
    assert listening == "the other end did not prove within 0.1 s that it knows the key"


def test_the_secret_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    job = new_key()
    monkeypatch.delenv("SHOTCAST_SECRET", raising=False)
    without = connection_key(job)
    monkeypatch.setenv("SHOTCAST_SECRET", "s")
    assert len({without, connection_key(job), job}) == 3
    assert connection_key(job) == connection_key(job) != connection_key(new_key())
