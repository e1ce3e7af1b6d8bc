"""Functions that the ranks of tests/collectives/test_growth.py run, with the GPUs' kernels in the interpreter."""

from __future__ import annotations

import errno
import gc
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import expected_results
import pytest
import torch
from workers import check, inputs

import shotcast
from shotcast import wire
from shotcast.launcher.process_watch import WATCH
from shotcast.memory import arena
from shotcast.memory.holdings import HeldMemory
from shotcast.transport.triton import layout
from shotcast.wire import Op

FIRST, LARGEST = 1 << 12, 1 << 16
ROOMS = (FIRST, 4 * FIRST, LARGEST)


@contextmanager
def communicator(timeout_s: float = 30.0) -> Iterator[Any]:
    """Yield a communicator that begins with a workspace for messages of 4 KiB and may grow twice."""
    layout.FIRST_CAPACITY = FIRST
    with shotcast.Communicator(device="cpu", max_bytes=LARGEST, timeout_s=timeout_s) as comm:
        yield comm


def sizes(comm: Any) -> list[int]:
    """Return the longest messages of the workspaces that there are."""
    return [workspace.where.max_bytes for workspace in comm._executor.workspaces]


def one_call(comm: Any, kind: str, count: int, seed: int) -> None:
    """Make a call of ``count`` float32 or int32 elements and check its result."""
    rank, world_size = comm.rank, comm.world_size
    xs = inputs(count, torch.float32, world_size, seed, "cpu")
    if kind in ("one_shot", "two_shot"):
        check(comm.all_reduce(xs[rank], algorithm=kind), expected_results.all_reduce(xs, kind), (kind, count))
    elif kind == "gather":
        check(comm.all_gather(xs[rank]), torch.cat(xs), (kind, count))
    elif kind == "integers":
        check(comm.all_gather(xs[rank].view(torch.int32)), torch.cat(xs).view(torch.int32), (kind, count))
    elif kind == "broadcast":
        check(comm.broadcast(xs[rank].clone(), count % world_size), xs[count % world_size], (kind, count))
    elif rank == 0:
        comm.send(xs[0], 1)
    elif rank == 1:
        check(comm.recv(torch.empty(count), 0), xs[0], (kind, count))


KINDS = ("one_shot", "two_shot", "gather", "integers", "broadcast", "message")


def calls_that_grow(calls: int, seed: int) -> tuple[list[int], int]:
    """Make calls of random kind and size, up to the largest workspace. Return the workspaces and the epoch."""
    with communicator() as comm:
        shared, own = random.Random(seed), random.Random(seed + comm.rank)
        assert sizes(comm) == [FIRST]
        for number in range(calls):
            if own.random() < 0.2:
                time.sleep(own.random() * 0.01)
            first = comm._executor.workspaces[0]
            one_call(comm, shared.choice(KINDS), int(2 ** (shared.random() * 14)), number)
            assert comm._executor.workspaces[0] is first
            if number == calls // 2:
                comm.reset()
        comm.check()
        return sizes(comm), comm._executor.epoch


def growth_in_inference_mode() -> list[int]:
    """Grow in inference mode, as an engine does that measures its steps, and change what the workspaces hold after."""
    with communicator() as comm:
        with torch.inference_mode():
            one_call(comm, "two_shot", FIRST, 1)
            one_call(comm, "two_shot", LARGEST // 4, 2)
        found = sizes(comm)
        comm.set_timeout(20.0)
        comm.reset()
        one_call(comm, "two_shot", LARGEST // 4, 3)
        comm.check()
        return found


def one_after_the_other() -> list[tuple[int, list[int], int]]:
    """Make calls of growing and falling size; return each with the workspaces that it left, and the epoch."""
    seen = []
    with communicator() as comm:
        for nbytes in (4, FIRST, FIRST + 4, 4, 4 * FIRST, LARGEST, 2 * FIRST, 3 * LARGEST, 8):
            before, told = comm._executor.held_bytes, comm.explain(torch.ones(nbytes // 4), algorithm="two_shot")
            one_call(comm, "two_shot", nbytes // 4, nbytes)
            seen.append((nbytes, sizes(comm), comm._executor.epoch))
            after = comm.explain(torch.ones(nbytes // 4), algorithm="two_shot")
            assert (told.held_bytes, after.held_bytes) == (before, comm._executor.held_bytes)
            assert (told.more_bytes > 0, after.more_bytes) == (after.held_bytes > before, 0)
            held = arena.held()["cpu"]
            assert 0 <= held.leased - comm._executor.held_bytes <= 2 * 2 * arena.PAGE
    return seen


def workspaces_of_graphs() -> list[list[int]]:
    """Keep workspaces as captures do, and run the calls that were bound to them, as replays do.

    Return the workspaces after each growth.
    """
    seen = []
    with communicator() as comm:
        replays = []
        for nbytes in (4, 4 * FIRST, LARGEST):
            one_call(comm, "two_shot", nbytes // 4, nbytes)
            x, out = torch.full([nbytes // 4], comm.rank + 1.0), torch.zeros(nbytes // 4)
            problem = comm._resolver.problem(Op.ALL_REDUCE, x.dtype, x.numel(), "sum", 0, (), None)
            bound = comm._resolver.resolve(problem, "two_shot", True).bound
            bound.load()
            comm._executor.keep()
            replays.append((bound, x, out))
            for bound, x, out in replays:
                for _ in range(4):
                    bound.run(x, out)
                    check(out, torch.full_like(out, sum(range(1, comm.world_size + 1))), nbytes)
                    one_call(comm, "two_shot", 3, nbytes)
            with comm.split(0) as other:
                one_call(other, "two_shot", nbytes // 4, nbytes)
            seen.append(sizes(comm))
        comm.check()
        comm.reset()
        for bound, x, out in replays:
            bound.run(x, out)
            check(out, torch.full_like(out, sum(range(1, comm.world_size + 1))), "after reset")
        comm.set_timeout(1.0)
        comm._host.barrier()
        if comm.rank == 0:
            bound, x, out = replays[1]
            bound.run(x, out)
            with pytest.raises(shotcast.CollectiveTimeout) as caught:
                comm.check()
            assert caught.value.missing == tuple(range(1, comm.world_size))
    return seen


def messages_across_growth() -> None:
    """Send messages that are received only when the workspace has grown, and the other way round."""
    with communicator() as comm:
        x = torch.arange(300)
        for nbytes in (4 * FIRST, LARGEST):
            if comm.rank == 0:
                for number in range(3):
                    comm.send(x + number, 1)
            one_call(comm, "two_shot", nbytes // 4, nbytes)
            if comm.rank == 1:
                for number in range(3):
                    check(comm.recv(torch.zeros_like(x), 0), x + number, (nbytes, number))
        comm.check()


def absent(timeout_s: float) -> tuple[str, tuple[int, ...], float]:
    """Have the last rank come late to a call that grows. Return what the others see, and after how long."""
    with communicator(timeout_s) as comm:
        one_call(comm, "two_shot", FIRST, 1)
        late = comm.world_size - 1
        comm._host.barrier()
        if comm.rank == late:
            time.sleep(timeout_s + 3)
        started = time.monotonic()
        with pytest.raises(shotcast.CollectiveTimeout) as caught:
            comm.all_reduce(torch.ones(LARGEST // 4), algorithm="two_shot")
        took = time.monotonic() - started
        assert sizes(comm) == [FIRST, 4 * FIRST]
        comm.set_timeout(30)
        comm.reset()
        one_call(comm, "two_shot", LARGEST // 4, 3)
        assert sizes(comm) == [FIRST, LARGEST]
        return caught.value.op, caught.value.missing, took


def mismatched(count: int) -> str:
    """Have the ranks call with different sizes, one of which needs to grow. Return the error of this rank."""
    with communicator() as comm:
        one_call(comm, "two_shot", 4, 1)
        with pytest.raises(shotcast.CollectiveMismatch) as caught:
            comm.all_reduce(torch.ones(FIRST if comm.rank else count), algorithm="two_shot")
        comm.reset()
        one_call(comm, "two_shot", FIRST, 2)
        return str(caught.value)


def faults_in_a_larger_workspace(timeout_s: float) -> tuple[str, list[str]]:
    """Have a late rank, and then ranks that call something else, in the second workspace. Return the errors."""
    with communicator() as comm:
        for seed in range(3):
            one_call(comm, "two_shot", 8, seed)
        one_call(comm, "two_shot", FIRST, 3)
        comm.set_timeout(timeout_s)
        comm._host.barrier()
        if comm.rank == 1:
            time.sleep(timeout_s + 3)
        with pytest.raises(shotcast.CollectiveTimeout) as late:
            comm.all_reduce(torch.ones(FIRST), algorithm="two_shot")
        assert (late.value.op, late.value.missing) == ("all_reduce", (1,))
        with pytest.raises(shotcast.CollectiveTimeout):
            comm.all_reduce(torch.ones(2), algorithm="two_shot")
        comm.set_timeout(30)
        comm.reset()
        for count in (FIRST, 8):
            one_call(comm, "two_shot", count, count)
        others = []
        for other in (FIRST + 1, 8):  # one needs a workspace that is larger still, the other the first one
            with pytest.raises(shotcast.CollectiveMismatch) as caught:
                comm.all_reduce(torch.ones(other if comm.rank else FIRST), algorithm="two_shot")
            comm.reset()
            for count in (8, FIRST):
                one_call(comm, "two_shot", count, count)
            others.append(str(caught.value))
        comm.check()
        return str(late.value), others


@contextmanager
def little_memory(limit: int) -> Iterator[None]:
    """Have this machine refuse segments of shared memory of more than ``limit`` bytes."""
    real = os.posix_fallocate

    def refuse(descriptor: int, offset: int, nbytes: int) -> None:
        if nbytes > limit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor, offset, nbytes)

    os.posix_fallocate = refuse
    try:
        yield
    finally:
        os.posix_fallocate = real


def without_memory(short: int) -> list[str]:
    """Run out of memory on one rank, at construction and at growth. Return the errors of this rank."""
    errors = []
    rank = int(os.environ["RANK"])
    with little_memory(0 if rank == short else 1 << 40):
        with pytest.raises(shotcast.ConfigError) as caught, communicator():
            pass
        assert not WATCH._callbacks, "what failed watches no process"
        errors.append(str(caught.value))
    with communicator() as comm:
        one_call(comm, "two_shot", 4, 1)
        with little_memory(1 << 12 if rank == short else 1 << 40):
            for _ in range(2):
                with pytest.raises(shotcast.ConfigError) as caught:
                    comm.all_reduce(torch.ones(FIRST), algorithm="two_shot")
                errors.append(str(caught.value))
            one_call(comm, "two_shot", 4, 2)
        assert sizes(comm) == [FIRST]
        one_call(comm, "two_shot", FIRST, 3)
        comm.check()
    assert arena.held()["cpu"] == HeldMemory(0, 0)
    return errors


def failing_on_one_rank(failing: int) -> list[str]:
    """Have one rank fail before its memory is shared, twice, and after it. Return the errors of this rank."""
    from shotcast.transport.triton import executor

    def fails(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    def fails_for_blocks(*size: Any, **options: Any) -> torch.Tensor:
        if size == (wire.MAX_WORLD_SIZE * layout.BLOCKS,):
            raise torch.OutOfMemoryError("no room\nCompile with TORCH_USE_CUDA_DSA")
        return zeros(*size, **options)

    zeros, errors = torch.zeros, []
    parts: list[tuple[Any, str, Any]] = [
        (executor, "_host_words", fails),
        (torch, "zeros", fails_for_blocks),
        (executor, "GpuWorkspace", fails),
    ]
    for module, name, failure in parts:
        real = getattr(module, name)
        setattr(module, name, failure if int(os.environ["RANK"]) == failing else real)
        try:
            with pytest.raises(shotcast.ConfigError) as caught, communicator():
                pass
        finally:
            setattr(module, name, real)
        gc.collect()
        assert arena.held().get("cpu", HeldMemory(0, 0)) == HeldMemory(0, 0)
        errors.append(str(caught.value))
    return errors


def multicast_of_one_rank(without: int) -> tuple[bool, bool, list[str]]:
    """Build a communicator of which one rank's memory has no multicast address.

    Return whether it says that it uses multicast, whether its kernels do, and its candidates; they work.
    """
    from emulated_multicast import EmulatedBuffer, with_multicast

    def build() -> tuple[bool, bool, list[str]]:
        with communicator() as comm:
            for kind, count in (("two_shot", 20), ("gather", 5), ("broadcast", 7), ("two_shot", FIRST)):
                one_call(comm, kind, count, count)
            uses = {workspace.context.multicast for workspace in comm._executor.workspaces}
            return comm.topology.multicast, uses != {False}, comm.candidates(torch.ones(4))

    class Without(EmulatedBuffer):
        def __init__(self, group: Any, nbytes: int):
            super().__init__(group, nbytes)
            self.multicast_address = 0 if group.rank == without else self.multicast_address

    from shotcast.memory import shm

    def work() -> tuple[bool, bool, list[str]]:
        shm.ShmBuffer = Without  # type: ignore[misc,assignment]
        return build()

    return with_multicast(work)


def communicators_with_leases() -> list[tuple[int, int]]:
    """Open and close communicators of all and of some ranks, which grow. Return what is held after each step."""
    held = []

    def note() -> None:
        held.append(tuple(arena.held()["cpu"])[:2])

    with communicator() as comm:
        note()
        for color in (0, comm.rank % 2, comm.rank // 2):
            with comm.split(color) as part:
                one_call(part, "two_shot", 9, 1)
                one_call(part, "gather", FIRST, 2)
                one_call(comm, "two_shot", 9, 3)
                one_call(part, "integers", 30, 4)
            note()
    note()
    return held
