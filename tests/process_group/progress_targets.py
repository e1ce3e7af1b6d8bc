"""Functions that the ranks of tests/process_group/test_cuda_progress.py run: what goes on beside a call that waits."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from cuda_group_targets import backend, device

LONG = 8 << 20
"""Elements of a message of 32 MiB, whose grid would fill a GPU."""
HALF_A_SECOND = 1_000_000_000
"""Cycles of an H100 in about that time."""


def _settle() -> None:
    torch.cuda.synchronize()
    dist.barrier()


def message_beside_a_sum() -> float:
    """Return the seconds of a program in which rank 0 waits in a sum for rank 1, and rank 1 for a message of rank 0."""
    gpu = device()
    with backend(20.0) as (rank, size):
        big, small, side = torch.ones(LONG, device=gpu), torch.ones(1024, device=gpu), torch.cuda.Stream()
        for _ in range(2):
            dist.all_reduce(big)
            dist.send(small, 1) if rank == 0 else dist.recv(small, 0)
        big.fill_(1)
        _settle()
        begun = time.monotonic()
        if rank == 0:
            with torch.cuda.stream(side):
                torch.cuda._sleep(HALF_A_SECOND)  # the sum is waiting when the message begins
                work = dist.isend(small, 1)
            dist.all_reduce(big)
            assert work is not None
            work.wait()
        else:
            dist.recv(small, 0)
            dist.all_reduce(big)
        torch.cuda.synchronize()
        assert bool((big == size).all())
        return time.monotonic() - begun


def two_groups() -> float:
    """Return the seconds of two sums of two groups, each late on another rank."""
    gpu = device()
    with backend(20.0) as (rank, size):
        groups = [dist.new_group(list(range(size)), timeout=timedelta(seconds=20)) for _ in range(2)]
        tensors = [torch.ones(LONG, device=gpu) for _ in groups]
        streams = [torch.cuda.Stream() for _ in groups]
        for group, x in zip(groups, tensors, strict=True):
            dist.all_reduce(x, group=group)
            x.fill_(1)
        _settle()
        begun = time.monotonic()
        for late, (group, x, stream) in enumerate(zip(groups, tensors, streams, strict=True)):
            with torch.cuda.stream(stream):
                if rank == 1 - late:
                    torch.cuda._sleep(HALF_A_SECOND)
                dist.all_reduce(x, group=group, async_op=True)
        torch.cuda.synchronize()
        assert all(bool((x == size).all()) for x in tensors)
        return time.monotonic() - begun


def product_beside_a_sum(elements: int) -> float:
    """Return the seconds of a product on rank 0 while a sum waits for rank 1, which comes two seconds late."""
    gpu = device()
    with backend(30.0) as (rank, _):
        x, m = torch.ones(elements, device=gpu), torch.randn(4096, 4096, device=gpu, dtype=torch.bfloat16)
        for _ in range(2):
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            work.wait()
            m @ m
        _settle()
        if rank == 1:
            time.sleep(2)
        work = dist.all_reduce(x, async_op=True)
        time.sleep(0.2)
        begun = time.monotonic()
        m @ m
        torch.cuda.current_stream().synchronize()
        took = time.monotonic() - begun
        assert work is not None
        work.wait()
        torch.cuda.synchronize()
        return took


def replays_beside_asynchronous_calls(replays: int) -> int:
    """Return how often a replay, or a call of the same group beside it, gave a wrong sum."""
    gpu = device()
    with backend(20.0) as (_, size):
        x, y = torch.ones(1 << 20, device=gpu), torch.ones(1 << 20, device=gpu)
        for _ in range(2):
            dist.all_reduce(x)
            dist.all_reduce(y)
        _settle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(x)
        _settle()
        wrong = 0
        for _ in range(replays):
            x.fill_(1)
            y.fill_(10)
            work = dist.all_reduce(y, async_op=True)
            graph.replay()
            assert work is not None
            work.wait()
            wrong += not bool(((x == size) & (y == 10 * size)).all())
        dist.barrier()
        return wrong
