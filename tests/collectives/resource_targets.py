"""Functions that ranks run to see what communicators leave behind."""

from __future__ import annotations

import ctypes
import gc
import os
from typing import NamedTuple

import torch
import torch.distributed as dist

import shotcast
from shotcast.memory import arena


class Resources(NamedTuple):
    """What a process holds."""

    files: int
    threads: int
    groups: int
    memory_kib: int
    symmetric: dict[str, arena.Held]
    gpu_mib: int


def resources(device: str) -> Resources:
    """Return what this process holds now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    gpu_mib = 0
    if device == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        gpu_mib = (total - free) >> 20
    return Resources(
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        len(dist.distributed_c10d._world.pg_map),  # type: ignore[attr-defined]
        int(status["RssAnon"].split()[0]),
        arena.held(),
        gpu_mib,
    )


def many_splits(device: str, count: int, vendor_every: int) -> list[Resources]:
    """Split, make calls and close ``count`` times. Return what is held after a tenth of it, and after all of it.

    The closed communicators are kept, as a program may keep them. Every ``vendor_every`` splits, the vendor's library
    serves a call too, for which it makes a communicator.
    """
    closed, held = [], []
    with shotcast.Communicator(device=device, timeout_s=60) as comm:
        x = torch.ones(1000, device=comm.device)
        for number in range(1, count + 1):
            with comm.split(number % 3 and comm.rank % 2, max_bytes=1 << 20) as part:
                assert part.all_reduce(x).sum().item() == 1000 * part.world_size
                if number % vendor_every == 0:
                    assert part.all_reduce(x, algorithm="vendor").sum().item() == 1000 * part.world_size
            closed.append(part)
            if number in (max(1, count // 10), count):
                comm._host.barrier()
                held.append(resources(device))
                comm._host.barrier()
    return held
