"""The receive buffers of connections between nodes, which let a whole slice arrive at once."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hosts_ranks import executor_of

from local_ranks import LocalGroup, run_ranks
from shotcast.transport.network import connect, layout

ALLOWED = int(Path("/proc/sys/net/core/rmem_max").read_text())


def _buffer(group: LocalGroup) -> int:
    executor = executor_of(group, 2, 1)
    with socket.socket(fileno=os.dup(executor._network[layout.DESCRIPTORS // 8 + 1 - group.rank])) as one:
        found = one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    group.barrier()
    executor.close()
    return found


@pytest.mark.usefixtures("compiled_before_forking")
@pytest.mark.skipif(ALLOWED < connect._LEAST_ROOM, reason="the host allows little room (net.core.rmem_max)")
def test_both_ends_of_a_connection_have_room() -> None:
    """The kernel counts twice what it is asked for."""
    assert run_ranks(2, _buffer) == [2 * min(ALLOWED, connect._ROOM)] * 2


def test_little_room_is_left_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer of a chosen size no longer grows, so a small one would stay small."""
    monkeypatch.setattr(connect, "_LEAST_ROOM", ALLOWED + 1)
    with socket.socket() as one:
        before = one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        connect.make_room(one)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == before
