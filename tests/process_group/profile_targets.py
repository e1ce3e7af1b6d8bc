"""The code of ranks in the tests of profiles."""

from __future__ import annotations

import torch
import torch.distributed as dist
from group_targets import backend, values

from shotcast.process_group import counts

Event = tuple[str, bool, list[list[int]]]


def profiled() -> tuple[list[Event], list[Event]]:
    """Return the ranges of this backend in a profile of calls, some of them asynchronous, and in one of DDP."""
    with backend(60.0) as (rank, size):
        for _ in range(3):  # later calls take the short way, if nobody profiles
            dist.all_reduce(values(rank))
        with torch.profiler.profile(record_shapes=True) as profile:
            dist.all_reduce(values(rank))
            dist.all_reduce(values(rank), async_op=True).wait()
            dist.all_gather([torch.empty(6) for _ in range(size)], values(rank))
            dist.barrier()
        assert counts()["all_reduce"] == {"own": 5}
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
        with torch.profiler.profile(record_shapes=True) as training:
            model(torch.ones(2, 3)).sum().backward()
        return _ranges(profile), _ranges(training)


def _ranges(profile: torch.profiler.profile) -> list[Event]:
    return [(e.name, e.is_async, e.input_shapes) for e in profile.events() if e.name.startswith("shotcast:")]
