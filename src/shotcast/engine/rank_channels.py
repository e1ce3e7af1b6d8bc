"""Connections between the ranks of an engine, separate from their collectives.

They carry plans from rank 0 to all other ranks, and sampled tokens from the last pipeline stage back to rank 0. They
are :mod:`multiprocessing` connections: over a Unix socket if all ranks are on one host, over TCP otherwise. Each end
proves that it knows a key, which the communicator broadcasts (over TCP, SHOTCAST_SECRET too). A rank whose peer is gone
gets ConnectionError.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch

from shotcast import env
from shotcast.collectives.communicator import Communicator
from shotcast.engine.outputs import ModelRunnerOutput
from shotcast.engine.step_plan import ScheduledSequence, StepPlan
from shotcast.errors import ShotcastError
from shotcast.hardware.interfaces import address_of_this_host
from shotcast.launcher.tcp_channels import TcpListener, connect
from shotcast.transport.network.handshake import connection_key, new_key

_INVITATION_BYTES = 512
_ACCEPT_S = 60.0
"""Seconds that each rank of another host has to connect, once all know the address."""


class DriverChannel:
    """Rank 0's connections: it sends plans to the other ranks and receives the outputs of ``output_rank``.

    If ``output_rank`` is rank 0, there is nothing to receive.

    Args:
        silence_s: how long another host may send no heartbeat.
    """

    def __init__(self, world: Communicator, output_rank: int, silence_s: float):
        self._connections: dict[int, Connection] = {}
        self._output_rank = output_rank
        if world.world_size == 1:
            return
        if env.local_world_size() == world.world_size:
            self._accept_local(world)
        else:
            self._accept_remote(world, silence_s)

    def _accept_local(self, world: Communicator) -> None:
        key = new_key()
        with (
            tempfile.TemporaryDirectory(prefix="shotcast-", dir=env.socket_dir()) as folder,
            Listener(os.path.join(folder, "ranks"), backlog=world.world_size, authkey=key) as listener,
        ):
            _broadcast_invitation(world, (listener.address, key))
            for _ in range(world.world_size - 1):
                connection = listener.accept()
                self._connections[connection.recv()] = connection

    def _accept_remote(self, world: Communicator, silence_s: float) -> None:
        key = new_key()
        listener = TcpListener(address_of_this_host(os.environ["MASTER_ADDR"]), connection_key(key), silence_s)
        with contextlib.closing(listener):
            _broadcast_invitation(world, (listener.address, key))
            while absent := [rank for rank in range(1, world.world_size) if rank not in self._connections]:
                connection = listener.accept(_ACCEPT_S)
                if connection is None:
                    raise ShotcastError(f"ranks {absent} have not connected to rank 0 within {_ACCEPT_S:g} s")
                self._connections[connection.recv()] = connection

    def send_plan(self, plan: StepPlan | None) -> None:
        """Send a plan to every other rank. None tells them to exit."""
        # as plain tuples: pickling the class of each takes ten times as long, and this is done for every token
        plain = plan and (plan.number, [tuple(sequence) for sequence in plan.sequences], *plan[2:])
        message = pickle.dumps(plain)
        for rank, connection in self._connections.items():
            with _peer_errors(rank):
                connection.send_bytes(message)

    def recv_output(self, timeout_s: float) -> ModelRunnerOutput:
        """Wait for the next output of the last stage; raise ShotcastError after ``timeout_s`` seconds."""
        connection = self._connections[self._output_rank]
        with _peer_errors(self._output_rank):
            if not connection.poll(timeout_s):
                raise ShotcastError(f"rank {self._output_rank} (last stage) has sent nothing for {timeout_s:g} s")
            output = connection.recv()
        assert isinstance(output, ModelRunnerOutput)
        return output

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


class WorkerChannel:
    """The connection of another rank to rank 0."""

    def __init__(self, world: Communicator, silence_s: float):
        address, key = _broadcast_invitation(world, None)
        if isinstance(address, str):
            self._connection = Client(address, authkey=key)
        else:
            self._connection = connect(address, connection_key(key), silence_s, _ACCEPT_S)
        self._connection.send(world.rank)

    def recv_plan(self) -> StepPlan | None:
        """Wait for the next plan. None means that the engine is ending."""
        with _peer_errors(0):
            plain = pickle.loads(self._connection.recv_bytes())
        if plain is None:
            return None
        number, sequences, *rest = plain
        return StepPlan(number, tuple(map(ScheduledSequence._make, sequences)), *rest)

    def has_plan(self, timeout_s: float) -> bool:
        """Return whether a plan has arrived, or arrives within ``timeout_s`` seconds."""
        with _peer_errors(0):
            return self._connection.poll(timeout_s)

    def send_output(self, output: ModelRunnerOutput) -> None:
        with _peer_errors(0):
            self._connection.send(output)

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def _peer_errors(rank: int) -> Iterator[None]:
    """Turn connection errors into a ConnectionError that names the rank at the other end."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise ConnectionError(f"rank {rank} is gone") from error


def _broadcast_invitation(world: Communicator, invitation: Any) -> Any:
    """Broadcast the address and key of rank 0's listener, and return them on every rank."""
    page = torch.zeros(_INVITATION_BYTES, dtype=torch.uint8, device="cpu")
    if world.rank == 0:
        data = pickle.dumps(invitation)
        page[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    page = page.to(world.device)
    world.broadcast(page, 0)
    return pickle.loads(bytes(page.tolist()))
