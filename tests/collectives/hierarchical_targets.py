"""Functions that the ranks of tests/collectives/test_hierarchical.py run."""

from __future__ import annotations

import os
import time
from unittest import mock

import torch
from workers import inputs

import shotcast


def over_nodes(local: int, timeout_s: float = 30.0) -> shotcast.Communicator:
    with mock.patch.dict(os.environ, {"SHOTCAST_RANKS_PER_NODE": str(local)}):
        return shotcast.Communicator(device="cpu", max_bytes=1 << 18, timeout_s=timeout_s)


def sums(local: int) -> float:
    """Return the largest error of sums beside float64, relative to what the dtype may round."""
    worst = 0.0
    with over_nodes(local) as comm, shotcast.HierarchicalAllReduce(comm) as three:
        assert (three.node.world_size, three.peers.world_size) == (local, comm.world_size // local)
        for number, (dtype, count) in enumerate(
            ((torch.float32, 1), (torch.bfloat16, 1001), (torch.float16, 64), (torch.float32, 5000))
        ):
            xs = [
                torch.randn(count, generator=torch.Generator().manual_seed(10 * number + r))
                for r in range(comm.world_size)
            ]
            xs = [x.to(dtype).view(1, -1) for x in xs]
            wanted = torch.stack([x.double() for x in xs]).sum(0)
            scale = torch.stack([x.double().abs() for x in xs]).sum(0)
            got = three.all_reduce(xs[comm.rank])
            same = xs[comm.rank].clone()
            assert three.all_reduce(same, out=same) is same
            assert torch.equal(got, same)
            assert got.shape == xs[0].shape
            assert len(set(comm._host.all_gather(got.float().numpy().tobytes()))) == 1
            worst = max(worst, float(((got.double() - wanted).abs() / scale).max() / torch.finfo(dtype).eps))
    return worst


def late(local: int) -> list[str]:
    """Have the last rank come late. Return the errors of this rank."""
    errors = []
    with over_nodes(local, 0.6) as comm, shotcast.HierarchicalAllReduce(comm) as three:
        x = inputs(100, torch.float32, comm.world_size, 1, "cpu")[comm.rank]
        three.all_reduce(x)
        comm._host.barrier()
        if comm.rank == comm.world_size - 1:
            time.sleep(2.5)
        try:
            three.all_reduce(x)
            three.check()
        except shotcast.CollectiveTimeout as error:
            errors.append(f"{error.rank} misses {error.missing}: {error.where}")
        comm._host.barrier()
    return errors


def refused() -> str:
    with shotcast.Communicator(device="cpu", max_bytes=1 << 18, timeout_s=30) as comm:
        try:
            shotcast.HierarchicalAllReduce(comm)
        except shotcast.ConfigError as error:
            return str(error)
    return ""
