"""Functions that the ranks of tests/collectives/test_gates.py run, with the GPUs' kernels in the interpreter."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import expected_results
import pytest
import torch
from workers import check, inputs, straggle

import shotcast
from shotcast.collectives.growth import Growths
from shotcast.device.triton.launch import Launch
from shotcast.memory.arena import arena_of
from shotcast.transport.triton import layout
from shotcast.wire import LaunchShape, Op

SEVERAL = LaunchShape(6, 16, 1)
"""A launch of more programs than the interpreter takes by itself."""


@contextmanager
def launched(told: Callable[[], object] = int) -> Iterator[list[tuple[str, float]]]:
    """Yield the kernels that are launched, with the time of each; call ``told`` at each launch."""
    seen: list[tuple[str, float]] = []
    real = Launch.__call__

    def spied(launch: Launch, *arguments: Any) -> None:
        seen.append((launch._kernel.__name__, time.monotonic()))
        told()
        real(launch, *arguments)

    with mock.patch.object(Launch, "__call__", spied):
        yield seen


def late_rank(exclusive: bool) -> float:
    """Return how long after its own call began this rank launched the grid, where rank 1 came 0.5 s later.

    With ``exclusive``, rank 1 comes once rank 0 has launched the grid.
    """
    with shotcast.Communicator(device="cpu", timeout_s=100, exclusive=exclusive) as comm:
        x = torch.arange(256.0) + comm.rank
        comm._run(Op.ALL_REDUCE, x, torch.empty_like(x), algorithm="two_shot", launch=SEVERAL)
        store = comm._host.store("launched")
        comm._host.barrier()
        if comm.rank == 1 and exclusive:
            store.wait(["0"], timedelta(seconds=100))
        elif comm.rank == 1:
            time.sleep(0.5)
        begun = time.monotonic()
        with launched(lambda: store.set(str(comm.rank), "")) as seen:
            comm._run(Op.ALL_REDUCE, x, torch.empty_like(x), algorithm="two_shot", launch=SEVERAL)
        assert [name for name, _ in seen] == ([] if exclusive else ["gate"]) + ["two_shot_all_reduce"]
        return seen[-1][1] - begun


def kinds() -> list[tuple[int, int]]:
    """Return how many shared and exclusive communicators there are, as they are made and closed."""
    found = []

    def look() -> None:
        held = arena_of(torch.device("cpu")).held
        found.append((held.shared, held.exclusive))

    first = shotcast.Communicator(device="cpu", timeout_s=100)
    look()
    second = first.split(0, exclusive=True)
    assert second is not None
    look()
    first.close()
    look()
    second.close()
    second.close()
    look()
    return found


def calls_with_stragglers(calls: int) -> int:
    """Make gated calls of changing size and form, some behind a gate and some a barrier; return the epoch."""
    with shotcast.Communicator(device="cpu", timeout_s=60) as comm:
        shared, own = random.Random(1), random.Random(comm.rank)
        for number in range(calls):
            straggle(comm, own)
            count = shared.randrange(1, 2000)
            xs = inputs(count, torch.float32, comm.world_size, number, "cpu")
            kind = shared.choice(["one_shot", "two_shot", "gather", "barrier"])
            launch = LaunchShape(shared.randrange(1, 9), 16, 1)
            if kind == "barrier":
                comm.barrier()
            elif kind == "gather":
                out = torch.empty(count * comm.world_size)
                comm._run(Op.ALL_GATHER, xs[comm.rank], out, launch=launch)
                check(out, torch.cat(xs), number)
            else:
                out = torch.empty(count)
                comm._run(Op.ALL_REDUCE, xs[comm.rank], out, algorithm=kind, launch=launch)
                check(out, expected_results.all_reduce(xs, kind), number)
        comm.check()
        assert comm._executor is not None
        return comm._executor.epoch


def absent(limit_s: float) -> tuple[str, float]:
    """Wait at a gate for a rank that comes too late; then reset, and call again."""
    with shotcast.Communicator(device="cpu", timeout_s=60) as comm:
        x, out = torch.ones(256), torch.empty(256)

        def call() -> None:
            comm._run(Op.ALL_REDUCE, x, out, algorithm="two_shot", launch=SEVERAL)

        call()
        said, took = "", 0.0
        comm._host.barrier()
        if comm.rank == 0:
            comm.set_timeout(limit_s)
            begun = time.monotonic()
            with pytest.raises(shotcast.CollectiveTimeout) as failure:
                call()
            said, took = str(failure.value), time.monotonic() - begun
            assert failure.value.missing == (1,)
            comm.set_timeout(60)
        comm._host.barrier()
        comm.reset()
        call()
        assert torch.equal(out, torch.full([256], float(comm.world_size)))
        return said, took


def differing() -> str:
    """Make calls that differ; return the error, which the gate has found."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        x = torch.ones(256 + 16 * comm.rank)
        comm._run(Op.ALL_REDUCE, torch.ones(64), torch.empty(64), algorithm="two_shot", launch=SEVERAL)
        with launched() as seen, pytest.raises(shotcast.CollectiveMismatch) as failure:
            comm._run(Op.ALL_REDUCE, x, torch.empty_like(x), algorithm="two_shot", launch=SEVERAL)
        assert "gate" in [name for name, _ in seen]
        return str(failure.value)


def forms_of_sizes() -> int:
    """Make one small call; return how many forms calls of other sizes would still load: eager and captured."""
    with shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=60) as comm:
        assert comm._compile_barrier is not None
        comm._growths = Growths(comm._host.store("growths of a test"), comm.world_size, 0.2)
        comm.all_reduce(torch.ones(4))
        left = 0
        for count in (4, 512, 1 << 10, 3 << 11, 1 << 14):
            problem = comm._resolver.problem(Op.ALL_REDUCE, torch.float32, count, "sum", 0, (), None)
            for capturing in (False, True):
                needs = comm._resolver.resolve(problem, "auto", capturing).needs
                left += sum(variant not in comm._compile_barrier.known for variant in needs)
        return left


def copies_with_late_ranks() -> list[tuple[str, int]]:
    """Make calls that only the library has room for, with rank 1 late; return kernels, and forms that were loaded."""
    layout.FIRST_CAPACITY = 1 << 12
    seen = []
    with shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=60) as comm:
        assert comm._compile_barrier is not None
        size, x = comm.world_size, torch.arange(1 << 13) % 1000 + 3.0 * comm.rank
        comm._growths = Growths(comm._host.store("growths of a test"), size, 0.2)
        for number, call in enumerate((comm.all_gather, comm.all_to_all, comm.reduce_scatter)):
            call(x[:size])
            known = len(comm._compile_barrier.known)
            comm._growths.asked = (1 << number + 1) - 1  # it looks for the others the next time
            comm._host.barrier()
            if comm.rank == 1:
                time.sleep(0.6)
            with launched() as kernels:
                out = call(x)
            assert comm.calls_by_library == 0
            seen.append((next(name for name, _ in kernels if name != "gate"), len(comm._compile_barrier.known) - known))
            wholes = torch.stack([torch.arange(1 << 13) % 1000 + 3.0 * rank for rank in range(size)])
            part = wholes.view(size, size, -1)[:, comm.rank]
            wanted = (wholes, part, part.sum(0))[number]
            assert torch.equal(out.flatten(), wanted.flatten())
    return seen


def growth_with_late_ranks() -> list[tuple[int, int]]:
    """Make calls that need a larger workspace, for which rank 1 is late at first; return workspaces and decisions."""
    layout.FIRST_CAPACITY = 1 << 12
    seen = []
    with shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=60) as comm:
        assert comm._executor is not None
        comm.all_reduce(torch.ones(4))
        store = comm._host.store("growths of a test")
        growths = comm._growths = Growths(store, comm.world_size, 0.2)
        for late, count in ((True, 1 << 13), (False, 1 << 13), (False, 3000)):
            growths._patience_s = 0.2 if late else 100.0
            comm._host.barrier()
            if comm.rank == 1 and late:
                store.wait(["decision/1"], timedelta(seconds=100))
            xs = inputs(count, torch.float32, comm.world_size, count, "cpu")
            check(comm.all_reduce(xs[comm.rank]), expected_results.all_reduce(xs, "two_shot"), late)
            seen.append((len(comm._executor.workspaces), growths.asked))
    return seen
