"""Functions that ranks run to see what communicators leave behind that are dropped and not closed."""

from __future__ import annotations

import gc
import threading
import time
from typing import NamedTuple

import torch
from resource_targets import resources

import shotcast


class Left(NamedTuple):
    """The holdings of a process: files, threads, maps of shared memory, leased bytes, and memory of its GPU."""

    files: int
    threads: int
    maps: int
    leased: int
    gpu_mib: int


def _left(device: str) -> Left:
    held = resources(device)
    with open("/proc/self/maps") as file:
        maps = sum("/shotcast-" in line for line in file)
    leased = sum(one.leased for one in held.symmetric.values())
    return Left(held.files, held.threads, maps, leased, held.gpu_mib)


def _settled(device: str, wanted: Left, limit_s: float) -> Left:
    """Return what is held once it is no more than what is wanted, or after a while."""
    until = time.monotonic() + limit_s
    while True:
        held = _left(device)
        if all(one <= other for one, other in zip(held, wanted, strict=True)) or time.monotonic() > until:
            return held
        time.sleep(0.02)


def dropped(device: str, how: str) -> tuple[Left, Left]:
    """Drop a communicator after calls of some kind. Return what is held before it is made, and after."""
    with shotcast.Communicator(device=device, timeout_s=60) as comm:
        x = torch.ones(1000, device=comm.device)

        def use() -> None:
            part = comm.split(0)
            assert part is not None
            if how == "vendor":
                assert part.all_reduce(x, algorithm="vendor").sum().item() == 1000 * part.world_size
            elif how == "started":
                handle = part.start("all_reduce", x)
                assert handle.wait().sum().item() == 1000 * part.world_size
            elif how == "running":
                assert device == "cuda"
                torch.cuda._sleep(200_000_000)
            out = part.all_reduce(x)
            if how != "running":
                assert out.sum().item() == 1000 * part.world_size

        leased = _left(device).leased
        use()  # what stays for the process, such as threads of the library
        gc.collect()
        comm._host.barrier()
        time.sleep(0.5)
        until = time.monotonic() + 100
        while (before := _left(device)).leased > leased and time.monotonic() < until:
            time.sleep(0.02)
        assert before.leased == leased
        for _ in range(3):
            use()
            gc.collect()
        comm._host.barrier()
        after = _settled(device, before._replace(gpu_mib=before.gpu_mib + 64), 100)
        assert not any(thread.name == "shotcast started calls" for thread in threading.enumerate())
        comm.all_reduce(x)
        comm._host.barrier()
        return before, after


def replayed_after_a_drop() -> float:
    """Replay a graph whose communicator was dropped. Return the sum."""
    with shotcast.Communicator(device="cuda", timeout_s=60) as comm:
        x = torch.ones(1000, device=comm.device)

        def captured() -> torch.cuda.CUDAGraph:
            part = comm.split(0)
            assert part is not None
            part.all_reduce(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                part.all_reduce(x, out=x)
            return graph

        graph = captured()
        gc.collect()
        time.sleep(1)
        comm.split(0)  # would lease the memory that was given back
        comm._host.barrier()
        graph.replay()
        torch.cuda.synchronize()
        return float(x[0])
