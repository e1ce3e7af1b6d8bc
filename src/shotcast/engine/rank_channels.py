"""Connections between the ranks of an engine beside their collectives.

They carry plans from rank 0 to all other ranks, and sampled tokens from the last pipeline stage back to rank 0. They
are connections of :mod:`multiprocessing`: over a Unix socket if all ranks are on one machine, over TCP otherwise. Each
end proves that it knows a key, which the communicator broadcasts. A rank whose peer is gone gets ConnectionError.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch

from shotcast import env
from shotcast.collectives.communicator import Communicator
from shotcast.engine.model_runner import ModelRunnerOutput
from shotcast.engine.step_plan import ScheduledSequence, StepPlan
from shotcast.errors import ShotcastError

_INVITATION_BYTES = 512


class DriverChannel:
    """Rank 0's connections: it sends plans to the other ranks and receives the outputs of ``output_rank``.

    If ``output_rank`` is rank 0, there is nothing to receive.
    """

    def __init__(self, job: Communicator, output_rank: int):
        self._connections: dict[int, Connection] = {}
        self._output_rank = output_rank
        if job.world_size == 1:
            return
        key = secrets.token_bytes(32)
        local = os.environ.get("LOCAL_WORLD_SIZE", "") == str(job.world_size)
        with tempfile.TemporaryDirectory(prefix="shotcast-", dir=env.socket_dir()) as folder:
            address = os.path.join(folder, "ranks") if local else (os.environ["MASTER_ADDR"], 0)
            with Listener(address, backlog=job.world_size, authkey=key) as listener:
                _broadcast_invitation(job, (listener.address, key))
                for _ in range(job.world_size - 1):
                    connection = listener.accept()
                    self._connections[connection.recv()] = connection

    def send_plan(self, plan: StepPlan | None) -> None:
        """Send a plan to every other rank. None ends them."""
        # as plain tuples: pickling the class of each takes ten times as long, and this is done for every token
        plain = plan and (plan.number, [tuple(sequence) for sequence in plan.sequences], plan.stamped)
        message = pickle.dumps(plain)
        for rank, connection in self._connections.items():
            with _peer_errors(rank):
                connection.send_bytes(message)

    def recv_output(self, timeout_s: float) -> ModelRunnerOutput:
        """Wait for the next output of the last stage.

        Raises:
            ShotcastError: it has sent nothing for ``timeout_s`` seconds.
        """
        connection = self._connections[self._output_rank]
        with _peer_errors(self._output_rank):
            if not connection.poll(timeout_s):
                raise ShotcastError(f"rank {self._output_rank} (last stage) has sent nothing for {timeout_s:g} s")
            output = connection.recv()
        assert isinstance(output, ModelRunnerOutput)
        return output

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()


class WorkerChannel:
    """The connection of another rank to rank 0."""

    def __init__(self, job: Communicator):
        address, key = _broadcast_invitation(job, None)
        self._connection = Client(address, authkey=key)
        self._connection.send(job.rank)

    def recv_plan(self) -> StepPlan | None:
        """Wait for the next plan. None means that the engine ends."""
        with _peer_errors(0):
            plain = pickle.loads(self._connection.recv_bytes())
        if plain is None:
            return None
        number, sequences, stamped = plain
        return StepPlan(number, tuple(map(ScheduledSequence._make, sequences)), stamped)

    def has_plan(self, timeout_s: float) -> bool:
        """Return whether a plan has arrived, or arrives within ``timeout_s`` seconds."""
        with _peer_errors(0):
            return self._connection.poll(timeout_s)

    def send_output(self, output: ModelRunnerOutput) -> None:
        """Send the output of a step to rank 0."""
        with _peer_errors(0):
            self._connection.send(output)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@contextlib.contextmanager
def _peer_errors(rank: int) -> Iterator[None]:
    """Turn errors of a connection into a ConnectionError that names the rank at its other end."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise ConnectionError(f"rank {rank} is gone") from error


def _broadcast_invitation(job: Communicator, invitation: Any) -> Any:
    """Broadcast the address and key of rank 0's listener, and return them on every rank."""
    page = torch.zeros(_INVITATION_BYTES, dtype=torch.uint8)
    if job.rank == 0:
        data = pickle.dumps(invitation)
        page[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    page = page.to(job.device)
    job.broadcast(page, 0)
    return pickle.loads(bytes(page.tolist()))
