"""Actors of Ray for tests. They are ordinary ones, which know nothing of shotcast but the name of the backend."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta
from typing import Any

import numpy as np
import ray
import torch
from ray.util import collective


@ray.remote(num_cpus=0)
class Rank:
    """One rank of a group."""

    def join(self, world_size: int, rank: int, group: str) -> None:
        self.rank, self.world_size, self.group = rank, world_size, group
        collective.init_collective_group(world_size, rank, backend="shotcast", group_name=group)

    def leave(self) -> bool:
        collective.destroy_collective_group(self.group)
        return collective.is_group_initialized(self.group)

    def value(self, *shape: int) -> torch.Tensor:
        return torch.arange(float(np.prod(shape))).view(shape) + 100 * self.rank

    def every_call(self) -> dict[str, Any]:
        """Make each call of Ray's once on tensors, and return what it wrote."""
        rank, size, group = self.rank, self.world_size, self.group
        done: dict[str, Any] = {}
        for op in collective.types.ReduceOp:
            x = self.value(3) + 1
            collective.allreduce(x, group, op)
            done[op.name] = x
        x = self.value(4)
        collective.reduce(x, 1, group)
        done["reduce"] = x
        x = self.value(2, 2)
        collective.broadcast(x, size - 1, group)
        done["broadcast"] = x
        parts = [torch.empty(2, 3) for _ in range(size)]
        collective.allgather(parts, self.value(2, 3), group)
        done["allgather"] = parts
        out = torch.empty(2, 3)
        collective.reducescatter(out, [self.value(2, 3) + part for part in range(size)], group)
        done["reducescatter"] = out
        x = self.value(5)
        if rank % 2 == 0 and rank + 1 < size:
            collective.send(x, rank + 1, group)
        elif rank % 2:
            collective.recv(x, rank - 1, group)
        done["recv"] = x
        collective.barrier(group)
        return done

    def odd_tensors(self) -> dict[str, Any]:
        """Return the results in numpy arrays, in rows that are not contiguous, and in a tensor that needs gradients."""
        array = np.full([3], self.rank, dtype=np.int32)
        collective.allreduce(array, self.group)
        table = torch.zeros(3, 4)
        column = table[:, 1]
        column += self.rank
        collective.allreduce(column, self.group)
        trained = torch.full([2], float(self.rank), requires_grad=True)
        collective.allreduce(trained, self.group)
        received = [np.empty([2], dtype=np.int64) for _ in range(self.world_size)]
        collective.allgather(received, np.full([2], self.rank), self.group)
        return {"array": array, "table": table, "trained": trained.detach(), "received": received}

    def served_by(self) -> tuple[str, bool]:
        communicator = collective.get_group_handle(self.group).communicator()
        return communicator.topology.transport.name, communicator.explain(torch.zeros(16)).by_library

    def on_gpu(self) -> tuple[str, str, list[float], list[float], list[float]]:
        """Return the kernels, the device, a sum and a message on this actor's GPU, and a sum on its CPU."""
        communicator = collective.get_group_handle(self.group).communicator("cuda")
        x = torch.full([1000], self.rank + 1.0, device="cuda")
        collective.allreduce(x, self.group)
        message = torch.full([10], self.rank + 1.0, device="cuda")
        if self.rank == 0:
            collective.send(message, 1, self.group)
        else:
            collective.recv(message, 0, self.group)
        host = torch.full([10], self.rank + 1.0)
        collective.allreduce(host, self.group)
        collective.barrier(self.group)
        return (
            communicator.topology.transport.name,
            str(communicator.device),
            x.tolist(),
            message.tolist(),
            host.tolist(),
        )

    def refused(self) -> list[str]:
        """Return the texts of the errors of calls that this backend does not have."""
        group = collective.get_group_handle(self.group)
        options = collective.types.AllReduceOptions()
        options.timeout_ms = timedelta(seconds=3)
        texts = []
        for call in (
            lambda: group.allreduce([torch.zeros(1)] * 2),
            lambda: group.allreduce([torch.zeros(1)], options),
            lambda: group.communicator("cuda"),
            lambda: group.reducescatter([torch.zeros(1)], [[torch.zeros(2)] * self.world_size]),
        ):
            try:
                call()
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}")
        return texts

    def many_sums(self, calls: int) -> int:
        """Return how many of ``calls`` sums of random sizes were right."""
        sizes, right = random.Random(3), 0
        for number in range(calls):
            size = sizes.randrange(1, 50_000)
            x = torch.full([size], float(self.rank + number))
            collective.allreduce(x, self.group)
            right += bool((x == sum(range(number, number + self.world_size))).all())
        return right

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def reduce_until_error(self) -> float:
        """Reduce again and again; the error is this call's."""
        while True:
            collective.allreduce(torch.zeros(1000), self.group)
            time.sleep(0.001)

    def sum_in(self, group: str) -> float:
        """Return the sum of 1 + rank in a group that this actor may not have joined yet."""
        x = torch.ones(1) + collective.get_group_handle(group).rank
        collective.allreduce(x, group)
        return float(x)

    def reduce_once(self) -> list[float]:
        x = torch.full([2], self.rank + 1.0)
        collective.allreduce(x, self.group)
        return x.tolist()
