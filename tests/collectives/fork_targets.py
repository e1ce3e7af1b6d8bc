"""Functions that the ranks of tests/collectives/test_forked.py run."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shotcast
from shotcast import ShotcastError, functional


def in_child(function: Callable[[], object]) -> None:
    """Run ``function`` in a forked process; raise if it raises there, or takes more than 20 seconds."""
    wait_for(start_child(function))


def start_child(function: Callable[[], object]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.alarm(20)
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait_for(child: int) -> None:
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {status}"


def refused(call: Callable[[], object], maker: int) -> None:
    with pytest.raises(ShotcastError, match=f"belongs to process {maker}"):
        call()


def every_use() -> None:
    """Try everything that a communicator offers in a child, and sum in the maker before, meanwhile and after."""
    comm = shotcast.Communicator(device="cpu", timeout_s=100)
    part = comm.split(0)
    assert part is not None
    maker, x = os.getpid(), torch.ones(12)
    kept = comm.all_reduce  # a method that was looked up before the fork
    graph = torch.ones(4, requires_grad=True)
    loss = comm.all_reduce(graph).sum()

    def child() -> None:
        for one in (comm, part):
            uses: list[Callable[[], Any]] = [
                lambda one=one: one.all_reduce(x),
                lambda one=one: one.all_reduce(x, out=x),
                lambda one=one: one.reduce_scatter(x),
                lambda one=one: one.all_gather(x),
                lambda one=one: one.all_to_all(x),
                lambda one=one: one.broadcast(x, 0),
                lambda one=one: one.send(x, 0),
                lambda one=one: one.recv(x, 0),
                lambda one=one: one.barrier(),
                lambda one=one: one.all_reduce_rms_norm(x, x.clone(), x.clone()),
                lambda one=one: one.explain(x),
                lambda one=one: one.check(),
                lambda one=one: one.reset(),
                lambda one=one: one.split(0),
                lambda one=one: one.set_timeout(3),
                lambda one=one: functional.all_reduce(x, "sum", one),
                lambda one=one: torch.ops.shotcast.all_reduce(x, one.name, "auto", "sum"),
            ]
            for use in uses:
                refused(use, maker)
            assert (one.rank, one.world_size, one.device.type) == (dist.get_rank(), dist.get_world_size(), "cpu")
            assert f"of process {maker}" in repr(one)
        refused(lambda: kept(x), maker)
        refused(loss.backward, maker)
        grandchild = start_child(lambda: refused(lambda: comm.all_reduce(x), maker))
        wait_for(grandchild)
        with comm:
            pass
        part.close()

    n = comm.world_size
    running = start_child(child)
    for _ in range(100):
        assert comm.all_reduce(x).tolist() == [n] * 12
        assert part.all_reduce(x).tolist() == [n] * 12
    wait_for(running)
    loss.backward()
    assert graph.grad is not None
    part.close()
    comm.close()
    in_child(lambda: refused(lambda: comm.check(), maker))


def child_drops_it(device: str, times: int) -> None:
    """Have children close and collect the communicator while the maker uses it."""
    held = [shotcast.Communicator(device=device, timeout_s=100, max_bytes=1 << 20)]
    held.append(held[0].split(0))
    place = held[0].device

    def child() -> None:
        references = [weakref.ref(one) for one in held]
        for one in held:
            one.close()
        held.clear()
        del one
        gc.collect()
        assert all(reference() is not None for reference in references)  # nor is what they hold

    n = held[0].world_size
    for _ in range(times):
        running = start_child(child)
        for one in held * 5:
            assert one.all_reduce(torch.ones(3000, device=place)).tolist() == [n] * 3000
            assert one.all_reduce(torch.ones(30, device=place), algorithm="vendor").tolist() == [n] * 30
        wait_for(running)
    for one in held:
        one.close()


def used_at_once(times: int) -> int:
    """Sum in the maker and in a child at once. Return how many children were refused every one of their calls."""
    done = 0
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        n, maker = comm.world_size, os.getpid()

        def child() -> None:
            for _ in range(20):
                refused(lambda: comm.all_reduce(torch.full([64], 1000.0)), maker)

        for _ in range(times):
            running = start_child(child)
            for number in range(20):
                got = comm.all_reduce(torch.full([64], float(comm.rank + number)))
                assert got.tolist() == [n * (n - 1) / 2 + n * number] * 64
            wait_for(running)
            done += 1
    return done


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    """The data that a loader's workers compute; it holds the communicator, as data sets hold much."""

    def __init__(self, comm: shotcast.Communicator):
        self.comm = comm

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= len(self):
            raise IndexError
        return torch.tensor(float(index * index + self.comm.rank))


def forks_without_calls() -> None:
    """Load data by forked workers, and end a forked process as sys.exit does."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        loader = torch.utils.data.DataLoader(Squares(comm), num_workers=2, multiprocessing_context="fork")
        for index, x in enumerate(loader):
            assert float(x) == index * index + comm.rank
            comm.all_reduce(x)
        process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(7,))
        process.start()
        process.join(20)
        assert process.exitcode == 7
        assert comm.all_reduce(torch.ones(5)).tolist() == [comm.world_size] * 5
