"""Functions that a rank of tests/collectives/test_vendor_faults.py runs: calls of the vendor library that fail."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fault_matrix_targets import before_library
from workers import await_call

import shotcast
from shotcast import Communicator
from shotcast.collectives.vendor import blame
from shotcast.collectives.vendor.gloo import GlooGroup
from shotcast.collectives.vendor.interface import CallError
from shotcast.launcher.process_watch import ProcessId
from shotcast.transport.triton import layout
from shotcast.wire import INTERRUPTED, TIMEOUT, Fault, Op, encode_fault

Outcome = dict[str, Any]


def _outcome(call: Callable[[], Any]) -> Outcome:
    """Make a call that fails. Return the class, the text and the facts of its error, and the seconds that it took."""
    begun = time.monotonic()
    with pytest.raises(shotcast.ShotcastError) as caught:
        call()
    facts = {name: getattr(caught.value, name, None) for name in ("missing", "reason", "differing", "fields")}
    took = time.monotonic() - begun
    return {"class": type(caught.value).__name__, "text": str(caught.value), "took": took, **facts}


def calls_of(comm: Communicator) -> dict[str, Callable[[], Any]]:
    """Return a call of each operation."""
    x, n = torch.ones(4 * comm.world_size), comm.world_size
    neighbour = comm.rank ^ 1
    message = (lambda: comm.send(x, neighbour)) if comm.rank % 2 == 0 else (lambda: comm.recv(x, neighbour))
    return {
        "all_reduce": lambda: comm.all_reduce(x, algorithm="vendor"),
        "reduce_scatter": lambda: comm.reduce_scatter(x, algorithm="vendor"),
        "all_gather": lambda: comm.all_gather(x, algorithm="vendor"),
        "uneven all_gather": lambda: comm.all_gather(
            x[: comm.rank + 1], sizes=list(range(1, n + 1)), algorithm="vendor"
        ),
        "all_to_all": lambda: comm.all_to_all(x, algorithm="vendor"),
        "broadcast": lambda: comm.broadcast(x.clone(), n - 1, algorithm="vendor"),
        "barrier": comm.barrier,
        "message": message if neighbour < n else lambda: None,
    }


def late_for_each_operation(victim: int) -> dict[str, Outcome]:
    """Have the victim stay away from one call of each operation, and work again after a reset."""
    seen = {}
    with Communicator(device="cpu", timeout_s=100) as comm:
        for name, call in calls_of(comm).items():
            comm.barrier()
            comm.set_timeout(0.5)
            takes_part = name != "message" or comm.rank == victim ^ 1
            if comm.rank == victim or not takes_part:
                time.sleep(0.8)
                if comm.rank == victim:
                    seen[name] = _outcome(call)
            else:
                seen[name] = _outcome(call)
                with pytest.raises(shotcast.CollectiveTimeout):
                    comm.check()
            comm.set_timeout(20)
            comm.reset()
            assert comm.all_reduce(torch.ones(3)).tolist() == [float(comm.world_size)] * 3
            for again in calls_of(comm).values():
                again()
    return seen


def different_calls(odd: int) -> list[Outcome]:
    """Have one rank make another call than the others; return each error."""
    seen = []
    with Communicator(device="cpu", timeout_s=300) as comm:
        x = torch.ones(4 * comm.world_size)
        for usual, other in (
            (lambda: comm.all_reduce(x), lambda: comm.all_gather(x)),
            (lambda: comm.all_reduce(x), lambda: comm.all_reduce(x.int())),
            (lambda: comm.all_reduce(x), lambda: comm.all_reduce(x[:-1])),
            (lambda: comm.all_reduce(x), lambda: comm.all_reduce(x, reduction="max")),
        ):
            seen.append(_outcome(other if comm.rank == odd else usual))
            comm.reset()
            assert comm.all_reduce(torch.ones(3)).tolist() == [float(comm.world_size)] * 3
    return seen


def meets_a_message(odd: int) -> Outcome | None:
    """Have one rank send a message to rank 0, which calls a collective as all others do."""
    blame._PATIENCE_S = 60.0  # ends when all have reported
    with Communicator(device="cpu", timeout_s=3) as comm:
        x = torch.ones(4)
        return _outcome(lambda: comm.send(x, 0) if comm.rank == odd else comm.all_reduce(x))


def killed(victim: int) -> Outcome:
    """Kill the victim while the others wait for it, with ten minutes to the deadline."""
    comm = Communicator(device="cpu")
    comm.barrier()
    blame._PATIENCE_S = 3.0  # for the reports of all others
    if comm.rank == victim:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    found = _outcome(lambda: comm.all_reduce(torch.ones(5)))
    comm.close()
    return found


def killed_elsewhere(victim: int) -> Outcome:
    """Kill the victim, with each rank on a host of its own as far as the watch of processes knows."""
    own = ProcessId.own()
    with mock.patch.object(ProcessId, "own", return_value=dataclasses.replace(own, space=f"{own.space}/{own.pid}")):
        return killed(victim)


def _in_the_library(comm: Communicator, act: Callable[[], object]) -> None:
    """Act on another thread, once this one is in a call of the library."""

    def act_then() -> None:
        while comm._vendor._wait is None:
            time.sleep(0.01)
        time.sleep(0.1)
        act()

    threading.Thread(target=act_then).start()


def interrupted(victim: int) -> tuple[str, float, Outcome]:
    """Interrupt the victim, which waits for rank 0. Return what it saw, and what its next call raised."""
    comm = Communicator(device="cpu", timeout_s=300)
    comm.barrier()
    store = comm._host.store("interrupted")
    begun, kind = time.monotonic(), ""
    try:
        if comm.rank == 0:
            store.wait(["over"], timedelta(seconds=100))
        elif comm.rank == victim:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _in_the_library(comm, lambda: signal.raise_signal(signal.SIGINT))
        comm.all_reduce(torch.ones(5))
    except KeyboardInterrupt:
        kind = "KeyboardInterrupt"
        store.set("over", "")
    except shotcast.CollectiveTimeout as error:
        kind = f"{error.reason} {error.missing}"
    took = time.monotonic() - begun
    after = _outcome(lambda: comm.all_reduce(torch.ones(5)))
    comm.reset()
    assert comm.all_reduce(torch.ones(3)).tolist() == [float(comm.world_size)] * 3
    comm.close()
    return kind, took, after


def ended_by_a_handler() -> tuple[str, float]:
    """Have a signal's handler raise a TimeoutError while rank 1 waits for rank 0. Return what each saw, and when."""

    def give_up(*_: object) -> None:
        raise TimeoutError

    with Communicator(device="cpu", timeout_s=300) as comm:
        x = torch.ones(5).int()
        comm.all_reduce(x, algorithm="vendor")
        store = comm._host.store("ended")
        comm._host.barrier()
        if comm.rank == 1:
            signal.signal(signal.SIGALRM, give_up)
            _in_the_library(comm, lambda: signal.raise_signal(signal.SIGALRM))
        else:
            store.wait(["over"], timedelta(seconds=100))
        begun = time.monotonic()
        if comm.rank == 0:
            with contextlib.suppress(shotcast.CollectiveTimeout):
                comm.all_reduce(x, algorithm="vendor")  # the library may complete what rank 1 had begun
        with pytest.raises((TimeoutError, shotcast.CollectiveTimeout)) as caught:
            comm.all_reduce(x, algorithm="vendor")
        took = time.monotonic() - begun
        if comm.rank == 1:
            store.set("over", "")
        comm.reset()
        assert comm.all_reduce(x).tolist() == [2] * 5
        error = caught.value
        return f"{error.reason} {error.missing}" if isinstance(error, shotcast.CollectiveTimeout) else "", took


def stopped_inside(victim: int) -> Outcome | None:
    """Stop the victim after all have begun a call, within the library, for longer than the deadline."""
    with Communicator(device="cpu", timeout_s=100) as comm:
        x = torch.ones(100_000)
        comm.all_reduce(x, algorithm="vendor")
        pids = comm._host.all_gather(os.getpid())
        comm.set_timeout(0.6)
        if comm.rank == victim:
            vendor: Any = comm._vendor
            run = vendor.run

            def stop_first(*args: Any) -> None:
                vendor.run = run
                os.kill(os.getpid(), signal.SIGSTOP)
                run(*args)

            vendor.run = stop_first
        elif comm.rank == (victim + 1) % comm.world_size:
            threading.Timer(2.0, os.kill, (pids[victim], signal.SIGCONT)).start()
        seen = _outcome(lambda: comm.all_reduce(x, algorithm="vendor"))
        if comm.rank == (victim + 1) % comm.world_size:
            time.sleep(2.0)
        comm.set_timeout(20)
        comm.reset()
        assert comm.all_reduce(x)[0] == comm.world_size
        assert comm.all_reduce(torch.ones(3)).tolist() == [float(comm.world_size)] * 3
        return seen


def kernels_behind_the_library(victim: int) -> tuple[list[Outcome], bool]:
    """Be late inside the library. Return what calls and checks raised, and whether native kernels were stopped."""
    with Communicator(device="cpu", timeout_s=100) as comm:
        x = torch.ones(100)
        comm.all_reduce(x, algorithm="vendor")
        comm.set_timeout(0.6)
        if comm.rank == victim:
            before_library(comm, lambda: time.sleep(1.5))
        seen = [_outcome(lambda: comm.all_reduce(x, algorithm="vendor"))]
        executor: Any = comm._executor
        stopped = executor.stopped
        if stopped:
            word = executor.workspaces[-1]._read(layout.ABORT)[0]
            assert (Fault.decode(word).op, Fault.decode(word).ranks) == ("all_reduce", (victim,))
        executor.stopped_word.value = encode_fault(INTERRUPTED, Op.BARRIER, [comm.rank], 1)  # as a kernel would
        seen += [_outcome(comm.check), _outcome(lambda: comm.all_reduce(x))]
        comm.set_timeout(20)
        comm.reset()
        assert comm.all_reduce(x)[0] == comm.world_size
        return seen, stopped


def interrupted_elsewhere() -> Outcome | None:
    """Interrupt rank 1, which is in no call, while rank 0 waits for it, twice. Return what rank 0 saw at last."""
    with Communicator(device="cpu", timeout_s=300) as comm:
        x, seen = torch.ones(100), None
        for _ in range(2):
            comm.all_reduce(x, algorithm="one_shot")
            if comm.rank == 0:
                seen = _outcome(lambda: comm.all_reduce(x, algorithm="one_shot"))
            else:
                await_call(comm, 0, comm._executor.epoch + 1)
                comm._interrupt()
                before = comm._executor._clears << 8 | 1
            comm._host.barrier()
            comm.reset()
        heard, real = threading.Event(), comm._executor.interrupted_by
        comm._executor.interrupted_by = lambda number: (real(number), heard.set())
        comm._host.barrier()
        if comm.rank == 1:
            comm._peers.send(0, "interrupted", before)  # all have been reset since
        else:
            assert heard.wait(100)
        comm.all_reduce(x, algorithm="one_shot")
        return seen


def interrupted_kernel() -> tuple[Outcome | None, str]:
    """Interrupt a kernel that waits for rank 1. Return what rank 0 saw."""
    with Communicator(device="cpu", timeout_s=300) as comm:
        x = torch.ones(100)
        comm.all_reduce(x, algorithm="one_shot")
        seen = None
        if comm.rank == 0:
            epoch = comm._executor.epoch + 1

            def interrupt() -> None:
                await_call(comm, 0, epoch)
                comm._interrupt()

            threading.Thread(target=interrupt).start()
            seen = _outcome(lambda: comm.all_reduce(x, algorithm="one_shot"))
        comm._host.barrier()
        return seen, type(comm._executor).__name__


def a_fault_that_comes_during_a_check() -> Outcome:
    """Let a fault of kernels arrive once the library has stopped for it, in the middle of a check."""
    with Communicator(device="cpu", timeout_s=100) as comm:
        executor, vendor = comm._executor, comm._vendor
        assert executor is not None

        def check() -> None:
            executor.stopped_word.value = encode_fault(TIMEOUT, Op.ALL_REDUCE, [1], 7)
            raise shotcast.ShotcastError("a fault or an abort stopped the communicator")

        vendor.check = check  # type: ignore[method-assign]
        seen = _outcome(comm.check)
        executor.stopped_word.value = 0
        comm._host.barrier()
        return seen


def absent_at_the_connection(victim: int) -> Outcome | None:
    """Let calls not be compared, so that the first one is also the first sign of a rank that stays away."""
    blame._PATIENCE_S = 2.0  # for the report of the other rank that is there
    seen = None
    with contextlib.suppress(shotcast.ClosedError), Communicator(device="cpu", timeout_s=2) as comm:
        if comm.rank != victim:
            seen = _outcome(lambda: comm.all_reduce(torch.ones(3), algorithm="vendor"))
        comm._host.barrier()
    return seen


def connect_crosswise() -> list[str]:
    """Connect two groups by Gloo on two threads, in another order on each rank. Return what went wrong."""
    wrong, groups = [], []
    with Communicator(device="cpu", timeout_s=100) as comm:
        store = comm._host.store("crosswise")
        names = ["first", "second"] if comm.rank == 0 else ["second", "first"]

        def connect(name: str) -> None:
            try:
                groups.append(GlooGroup(dist.PrefixStore(name, store), comm.rank, 2, 1.0, 100.0, lambda: None))
            except CallError as error:
                wrong.append(f"{name}: {error}")

        threads = [threading.Thread(target=connect, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
            time.sleep(0.3)  # so that each waits for the rank that has begun with the other
        for thread in threads:
            thread.join()
        comm._host.barrier()  # a group that closes earlier takes the connection from a rank that still connects
        for group in groups:
            group.close()
    return wrong


def hear_of_a_failure() -> tuple[int, int]:
    """Let rank 0 say that a call of it failed. Return what this rank has heard before and then."""
    with Communicator(device="cpu", timeout_s=100) as comm:
        before = comm._peers.alarmed
        comm._host.barrier()
        if comm.rank == 0:
            comm._peers.alarm(3)
        until = time.monotonic() + 60
        while comm.rank == 1 and comm._peers.alarmed < 0 and time.monotonic() < until:
            time.sleep(0.005)
        comm._host.barrier()
        return before, comm._peers.alarmed
