"""Functions that the ranks of tests/collectives/test_cuda_waits.py run."""

from __future__ import annotations

import gc
import os
import time
from typing import NamedTuple

import torch

import shotcast
from shotcast.memory import arena
from shotcast.memory.holdings import HeldMemory

MIB = 1 << 20


class Grown(NamedTuple):
    """The time of two growths beside a waiting receive, and the memory held behind them, a reset and the end."""

    took_s: float
    grown: HeldMemory
    reset: HeldMemory
    closed: HeldMemory


def growth_beside_a_receive(timeout_s: float) -> Grown:
    """Grow twice while a kernel of rank 0 waits for a message that rank 1 sends afterwards."""
    with shotcast.Communicator(device="cuda", timeout_s=timeout_s, max_bytes=64 * MIB) as comm:
        messages = comm.split(0)
        assert messages is not None
        x, message = torch.ones(15 * MIB, device=comm.device), torch.full((4,), 7.0, device=comm.device)
        comm.all_reduce(x[:4].clone())
        _pass_on(messages, message)
        torch.cuda.synchronize()
        comm._host.barrier()
        begun, side = time.monotonic(), torch.cuda.Stream()
        if comm.rank == 0:
            with torch.cuda.stream(side):
                messages.recv(message.zero_(), 1)
            time.sleep(0.3)
        for count in (4 * MIB, 15 * MIB):  # workspaces for 32 MiB and 64 MiB, of which the second replaces the first
            assert comm.all_reduce(x[:count].clone(), algorithm="two_shot")[-1].item() == comm.world_size
        if comm.rank == 1:
            messages.send(message, 0)
        side.synchronize()
        torch.cuda.synchronize()
        took_s = time.monotonic() - begun
        comm.check()
        messages.check()
        assert message.tolist() == [7.0] * 4
        name = str(comm.device)
        grown = arena.held()[name]
        comm.reset()
        reset = arena.held()[name]
        assert comm.all_reduce(x)[0].item() == comm.world_size
        messages.close()
    return Grown(took_s, grown, reset, arena.held()[name])


def _pass_on(comm: shotcast.Communicator, message: torch.Tensor) -> None:
    if comm.rank == 1:
        comm.send(message, 0)
    else:
        comm.recv(message, 1)


def dropped_in_a_capture() -> list[HeldMemory]:
    """Collect the memory of a communicator while a graph is captured; replay that. Return what is held then, and after
    a reset."""
    with shotcast.Communicator(device="cuda", timeout_s=60) as comm:
        other = comm.split(0, max_bytes=64 * MIB)
        assert other is not None
        x = torch.ones(16 * MIB, device=comm.device)
        other.all_reduce(x[:1000].clone())
        other.all_reduce(x.clone())
        comm.all_reduce(x[:1000].clone())
        torch.cuda.synchronize()
        graph, out = torch.cuda.CUDAGraph(), torch.empty_like(x[:1000])
        with torch.cuda.graph(graph):
            comm.all_reduce(x[:1000], out=out)
            other._executor.workspaces.clear()
            gc.collect()
            comm.all_reduce(out, out=out)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        comm.check()
        assert out.tolist() == [float(comm.world_size**2)] * 1000
        held = [arena.held()[str(comm.device)]]
        comm._host.barrier()
        comm.reset()
        held.append(arena.held()[str(comm.device)])
        other._closed = True  # its memory was given back
    return held


def dead_rank_of_one_queue(victim: int, timeout_s: float) -> tuple[tuple[int, ...], str, float]:
    """End a rank while a call waits for it, behind which there is more to do. Return whom the other names, and when."""
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    comm = shotcast.Communicator(device="cuda", timeout_s=timeout_s)
    x, side = torch.ones(1 << 18, device=comm.device), torch.cuda.Stream()
    for _ in range(2):
        comm.all_reduce(x)
    torch.cuda.synchronize()
    ends = comm._host.all_gather(time.monotonic() + 1.0)[victim]
    if comm.rank == victim:
        time.sleep(max(0.0, ends - time.monotonic()))
        os._exit(0)
    with torch.cuda.stream(side):
        comm.all_reduce(x)
    torch.cuda.current_stream().wait_stream(side)
    x.mul_(2)
    try:
        while time.monotonic() < ends + timeout_s:
            comm.check()
            time.sleep(0.01)
    except shotcast.CollectiveTimeout as error:
        took_s = time.monotonic() - ends
        comm.close()
        return error.missing, error.reason, took_s
    raise AssertionError("the dead rank was not named")


def told_of_a_wait(late: int, late_s: float) -> tuple[list[tuple[str, tuple[int, ...]]], bool]:
    """Bring a rank late. Return what the others' hosts hear meanwhile, and whether they hear no more afterwards."""
    heard: list[tuple[str, tuple[int, ...]]] = []
    with shotcast.Communicator(device="cuda", timeout_s=60) as comm:
        x = torch.ones(1 << 18, device=comm.device)
        comm.all_reduce(x.clone())
        torch.cuda.synchronize()
        comm._host.barrier()
        if comm.rank == late:
            time.sleep(late_s)
        comm.all_reduce(x)
        stream = torch.cuda.current_stream()
        while not stream.query():
            wait = comm._executor.wait()
            if wait and (told := (wait.op, tuple(comm._executor.awaited(wait)))) not in heard:
                heard.append(told)
            time.sleep(0.05)
        comm.check()
        comm._executor.wait()
        time.sleep(0.05)
        return heard, comm._executor.wait() is None
