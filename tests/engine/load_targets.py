"""Functions that ranks run for test_load.py."""

from __future__ import annotations

import contextlib

import torch

from shotcast.engine.config import EngineConfig
from shotcast.engine.load import communicators
from shotcast.layers.parallel import Parallel


def workspace_bytes(tensor: int, stages: int, max_bytes: int) -> tuple[int, int]:
    """Return the bytes of this rank's memory that the communicators of all ranks and of the stage share."""
    with contextlib.ExitStack() as stack:
        config = EngineConfig("m", tensor_parallel=tensor, pipeline_parallel=stages, device="cpu")
        world, comm = communicators(config, max_bytes, stack)
        assert (world.world_size, comm.world_size) == (tensor * stages, tensor)
        assert (world is comm) == (stages == 1)
        for communicator in (
            world,
            comm,
        ):  # the project's own kernels carry what all ranks agree on, as they must in a graph
            assert (
                communicator.world_size == 1
                or communicator.explain(torch.empty(512, dtype=torch.uint8), "broadcast").algorithm != "vendor"
            )
        return world._executor.held_bytes, comm._executor.held_bytes


def norm_on_one_rank(algorithm: str) -> None:
    """Check that a rank without peers normalizes more than its workspace holds."""
    with contextlib.ExitStack() as stack:
        config = EngineConfig("m", device="cpu", algorithm=algorithm)
        _, comm = communicators(config, 4 << 20, stack)
        x, residual, weight = torch.ones(9, 32768), torch.full((9, 32768), 2.0), torch.ones(32768)
        assert comm.max_bytes < x.nbytes
        assert algorithm not in comm.candidates(x)
        normed, residual = Parallel(comm, algorithm=algorithm).reduce_norm(x, residual, weight, 0.0)
        assert torch.equal(residual, torch.full((9, 32768), 3.0))
        assert torch.equal(normed, torch.ones(9, 32768))


def pass_to_next_stage(tensor: int, stages: int, nbytes: int) -> None:
    """Send so many bytes from each rank to the same rank of the next stage."""
    with contextlib.ExitStack() as stack:
        config = EngineConfig("m", tensor_parallel=tensor, pipeline_parallel=stages, device="cpu")
        world, comm = communicators(config, nbytes, stack)
        assert world.max_bytes < nbytes == comm.max_bytes
        sent = torch.arange(nbytes // 4) + comm.rank
        if world.rank < tensor:
            world.send(sent.int(), world.rank + tensor)
        else:
            received = world.recv(torch.zeros(nbytes // 4, dtype=torch.int32), world.rank - tensor)
            assert torch.equal(received, sent.int())
        world.check()
