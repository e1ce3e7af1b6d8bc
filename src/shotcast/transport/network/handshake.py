"""A handshake in which both ends of a new connection prove that they know a key, without sending it.

Each end sends 32 random bytes. Then the end that connected sends HMAC-SHA256(key, role + both), and the end that
listens answers with its own proof, whose role differs, so a proof cannot be reflected. Later traffic on the connection
is neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket

from shotcast import env

_NONCE_BYTES = 32
_CONNECTS, _LISTENS = b"connects", b"listens"


class HandshakeError(ConnectionError):
    """The other end did not prove that it knows the key."""


def new_key() -> bytes:
    """Generate a random key for the ranks of a job, to be passed through its store."""
    return secrets.token_bytes(32)


def connection_key(job_key: bytes) -> bytes:
    """Derive the connection key from the job's key and SHOTCAST_SECRET, which does not pass through the store."""
    return hmac.digest(env.secret().encode(), job_key, hashlib.sha256)


def handshake(connection: socket.socket, key: bytes, listens: bool, timeout_s: float) -> None:
    """Prove knowledge of ``key`` on a new connection, and verify the other end's proof.

    The connection is blocking afterwards. ``listens`` is True on the end that accepted it; ``timeout_s`` limits each
    part. Raises HandshakeError if the other end does not know the key, ended the connection, or was too slow.
    """
    connection.settimeout(timeout_s)
    try:
        own = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(own)
        other = receive(connection, _NONCE_BYTES)
        nonces = own + other if listens else other + own
        proofs = {role: hmac.digest(key, role + nonces, hashlib.sha256) for role in (_CONNECTS, _LISTENS)}
        if not listens:
            connection.sendall(proofs[_CONNECTS])
        expected = proofs[_CONNECTS if listens else _LISTENS]
        if not hmac.compare_digest(receive(connection, len(expected)), expected):
            raise HandshakeError("the other end does not know the key of this job")
        if listens:
            connection.sendall(proofs[_LISTENS])
    except TimeoutError as error:
        raise HandshakeError(f"the other end did not prove within {timeout_s:g} s that it knows the key") from error
    except HandshakeError:
        raise
    except OSError as error:
        raise HandshakeError(f"the connection ended before the other end had proved anything: {error}") from error
    connection.settimeout(None)


def receive(connection: socket.socket, size: int) -> bytes:
    """Read the next ``size`` bytes of a connection. Raises HandshakeError if it ends early."""
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise HandshakeError("the other end closed the connection: it does not know the key, or is no rank")
        received += part
    return received
