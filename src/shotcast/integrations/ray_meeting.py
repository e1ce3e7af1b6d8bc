"""The meeting of a group of Ray's actors: rank 0 has a key-value store, and Ray's own tells the others where."""

from __future__ import annotations

import errno
import secrets
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from shotcast.errors import CollectiveTimeout

_CONNECT_S = 3.0
"""Seconds for a connection to an address, which may be that of a process that has ended."""
_PAUSE_S = 0.02
_TOKEN = "token"
_BACKLOG = 1024
"""Connections that wait to be accepted, at most: that of each rank of a group at once."""


class ActorMeeting:
    """The store of one group, from its construction to its end. Ranks may come in any order.

    The address in Ray's store may be out of date: that of a group of the same name that ended without deleting it, or
    that other ranks are still leaving. So each store has a token, which the address names, and takes a rank once. A
    rank that finds something else waits for the next address.
    Groups of other namespaces of Ray may have the same name.

    Raises CollectiveTimeout if rank 0 did not come within ``timeout_s``.
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
        """Start the store and publish its address, in place of one that is left."""
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
        """Let nobody find the store any more. A second call does nothing."""
        if self._address and self._kv._internal_kv_get(self._key) == self._address.encode():
            self._kv._internal_kv_del(self._key)
        self._address = ""


def _listener(host: str) -> socket.socket:
    """Return a socket that listens on the address of this host in Ray's cluster, on a port that the kernel picks.

    It listens on all addresses if none of this host's interfaces has that one, as behind NAT.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind(("", 0))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _joined(address: str, rank: int, own: str) -> dist.Store | None:
    """Return the store at an address; None if it is another, or has had this rank.

    Joining it once more with the same ``own`` does no harm, as an answer may be lost on the way.

    Raises RuntimeError if nothing answers there, or not in time.
    """
    token, port, host = address.split(" ", 2)
    store = dist.TCPStore(
        host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S)
    )
    if not store.check([_TOKEN]) or store.get(_TOKEN).decode() != token:
        return None
    return store if store.compare_set(f"came/{rank}", "", own).decode() == own else None
