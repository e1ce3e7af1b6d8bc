"""Functions that ranks run to see what communicators leave behind."""

from __future__ import annotations

import ctypes
import gc
import os
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import shotcast
from shotcast.memory import arena
from shotcast.memory.holdings import HeldMemory


class Resources(NamedTuple):
    """Resources that a process holds.

    Attributes:
        memory_kib: memory in use: not that which the C library keeps to allocate it again.
        names: those of the threads.
    """

    files: int
    threads: int
    groups: int
    memory_kib: int
    symmetric: dict[str, HeldMemory]
    gpu_mib: int
    names: tuple[str, ...]


class _Mallinfo2(ctypes.Structure):
    """Ten sizes, as ``mallinfo2`` of glibc returns them; the ninth are the bytes that are free in all arenas."""

    _fields_ = [("sizes", ctypes.c_size_t * 10)]


def _kept_kib() -> int:
    """Return the memory that the C library keeps. ``malloc_trim`` leaves much of that of threads that have ended."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    return int(mallinfo2().sizes[8]) >> 10


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
    tasks = Path("/proc/self/task")
    names = sorted((task / "comm").read_text().strip() for task in tasks.iterdir())
    return Resources(
        len(os.listdir("/proc/self/fd")),
        len(names),
        len(dist.distributed_c10d._world.pg_map),  # type: ignore[attr-defined]
        int(status["RssAnon"].split()[0]) - _kept_kib(),
        arena.held(),
        gpu_mib,
        tuple(names),
    )


def many_splits(device: str, count: int, vendor_every: int) -> list[Resources]:
    """Split, make calls and close ``count`` times. Return what is held after a tenth of it, and after all of it.

    Ten closed communicators are kept, as a program may keep some. Every ``vendor_every`` splits, the vendor's library
    serves a call too, for which it makes a communicator; the first is taken when it has made one of two ranks.
    """
    closed: deque[shotcast.Communicator] = deque(maxlen=10)
    held = []
    with shotcast.Communicator(device=device, timeout_s=60) as comm:
        x = torch.ones(1000, device=comm.device)
        for number in range(1, count + 1):
            with comm.split(number % 3 and comm.rank % 2, max_bytes=1 << 20) as part:
                assert part.all_reduce(x).sum().item() == 1000 * part.world_size
                if number % vendor_every == 0:
                    assert part.all_reduce(x, algorithm="vendor").sum().item() == 1000 * part.world_size
            closed.append(part)
            if number in (max(3 * vendor_every, count // 10), count):
                comm._host.barrier()
                held.append(resources(device))
                comm._host.barrier()
    return held


def replays_across_growth(nbytes: list[int]) -> list[int]:
    """Capture a call of each size, and replay all captured before it after each growth. Return the bytes held."""
    held, replays = [], []
    with shotcast.Communicator(device="cuda", timeout_s=60) as comm:
        for size in nbytes:
            x, out = torch.full((2, size // 4), comm.rank + 1.0, device=comm.device)
            comm.all_reduce(x, out=out, algorithm="two_shot")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                comm.all_reduce(x, out=out, algorithm="two_shot")
            replays.append((graph, x, out))
            for number in range(12):
                for graph, x, out in replays:
                    x.fill_(comm.rank + number)
                    graph.replay()
                    torch.cuda.synchronize()
                    comm.check()
                    wanted = sum(rank + number for rank in range(comm.world_size))
                    assert bool((out == wanted).all()), (size, number)
                eager = comm.all_reduce(torch.ones(100, device=comm.device))
                assert bool((eager == comm.world_size).all())
            held.append(comm.explain(x).held_bytes)
    assert arena.held()[str(comm.device)] == HeldMemory(0, 0)
    return held


def one_full_gpu(full: int) -> list[str]:
    """Leave one GPU less than a workspace of free memory, at construction and at growth. Return the errors."""
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    errors = []

    def fill(left_mib: int) -> list[torch.Tensor]:
        torch.cuda.empty_cache()
        if rank != full:
            return []
        spare = torch.cuda.mem_get_info(device)[0] - (left_mib << 20)
        return [torch.empty(max(0, spare), dtype=torch.uint8, device=device)]

    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=60))
    torch.cuda.set_device(device)
    kept = fill(20)
    with pytest.raises(shotcast.ConfigError) as caught:
        shotcast.Communicator(device="cuda", timeout_s=60)
    errors.append(str(caught.value))
    kept.clear()
    torch.cuda.empty_cache()
    with shotcast.Communicator(device="cuda", timeout_s=60) as comm:
        x = torch.ones(16 << 20, device=device)
        comm.all_reduce(x[:100])
        kept = fill(100)
        for _ in range(2):
            with pytest.raises(shotcast.ConfigError) as caught:
                comm.all_reduce(x, algorithm="two_shot")
            errors.append(str(caught.value))
        assert comm.all_reduce(x[:100]).sum().item() == 100 * comm.world_size
        kept.clear()
        torch.cuda.empty_cache()
        assert comm.all_reduce(x, algorithm="two_shot")[-1].item() == comm.world_size
        comm.check()
    return errors
