"""Rendezvous of a group of Ray actors: rank 0 hosts a key-value store, and Ray's store tells the others its address."""

from __future__ import annotations

import errno
import secrets
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from shotcast.errors import CollectiveTimeout

_CONNECT_S = 3.0
"""Time limit in seconds for connecting to an address, whose process may have ended."""
_PAUSE_S = 0.02
_TOKEN = "token"
_BACKLOG = 1024
"""The maximum number of pending connections, enough for all ranks of a group at once."""


class ActorMeeting:
    """The store of one group, from its construction to its end. Ranks may arrive in any order.

    The address in Ray's store may be stale: a group of the same name may have ended without deleting it, or other ranks
    may still be leaving. So each store has a token, which the address includes, and accepts each rank once. A rank that
    finds anything else waits for the next address. Groups in other Ray namespaces may have the same name.

    Raises CollectiveTimeout if rank 0 does not arrive within ``timeout_s``.
    """

    def __init__(self, group_name: str, rank: int, world_size: int, timeout_s: float):
        import ray
        from ray.experimental import internal_kv

        namespace = ray.get_runtime_context().namespace
        self._kv, self._host = internal_kv, ray.util.get_node_ip_address
        self._key = f"shotcast/collective group/{namespace}/{group_name}"
        self._address = ""
        self.store = self._open() if rank == 0 else self._find(rank, timeout_s)

    def _open(self) -> dist.Store:
        """Start the store and publish its address, replacing a stale one."""
        host, token = self._host(), secrets.token_hex(8)
        listener = _listener(host)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
        )
        store.set(_TOKEN, token)
        self._address = f"{token} {store.port} {host}"
        self._kv._internal_kv_put(self._key, self._address)
        return store

    def _find(self, rank: int, timeout_s: float) -> dist.Store:
        deadline, left, own = time.monotonic() + timeout_s, "", secrets.token_hex(8)
        while time.monotonic() < deadline:
            address = (self._kv._internal_kv_get(self._key) or b"").decode()
            if address and address != left:
                try:
                    store = _joined(address, rank, own)
                except (dist.DistError, RuntimeError):  # gone, or not to be reached now: the address is tried again
                    store = None
                else:
                    if store is not None:
                        store.set_timeout(timedelta(seconds=timeout_s))  # that of a connection ends here
                        return store
                    left = address
            time.sleep(_PAUSE_S)
        raise CollectiveTimeout(rank, [0], "construction", 0, timeout_s)

    def close(self) -> None:
        """Unpublish the store. A second call does nothing."""
        if self._address and self._kv._internal_kv_get(self._key) == self._address.encode():
            self._kv._internal_kv_del(self._key)
        self._address = ""


def _listener(host: str) -> socket.socket:
    """Listen on this host's address in Ray's cluster, on a port that the kernel picks.

    Listens on all addresses if no interface of this host has that one, such as behind NAT.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address, family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", 0), family=family, backlog=_BACKLOG)


def _joined(address: str, rank: int, own: str) -> dist.Store | None:
    """Join the store at an address; return None if it is another store, or has already had this rank.

    Joining again with the same ``own`` is safe, since an answer may be lost.

    Raises RuntimeError if nothing answers there, or not in time.
    """
    token, port, host = address.split(" ", 2)
    store = dist.TCPStore(
        host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S)
    )
    if not store.check([_TOKEN]) or store.get(_TOKEN).decode() != token:
        return None
    return store if store.compare_set(f"came/{rank}", "", own).decode() == own else None
