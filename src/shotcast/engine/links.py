"""How the ranks of an engine talk beside their collectives: plans from rank 0 to all, results back from the last stage.

Connections of :mod:`multiprocessing`, over a Unix socket where all ranks are on one machine, over TCP otherwise; each
end proves that it knows a key, which travels by the communicator. A rank whose peer is gone gets ConnectionError.
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
from shotcast.engine.plan import SequenceStep, StepPlan
from shotcast.engine.runner import Drawn
from shotcast.errors import ShotcastError

_INVITATION_BYTES = 512


class Driver:
    """Rank 0's end: gives plans to the other ranks, and takes what ``reporter``, if it is not rank 0, has drawn."""

    def __init__(self, job: Communicator, reporter: int):
        self._links: dict[int, Connection] = {}
        self._reporter = reporter
        if job.world_size == 1:
            return
        key = secrets.token_bytes(32)
        local = os.environ.get("LOCAL_WORLD_SIZE", "") == str(job.world_size)
        with tempfile.TemporaryDirectory(prefix="shotcast-", dir=env.socket_dir()) as folder:
            address = os.path.join(folder, "links") if local else (os.environ["MASTER_ADDR"], 0)
            with Listener(address, backlog=job.world_size, authkey=key) as listener:
                _invite(job, (listener.address, key))
                for _ in range(job.world_size - 1):
                    link = listener.accept()
                    self._links[link.recv()] = link

    def give(self, plan: StepPlan | None) -> None:
        """Hand a step to every other rank; None ends them."""
        # as plain tuples: naming the class of each takes ten times as long, and this is done for every token
        plain = plan and (plan.number, [tuple(sequence) for sequence in plan.sequences], plan.stamped)
        message = pickle.dumps(plain)
        for rank, link in self._links.items():
            with _losing(rank):
                link.send_bytes(message)

    def take(self, timeout_s: float) -> Drawn:
        """What the last stage has drawn next; waits for it.

        Raises:
            ShotcastError: it has said nothing for so long.
        """
        link = self._links[self._reporter]
        with _losing(self._reporter):
            if not link.poll(timeout_s):
                raise ShotcastError(f"rank {self._reporter}, of the last stage, has said nothing for {timeout_s:g} s")
            drawn = link.recv()
        assert isinstance(drawn, Drawn)
        return drawn

    def close(self) -> None:
        for link in self._links.values():
            link.close()


class Follower:
    """Another rank's end."""

    def __init__(self, job: Communicator):
        address, key = _invite(job, None)
        self._link = Client(address, authkey=key)
        self._link.send(job.rank)

    def next(self) -> StepPlan | None:
        """The next step; None when there is none any more."""
        with _losing(0):
            plain = pickle.loads(self._link.recv_bytes())
        if plain is None:
            return None
        number, sequences, stamped = plain
        return StepPlan(number, tuple(map(SequenceStep._make, sequences)), stamped)

    def waits(self, seconds: float) -> bool:
        """Whether :meth:`next` has something at once, or will have so soon."""
        with _losing(0):
            return self._link.poll(seconds)

    def report(self, drawn: Drawn) -> None:
        with _losing(0):
            self._link.send(drawn)

    def close(self) -> None:
        self._link.close()


@contextlib.contextmanager
def _losing(rank: int) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise ConnectionError(f"rank {rank} is gone") from error


def _invite(job: Communicator, invitation: Any) -> Any:
    """Rank 0's invitation, on every rank."""
    page = torch.zeros(_INVITATION_BYTES, dtype=torch.uint8)
    if job.rank == 0:
        data = pickle.dumps(invitation)
        page[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    page = page.to(job.device)
    job.broadcast(page, 0)
    return pickle.loads(bytes(page.tolist()))
