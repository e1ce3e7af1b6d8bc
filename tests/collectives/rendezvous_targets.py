"""Functions that the process of test_rendezvous.py runs."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import shotcast


def outside_a_job() -> None:
    """Make calls on two communicators of a process that is in no job, and on a part of one."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    x = torch.arange(6.0).view(2, 3)
    with shotcast.Communicator(device="cpu") as comm, shotcast.Communicator(device="cpu") as other:
        assert (comm.rank, comm.world_size) == (0, 1)
        assert comm.name != other.name
        for result in (comm.all_reduce(x), other.all_gather(x), comm.all_to_all(x), comm.gather(x, 0)):
            assert torch.equal(result, x)
        assert torch.equal(comm.all_reduce(x, algorithm="vendor"), x)
        part = other.split(0)
        assert part is not None
        assert torch.equal(part.start("reduce_scatter", x).wait(), x)
        part.close()
        assert torch.equal(torch.compile(comm.all_reduce, backend="eager")(x), x)
        comm.barrier()
        comm.reset()
    assert not dist.is_initialized()
