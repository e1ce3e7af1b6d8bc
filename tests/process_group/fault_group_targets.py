"""The code of ranks that fail, in the tests of the backend of torch.distributed."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from group_targets import backend, values

from shotcast.errors import CollectiveMismatch, CollectiveTimeout, ShotcastError
from shotcast.process_group import counts

LONG_S = 300.0
"""A deadline that a test does not wait for."""
Ends = list[tuple[str, tuple[int, ...], str]]


def caught(call: Any) -> tuple[str, tuple[int, ...], str]:
    """Return the class of the error that a call raises, the ranks that it names, and its reason."""
    try:
        call()
    except CollectiveTimeout as error:
        return "CollectiveTimeout", error.missing, error.reason
    except CollectiveMismatch as error:
        return "CollectiveMismatch", error.differing, ""
    except ShotcastError as error:
        return type(error).__name__, (), str(error)
    return "nothing", (), ""


def killed(when: str) -> tuple[Ends, float]:
    """Kill rank 1 and return what the others learn, and when; ``when`` says what rank 1 has done before."""
    with backend(LONG_S) as (rank, _):
        x = values(rank)
        if when != "first":
            dist.all_reduce(x)
        if rank == 1:
            if when != "first":
                time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        y = torch.empty(6)
        calls = {
            "first": lambda: dist.all_reduce(x),
            "synchronous": lambda: dist.all_reduce(x),
            "asynchronous": lambda: dist.all_reduce(x, async_op=True).wait(),
            "message": lambda: dist.recv(y, 1),
            "barrier": lambda: dist.barrier(),
        }
        ends = [caught(calls[when]), caught(calls[when])]
        elapsed = time.monotonic() - begun
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:  # no other end is to be found meanwhile; the process of rank 0 has the store
            store.set("rank 0 is done", "")
            store.wait(["rank 2 is done"])
        else:
            store.wait(["rank 0 is done"])
            store.set("rank 2 is done", "")
        return ends, elapsed


def killed_in_ddp() -> str:
    """Kill rank 1 in the second backward; return the error of the others."""
    with backend(LONG_S) as (rank, _):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        model(torch.ones(2, 8)).sum().backward()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            model(torch.ones(2, 8)).sum().backward()
        except RuntimeError as error:
            return str(error)
        return ""


def late_and_different() -> tuple[Ends, Ends]:
    """Leave rank 1 out of a call, then make calls that differ, each in a group of its own."""
    with backend(30.0) as (rank, _):
        late = dist.new_group(timeout=timedelta(seconds=0.5))
        dist.barrier(late)
        first = []
        if rank == 0:
            work = dist.all_reduce(values(0), group=late, async_op=True)
            first = [caught(work.wait), caught(lambda: dist.all_reduce(values(0), group=late))]
            assert work.is_completed()
            assert not work.is_success()
            assert isinstance(work.exception(), CollectiveTimeout)
        dist.barrier()
        different = dist.new_group()
        second = [caught(lambda: dist.all_reduce(torch.zeros(4 + rank), group=different))]
        begun = time.monotonic()
        second.append(caught(lambda: dist.barrier(different)))
        assert time.monotonic() - begun < 15  # of 30
        dist.barrier()
        sizes = dist.new_group()
        x, parts = torch.ones(4), [2, 2] if rank else None
        third = caught(lambda: dist.all_to_all_single(torch.empty(4), x, parts, parts, group=sizes))
        assert third[0] == "CollectiveMismatch", third
        dist.barrier()
        return first, second


def limits() -> None:
    """Wait for calls with limits of their own."""
    with backend(30.0) as (rank, _):
        dist.barrier()
        if rank == 0:
            work = dist.all_reduce(values(0), async_op=True)
            assert not work.is_completed()
            try:
                work.wait(timedelta(milliseconds=50))
            except CollectiveTimeout as error:
                assert (error.rank, error.op, error.reason, error.missing) == (0, "all_reduce", "pending", ())  # noqa: PT017
                assert "goes on" in str(error)  # noqa: PT017
            else:
                raise AssertionError("a wait was not limited")
            dist.send(values(0), 1)  # the call goes on meanwhile
            work.wait()
        else:
            x = torch.empty(6)
            dist.recv(x, 0)
            dist.all_reduce(x)
            assert torch.equal(x, 2 * values(0))
        opts = dist.AllreduceOptions()
        opts.timeout, opts.asyncOp = timedelta(seconds=0.3), False
        hurried, begun = dist.new_group(), time.monotonic()
        dist.all_reduce(values(0), group=hurried)
        if rank == 0:
            assert caught(lambda: hurried.allreduce([values(0)], opts))[0] == "CollectiveTimeout"
            assert time.monotonic() - begun < 10
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.4))
        assert caught(lambda: dist.all_reduce(values(0)) if rank == 0 else time.sleep(0.9))[0] == (
            "CollectiveTimeout" if rank == 0 else "nothing"
        )


def pending() -> float:
    """Destroy the group while a call of rank 0 waits for rank 1, which never comes; return how long that took."""
    begun = 0.0
    with backend() as (rank, _):
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))  # for the call: to connect may take longer
        if rank == 0:
            dist.all_reduce(values(0), async_op=True)
        begun = time.monotonic()
    return time.monotonic() - begun


def aborted() -> list[tuple[Ends, float]]:
    """Abort groups from another thread while rank 0 waits; return what its calls raise and how long the abort took."""
    found = []
    with backend(LONG_S) as (rank, _):
        dist.barrier()
        for when in ("first", "synchronous", "asynchronous"):
            group, ends = dist.new_group(), []
            if when == "synchronous":
                dist.all_reduce(values(rank), group=group)
            elif when == "asynchronous":  # its sum is the first, for which ranks meet in the store
                dist.barrier(group)
            if rank > 0:
                continue
            comm = group._on_cpu.comm
            epoch = comm._executor.epoch if when == "synchronous" else 0
            begun = threading.Event()
            took: list[float] = []

            def abort(
                group: Any = group, begun: Any = begun, comm: Any = comm, epoch: int = epoch, took: list[float] = took
            ) -> None:
                begun.wait()
                time.sleep(0.2)
                while epoch and comm._executor.headers(epoch + 1)[0] is None:
                    time.sleep(0.01)
                before = time.monotonic()
                group.abort()
                took.append(time.monotonic() - before)

            thread = threading.Thread(target=abort)
            thread.start()
            if when == "asynchronous":
                works = [dist.all_reduce(values(0), group=group, async_op=True) for _ in range(2)]
                begun.set()
                ends += [caught(work.wait) for work in works]
            else:
                begun.set()
                ends.append(caught(lambda group=group: dist.all_reduce(values(0), group=group)))
            thread.join()
            ends.append(caught(lambda group=group: dist.all_reduce(values(0), group=group)))
            found.append((ends, took[0]))
        dist.barrier()
    return found


def threads() -> None:
    """Make calls from two threads at once: each order is that of some thread's calls."""
    with backend() as (rank, size):
        total = sum(values(r) for r in range(size))
        failures: list[BaseException] = []
        groups = [dist.new_group() for _ in range(2)]

        def use(group: dist.ProcessGroup) -> None:
            try:
                for number in range(30):
                    x = values(rank)
                    work = dist.all_reduce(x, group=group, async_op=number % 3 == 0)
                    if work is not None:
                        work.wait()
                    assert torch.equal(x, total)
            except BaseException as error:
                failures.append(error)

        def same() -> None:
            """Make equal calls of one group, whichever thread makes which."""
            try:
                for _ in range(30):
                    x = torch.ones(6)
                    dist.all_reduce(x)
                    assert x.tolist() == [float(size)] * 6
            except BaseException as error:
                failures.append(error)

        pool = [threading.Thread(target=use, args=(group,)) for group in groups]
        pool += [threading.Thread(target=same) for _ in range(2)]
        for thread in pool:
            thread.start()
        for thread in pool:
            thread.join(30)
        assert not failures, failures
        x = torch.ones(3)
        works = [dist.all_reduce(x, async_op=True) for _ in range(5)]
        dist.all_reduce(x)  # after those that were started
        assert x.tolist() == [float(size) ** 6] * 3
        assert all(work.is_completed() for work in works)


class _Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> int:
        return number


def workers() -> None:
    """Read data by forked processes between calls."""
    with backend() as (rank, size):
        x = values(rank)
        dist.all_reduce(x)
        work = dist.all_reduce(x, async_op=True)
        loader = torch.utils.data.DataLoader(_Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork")
        found = 0
        for batch in loader:
            y = batch.float()
            dist.all_reduce(y)
            found += 1
            assert torch.equal(y, size * batch.float())
        work.wait()
        assert found == 4
        assert counts()["all_reduce"]["own"] == 6


def detail() -> None:
    """Train by DDP with a sparse gradient and a check of every call, as TORCH_DISTRIBUTED_DEBUG=DETAIL asks for."""
    with backend() as (rank, _):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Embedding(10, 4, sparse=True), torch.nn.Linear(4, 1))
        divided = torch.nn.parallel.DistributedDataParallel(model)
        for _ in range(2):
            divided(torch.tensor([rank, 2])).sum().backward()
        gradient = model[0].weight.grad
        assert gradient is not None
        assert gradient.is_sparse
        assert sorted(set(gradient.coalesce().indices()[0].tolist())) == [0, 1, 2]
        assert counts()["all_reduce"]["inner"] == 2


def subgroups() -> dict[str, Any]:
    """Kill rank 2 of the job in a group of ranks 1 and 2; return what rank 1 learns in that group and in a split."""
    found: dict[str, Any] = {}
    with backend(60.0) as (rank, _):
        import shotcast.process_group as ours

        group = dist.new_group([1, 2], group_desc="tp")
        hurried = dist.new_group([1, 2], timeout=timedelta(seconds=2))
        if rank == 0:
            dist.distributed_c10d._get_default_store().wait(["rank 1 is done"], timedelta(seconds=50))
            os._exit(0)  # the group of all ranks is not destroyed by a rank that is dead
        x = torch.ones(4)
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, group=hurried)
        differing = dist.new_group([1, 2], group_desc="pp", use_local_synchronization=True)
        found["mismatch"] = _error_of(lambda: dist.all_reduce(torch.zeros(4 + rank), group=differing))
        if rank == 2:
            time.sleep(6)  # late for what follows
            os.kill(os.getpid(), signal.SIGKILL)
        found["barrier"] = _error_of(lambda: ours.monitored_barrier(group, 0.5))
        found["late"] = _error_of(lambda: dist.all_reduce(x, group=hurried))
        work = dist.all_reduce(x, group=group, async_op=True)
        found["pending"] = _error_of(lambda: work.wait(timedelta(milliseconds=50)))
        found["dead"] = _error_of(work.wait)
        found["again"] = _error_of(lambda: dist.barrier(group))
        found["cause"] = found["again"].__cause__
        dist.distributed_c10d._get_default_store().set("rank 1 is done", "")
        return found


def _error_of(call: Any) -> BaseException:
    try:
        call()
    except ShotcastError as error:
        return error
    raise AssertionError("nothing was raised")


def left() -> dict[str, Any]:
    """Have rank 1 leave groups, and live on; return what the others learn, and when."""
    found: dict[str, Any] = {}
    with backend(LONG_S) as (rank, _):
        groups = {when: dist.new_group() for when in ("after a call", "before any call")}
        store = dist.distributed_c10d._get_default_store()
        x = torch.ones(4)
        dist.all_reduce(x, group=groups["after a call"])
        for group in groups.values():
            if rank == 1:
                dist.destroy_process_group(group)
        dist.barrier()
        if rank != 1:
            for when, group in groups.items():
                begun = time.monotonic()
                error = _error_of(lambda group=group: dist.all_reduce(x, group=group))
                found[when] = error, time.monotonic() - begun
            store.add("done", 1)
        while store.add("done", 0) < 2:
            time.sleep(0.05)
    return found


def connections() -> int:
    """Make groups and their first calls; return the connections to the store that this takes."""
    made = []
    real = {
        kind: kind.__dict__["clone"]
        for kind in (dist.Store, dist.TCPStore, dist.PrefixStore)
        if "clone" in kind.__dict__
    }

    def counted(clone: Any) -> Any:
        def count(store: Any) -> Any:
            made.append(store)
            return clone(store)

        return count

    for kind, clone in real.items():
        kind.clone = counted(clone)  # type: ignore[attr-defined]
    try:
        with backend() as (rank, size):
            dist.all_reduce(values(rank))
            assert len(made) == 1
            for _ in range(3):
                group, x = dist.new_group(), values(rank)
                dist.all_reduce(x, group=group)
                assert torch.equal(x, sum(values(r) for r in range(size)))
        with backend() as (rank, _):  # of another store, or of another time
            dist.all_reduce(values(rank))
    finally:
        for kind, clone in real.items():
            kind.clone = clone  # type: ignore[attr-defined]
    return len(made)
