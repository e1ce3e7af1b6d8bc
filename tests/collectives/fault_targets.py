"""Functions that the ranks of tests/collectives/test_cpu_faults_communicator.py run, besides those of workers.py."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from workers import FLOATS, await_call, failing_call, warm

import shotcast
from shotcast import CollectiveMismatch, CollectiveTimeout, ShotcastError, wire
from shotcast.collectives import first_use
from shotcast.memory.host_group import StoreGroup
from shotcast.transport.cpu.executor import CpuBoundCall


def killed_in_each_call(victim: int, timeout_s: float, op: str) -> dict[str, Any]:
    """Run the scenario of workers.killed in an operation other than all_reduce."""
    comm = shotcast.Communicator(device="cpu", timeout_s=timeout_s)
    n = comm.world_size
    x, big = torch.ones(64 * n), torch.zeros(64 * n * n)
    calls = {
        "reduce_scatter": (lambda out: comm.reduce_scatter(x, out=out), 64),
        "all_gather": (lambda out: comm.all_gather(x, out=out), big.numel()),
        "all_to_all": (lambda out: comm.all_to_all(x, out=out), x.numel()),
        "broadcast": (lambda out: comm.broadcast(out, victim), x.numel()),
        "barrier": (lambda out: comm.barrier(), 0),
        "recv": (lambda out: comm.recv(out, victim), x.numel()),
    }
    call, count = calls[op]
    # Run the call once before, so that nothing is compiled while the clock runs.
    if op == "recv" and comm.rank == victim:
        for other in range(n):
            if other != victim:
                comm.send(x, other)
    else:
        call(torch.zeros(count))
    comm._host.barrier()
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    time.sleep(0.1)
    out = torch.zeros(count)
    started = time.monotonic()
    with pytest.raises(CollectiveTimeout) as caught:
        call(out)
    took = time.monotonic() - started
    started = time.monotonic()
    for again in (comm.barrier, comm.check, lambda: comm.all_reduce(x), lambda: comm.all_reduce(x.long())):
        with pytest.raises(CollectiveTimeout):
            again()
    after = time.monotonic() - started
    assert repr(comm).endswith("device=cpu, stopped by CollectiveTimeout)")
    comm.close()
    assert repr(comm).endswith("device=cpu, closed)")
    return {"error": caught.value, "took": took, "after": after, "nan": bool(out.isnan().all())}


def killed_while_others_wait(victim: int) -> tuple[CollectiveTimeout, float]:
    """Kill a rank while the others wait for it, with a deadline of ten minutes. Return the error and its delay."""
    comm = shotcast.Communicator(device="cpu", timeout_s=600)
    warm(comm, "two_shot")
    killed_at = comm._host.all_gather(time.monotonic() + 0.7)[victim]
    if comm.rank == victim:
        time.sleep(max(0.0, killed_at - time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    error, _, _ = failing_call(comm, "two_shot")
    comm.close()
    return error, time.monotonic() - killed_at


def one_dead_one_late() -> CollectiveTimeout:
    """Kill rank 1, and bring rank 2 later than the end of rank 1 is noticed."""
    comm = shotcast.Communicator(device="cpu", timeout_s=600)
    warm(comm, "one_shot")
    comm._host.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 2:
        time.sleep(1)
    error, _, _ = failing_call(comm, "one_shot")
    comm.close()
    return error


def compile_late(late_s: float, compile_s: float, kill: bool) -> Any:
    """Have rank 1 come ``late_s`` later to a first call, and take ``compile_s`` to compile what it needs.

    With ``kill``, it is killed while it compiles. Return the sum, or the error and its delay after the kill.
    """
    comm = shotcast.Communicator(device="cpu", timeout_s=300 if kill else 1.5)
    x = torch.full([777], comm.rank + 1.0)
    killed_at = comm._host.all_gather(time.monotonic() + late_s + 0.3)[0]
    if comm.rank == 1:
        bound: Any = sys.modules[type(comm._executor).__module__]
        load = bound.CpuBoundCall.load

        def slow_load(self: Any) -> None:
            if kill:
                time.sleep(max(0.0, killed_at - time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(compile_s)
            load(self)

        bound.CpuBoundCall.load = slow_load  # in this process alone
        time.sleep(late_s)
    try:
        total = comm.all_reduce(x, algorithm="two_shot")
    except CollectiveTimeout as error:
        return error, time.monotonic() - killed_at
    comm.close()
    return float(total[0])


def host_of_the_store_killed(port: int) -> Any:
    """Kill rank 0, which hosts the store of the job, while it compiles. Return the others' errors and their delay."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    comm = shotcast.Communicator(device="cpu", timeout_s=300)
    killed_at = comm._host.all_gather(time.monotonic() + 0.5)[0]
    if rank == 0:
        time.sleep(max(0.0, killed_at - time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveTimeout) as caught:
        comm.all_reduce(torch.ones(777), algorithm="two_shot")
    return caught.value, time.monotonic() - killed_at


def compile_in_vain(compile_s: float) -> tuple[str, float, float, float]:
    """Have rank 1 fail to compile, and take ``compile_s`` when it tries again after a reset.

    Return the error, its delay, that of the sum after the reset, and the sum.
    """
    comm = shotcast.Communicator(device="cpu", timeout_s=0.8)
    load, attempts = CpuBoundCall.load, 0

    def failing_load(self: CpuBoundCall) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise MemoryError("no memory to compile")
        time.sleep(compile_s)
        load(self)

    if comm.rank == 1:
        CpuBoundCall.load = failing_load  # type: ignore[method-assign]  # in this process alone
    x, error = torch.full([777], comm.rank + 1.0), ""
    comm._host.barrier()
    began = time.monotonic()
    try:
        comm.all_reduce(x, algorithm="two_shot")
    except CollectiveTimeout as late:
        error = f"{late.reason} {late.missing}"
    except MemoryError:
        error = "no memory"
    took, began = time.monotonic() - began, time.monotonic()
    comm.reset()
    total = comm.all_reduce(x, algorithm="two_shot")
    again = time.monotonic() - began
    comm.close()
    return error, took, again, float(total[0])


def fault_during_a_first_call() -> tuple[str, float]:
    """Have ranks 1 and 2 make different calls while rank 0 waits for them in a first call. Return errors and delays."""
    with shotcast.Communicator(device="cpu", timeout_s=300) as comm:
        for _ in range(2):
            comm.send(torch.ones(5), 2) if comm.rank == 1 else comm.recv(torch.ones(5), 1) if comm.rank == 2 else None
        comm._host.barrier()
        began, error = time.monotonic(), ""
        try:
            if comm.rank == 0:
                comm.all_reduce(torch.ones(777), algorithm="two_shot")
            else:
                time.sleep(0.3)
                comm.send(torch.ones(5), 2) if comm.rank == 1 else comm.recv(torch.ones(6), 1)
        except ShotcastError as caught:
            error = type(caught).__name__
        took = time.monotonic() - began
        comm._host.barrier()  # rank 1's message is under way: if it left now, rank 0 would be told of that
        return error, took


def absent_from_a_first_call() -> tuple[CollectiveTimeout, float, float] | None:
    """Have rank 1 stay away from a first call. Return the error, its delay, and a sum after a reset."""
    comm = shotcast.Communicator(device="cpu", timeout_s=2)
    comm._host.barrier()
    began = time.monotonic()
    error = None
    if comm.rank != 1:
        error, _, _ = failing_call(comm, "two_shot")
    took = time.monotonic() - began
    comm.set_timeout(60)
    comm.reset()
    total = comm.all_reduce(torch.ones(4096), algorithm="two_shot")
    comm.close()
    return error, took, float(total[0])


def cross_first_messages() -> tuple[float, float]:
    """Have both ranks send before either receives, when nothing is compiled yet. Return the seconds and what came."""
    first_use._MESSAGE_PATIENCE_S = 300.0  # in this process alone
    with shotcast.Communicator(device="cpu", timeout_s=300) as comm:
        received, other = torch.zeros(5), 1 - comm.rank
        comm._host.barrier()
        began = time.monotonic()
        comm.send(torch.full([5], comm.rank + 1.0), other)
        comm.recv(received, other)
        return time.monotonic() - began, float(received[0])


def leave_one_by_one() -> float:
    """Sum, and end one process after the other without closing anything; the others check when it has ended."""
    comm = shotcast.Communicator(device="cpu", timeout_s=600)
    total = comm.all_reduce(torch.full([3], comm.rank + 1.0))
    until = time.monotonic() + 0.4 * comm.rank
    while len(comm._peers.gone) < comm.rank and time.monotonic() < until + 60:
        time.sleep(0.01)
    assert len(comm._peers.gone) == comm.rank, "the ranks before this one have ended"
    comm.check()
    return float(total[0])


def killed_in_split(victim: int) -> tuple[CollectiveTimeout, float]:
    """Kill a rank that the others wait for in a split. Return the error and the seconds until it was raised."""
    comm = shotcast.Communicator(device="cpu", timeout_s=600)
    comm._host.barrier()
    if comm.rank == victim:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(CollectiveTimeout) as caught:
        comm.split(0)
    return caught.value, time.monotonic() - started


def interrupted() -> Any:
    """Send rank 0 the signal of Ctrl-C while it waits for rank 1. Return what each saw, and the delay."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    comm = shotcast.Communicator(device="cpu", timeout_s=600)
    warm(comm, "one_shot")
    pids = comm._host.all_gather(os.getpid())
    out = torch.zeros(1000)
    if comm.rank == 1:
        await_call(comm, 0)
        os.kill(pids[0], signal.SIGINT)
        comm._host.all_gather(time.monotonic())
        return failing_call(comm, "one_shot")[0]
    with pytest.raises(KeyboardInterrupt) as caught:
        comm.all_reduce(torch.ones(1000), out=out, algorithm="one_shot")
    ended, sent = comm._host.all_gather(time.monotonic())
    return type(caught.value).__name__, ended - sent, bool(out.isnan().all())


def handled_signal() -> tuple[float, int]:
    """Send rank 0 a signal that it handles while it waits; return the sum and how often the handler ran.

    Rank 1 comes once the handler has run.
    """
    comm = shotcast.Communicator(device="cpu", timeout_s=300)
    warm(comm, "one_shot")
    seen, store = [], StoreGroup(comm._rendezvous, 100.0).store("handled")

    def handle(*_: Any) -> None:
        seen.append(comm.rank)
        store.set("handled", "")

    signal.signal(signal.SIGINT, handle)
    pids = comm._host.all_gather(os.getpid())
    if comm.rank == 1:
        await_call(comm, 0)
        os.kill(pids[0], signal.SIGINT)
        store.wait(["handled"], timedelta(seconds=100))
    total = comm.all_reduce(torch.full([10], comm.rank + 1.0), algorithm="one_shot")
    return float(total[0]), len(seen)


def survivors_go_on(victim: int) -> list[float]:
    """Have the survivors close the stopped communicator and build another one among themselves. Return its sums."""
    comm = shotcast.Communicator(device="cpu", timeout_s=100)
    warm(comm, "one_shot")
    comm._host.barrier()
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    error, _, _ = failing_call(comm, "two_shot")
    assert isinstance(error, CollectiveTimeout)
    assert error.missing == (victim,)
    comm.close()
    alive = [r for r in range(comm.world_size) if r != victim]
    group = dist.new_group(alive, use_local_synchronization=True)
    with shotcast.Communicator(group, device="cpu", timeout_s=100) as again:
        assert again.world_size == len(alive)
        got = [again.all_reduce(torch.full([3], float(comm.rank)), algorithm=a) for a in ("one_shot", "ring", "vendor")]
        again.barrier()
        sub = again.split(0, -again.rank)
        assert sub.rank == again.world_size - 1 - again.rank
        got.append(sub.all_reduce(torch.full([3], float(comm.rank))))
        return [float(x[0]) for x in got]


def killed_inside_gloo(victim: int) -> tuple[str, str]:
    """Have the victim publish its header and die before Gloo has done its part. Return the error's type and text."""
    comm = shotcast.Communicator(device="cpu", timeout_s=100)
    comm.all_reduce(torch.ones(3), algorithm="vendor")
    if comm.rank == victim:
        comm._vendor.run = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ShotcastError) as caught:
        comm.all_reduce(torch.ones(100_000), algorithm="vendor")
    return type(caught.value).__name__, str(caught.value)


def different_calls(odd: int) -> dict[str, tuple[CollectiveMismatch, float]]:
    """Have rank ``odd`` make a different call. Check that all works after a reset.

    Return the error of each case and the seconds until it was raised.
    """
    seen = {}
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        n, is_odd = comm.world_size, comm.rank == odd
        x = torch.ones(12 * n)
        flat = [12] * n
        bent = [12] * (n - 2) + [11, 13]
        cases = {
            "op": (lambda: comm.all_reduce(x), lambda: comm.all_to_all(x)),
            "op, for a barrier": (lambda: comm.all_reduce(x), lambda: comm.barrier()),
            "nbytes": (lambda: comm.all_gather(x), lambda: comm.all_gather(x[:-1])),
            "dtype": (lambda: comm.all_to_all(x), lambda: comm.all_to_all(x.int())),
            "algorithm": (lambda: comm.all_gather(x), lambda: comm.all_gather(x, algorithm="vendor")),
            "root": (lambda: comm.broadcast(x, 0), lambda: comm.broadcast(x, 1)),
            "reduction": (
                lambda: comm.all_reduce(x, reduction="max"),
                lambda: comm.all_reduce(x, reduction="min"),
            ),
            "nbytes, of sizes": (
                lambda: comm.all_gather(x[: flat[comm.rank]], sizes=flat),
                lambda: comm.all_gather(x[: bent[comm.rank]], sizes=bent),
            ),
            "dtype, to Gloo": (
                lambda: comm.all_reduce(x.int(), algorithm="vendor"),
                lambda: comm.all_reduce(x.long(), algorithm="vendor"),
            ),
            "dtype, of integers": (lambda: comm.all_reduce(x.int()), lambda: comm.all_reduce(x.char().repeat(4))),
        }
        for what, (usual, other) in cases.items():
            comm.barrier()
            reached: list[Any] = []
            run = comm._vendor.run
            comm._vendor.run = lambda *args, reached=reached: reached.append(args)
            started = time.monotonic()
            with pytest.raises(CollectiveMismatch) as caught:
                other() if is_odd else usual()
            took = time.monotonic() - started
            assert reached == [], f"{what}: the library was called in spite of the mismatch"
            comm._vendor.run = run
            with pytest.raises(CollectiveMismatch):
                comm.barrier()
            comm.reset()
            assert comm.all_reduce(torch.ones(5)).tolist() == [n] * 5
            assert comm.all_reduce(torch.ones(5), algorithm="vendor").tolist() == [n] * 5
            seen[what] = (caught.value, took)
    return seen


def different_messages(what: str, ahead: int = 0) -> BaseException | None:
    """Have rank 0 send what rank 1 does not expect, after ``ahead`` other messages.

    Rank 2 takes no part until the reset.
    """
    first_use._MESSAGE_PATIENCE_S = 0.5  # rank 1 receives only what was sent
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        comm.barrier()
        error = None
        for _ in range(ahead):
            if comm.rank == 0:
                comm.send(torch.ones(8), 1)
        for _ in range(ahead):
            if comm.rank == 1:
                assert comm.recv(torch.zeros(8), 0).tolist() == [1.0] * 8
        if comm.rank == 0:
            comm.send(torch.ones(8, dtype=torch.int32 if what == "dtype" else torch.float32), 1)
        comm._host.barrier()  # the send must end before the receive, or its sender would learn of the mismatch too
        if comm.rank == 1:
            with pytest.raises(CollectiveMismatch) as caught:
                comm.recv(torch.ones(8 if what == "dtype" else 9), 0)
            error = caught.value
        comm.reset()
        if comm.rank == 0:
            comm.send(torch.full([3], 5.0), 1)
        elif comm.rank == 1:
            assert comm.recv(torch.zeros(3), 0).tolist() == [5.0] * 3
        assert comm.all_reduce(torch.ones(5)).tolist() == [comm.world_size] * 5
        return error


def first_use_after_a_mismatch() -> BaseException:
    """Have rank 1 find that a message differs, and rank 0 learn of it with its first call of another kind."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        if comm.rank == 0:
            comm.send(torch.ones(8, dtype=torch.int32), 1)
        comm._host.barrier()
        begun, x = time.monotonic(), torch.ones(8)
        with pytest.raises(CollectiveMismatch) as caught:
            comm.recv(x, 0) if comm.rank == 1 else comm.all_gather(x)
        assert time.monotonic() - begun < 10
        comm._host.barrier()
        return caught.value


def missing_messages() -> list[BaseException | None]:
    """Let rank 1 wait for a message that is never sent; after a reset, let rank 0 wait for room in rank 1's mailbox."""
    errors: list[BaseException | None] = []
    with shotcast.Communicator(device="cpu", timeout_s=1.0) as comm:
        x = torch.ones(8)
        capacity = comm.waiting_messages(x)
        for waiting in (1, 0):
            error: BaseException | None = None
            try:
                if comm.rank == waiting == 1:
                    comm.recv(x, 0)
                elif comm.rank == waiting == 0:
                    for number in range(capacity + 1):
                        sent = number
                        comm.send(x, 1)
            except shotcast.CollectiveTimeout as caught:
                error = caught
                assert waiting == 1 or sent == capacity
            errors.append(error)
            time.sleep(1.5)
            comm.reset()
        assert comm.all_reduce(torch.ones(5)).tolist() == [comm.world_size] * 5
    return errors


def outputs_after_a_fault() -> int:
    """Check that a failed call leaves NaN in its output, in every dtype that has one. Return the number of dtypes."""
    done = 0
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        for name in wire.DTYPES:
            dtype = getattr(torch, name)
            if not (dtype.is_floating_point or dtype.is_complex):
                continue
            x = torch.ones(5).to(dtype)
            with pytest.raises(CollectiveMismatch):
                comm.broadcast(x, 0 if comm.rank else 1)
            assert bool(x.to(torch.complex128 if dtype.is_complex else torch.float64).isnan().all()), name
            comm.reset()
            done += 1
    return done


def miss_a_step(group: StoreGroup, gave_up: dist.Store, late: int, turn: int) -> None:
    """Bring rank ``late`` to the next step only after all others have given up on it and have named it alone."""
    group.all_gather(None)  # the others begin together
    if group.rank == late:
        gave_up.wait([f"{turn}/{r}" for r in range(group.world_size) if r != late], timedelta(seconds=100))
        return
    with pytest.raises(CollectiveTimeout) as caught:
        group.all_gather((group.rank, turn), 2.0)
    assert caught.value.missing == (late,)
    gave_up.set(f"{turn}/{group.rank}", "")


def reset_after_a_missed_attempt(late: int) -> None:
    """Have one rank miss the others' first attempt to reset, so that their second attempt meets its first."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        comm.all_reduce(torch.ones(3))
        group = StoreGroup(comm._rendezvous, 100.0)
        for turn in range(2):
            miss_a_step(group, group.store("gave up"), late, turn)
            wanted = [(r, turn) for r in range(comm.world_size)]
            assert group.all_gather((comm.rank, turn)) == wanted
            assert group.all_gather(None) == [None] * comm.world_size


class SlowStore:
    """A store that fails every wait of less than 50 ms."""

    def __init__(self, store: dist.Store):
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if timeout < timedelta(milliseconds=50):
            raise dist.DistStoreError(f"no answer within {timeout}")
        self._store.wait(keys, timeout)


def gather_with_a_slow_store(late: int) -> None:
    """Check that a rank that came in time is not reported as missing when the store answers too late."""
    with shotcast.Communicator(device="cpu") as comm:
        group = StoreGroup(comm._rendezvous, 100.0)
        gave_up = group.store("gave up")
        group._store = SlowStore(group._store)
        miss_a_step(group, gave_up, late, 0)
        assert group.all_gather((comm.rank, 0)) == [(r, 0) for r in range(comm.world_size)]


def timeouts_of_each_rank() -> tuple[float, str]:
    """Check that each rank has its own deadline, and that the shortest one stops all ranks."""
    with shotcast.Communicator(device="cpu", timeout_s=300) as comm:
        comm.all_reduce(torch.ones(3))
        if comm.rank == 1:
            comm.set_timeout(2)
        comm._host.barrier()
        started = time.monotonic()
        kind = ""
        if comm.rank != 2:
            with pytest.raises(CollectiveTimeout) as caught:
                comm.all_reduce(torch.ones(3))
            assert caught.value.missing == (2,)
            kind = type(caught.value).__name__
        took = time.monotonic() - started
        comm.set_timeout(300)
        comm.reset()
        for dtype in FLOATS.values():
            assert comm.all_reduce(torch.ones(3, dtype=dtype)).tolist() == [comm.world_size] * 3
        return took, kind


def left_after_its_last_call(victim: int) -> dict[str, Any]:
    """Have a rank close communicators after its part of the last calls, and live on; return what the others learn."""
    with shotcast.Communicator(device="cpu", timeout_s=60) as comm:
        n, big = comm.world_size, torch.ones(1 << 22)
        for _ in range(5):  # ranks leave while others are in the last call, whose data is all there
            part = comm.split(0)
            assert part is not None
            assert float(part.all_reduce(big)[-1]) == n
            part.close()
        part = comm.split(0)
        assert part is not None
        x = torch.ones(3)
        part.all_reduce(x)
        part.barrier()
        if comm.rank == victim:
            for other in range(n):
                if other != victim:
                    part.send(x, other)
            part.close()
            for _ in range(3):
                comm.barrier()
            return {}
        part.recv(torch.zeros(3), victim) if comm.rank == 0 else None
        comm.barrier()
        time.sleep(0.3)
        if comm.rank != 0:
            assert part.recv(torch.zeros(3), victim).tolist() == [1.0] * 3, "the message came before it left"
        comm.barrier()
        found: dict[str, Any] = {}
        for what, call in (
            ("all_reduce", lambda: part.all_reduce(x)),
            ("again", part.barrier),
            ("split", lambda: part.split(0)),
        ):
            begun = time.monotonic()
            with pytest.raises(CollectiveTimeout) as caught:
                call()
            found[what] = caught.value, time.monotonic() - begun
        found["cause"] = found["again"][0].__cause__, 0.0
        comm.barrier()
        part.close()
        return found


def waits(late: int) -> tuple[list[str], list[str]]:
    """Have a rank come late to calls of each kind. Return what the log of this rank says, and the names of threads."""
    import logging
    import threading

    from shotcast.collectives import call_watch
    from shotcast.memory import members

    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname}: {record.getMessage()}")

    logging.getLogger("shotcast").addHandler(Lines())
    members._AT_S = (0.4, 1.0)
    call_watch.WAITS.period_s = 0.1
    with shotcast.Communicator(device="cpu", timeout_s=100) as whole:
        comm = whole.split(0 if whole.rank else None)
        whole.barrier()
        if comm is not None:
            x, is_late = torch.ones(4), comm.rank == late
            comm.barrier()
            comm.all_reduce(x)
            comm.all_reduce(x, algorithm="vendor")
            comm.send(x, 1 - late) if is_late else comm.recv(x, late)
            calls = (
                lambda: comm.all_reduce(x),
                lambda: comm.recv(x, 1 - comm.rank) if comm.rank != late else comm.send(x, 1 - comm.rank),
                lambda: comm.split(0).close(),
            )
            for call in calls:
                comm.barrier()
                time.sleep(2.6 if is_late else 0.0)
                call()
            comm.close()
        whole.barrier()
    until = time.monotonic() + 5
    while (
        left := [one.name for one in threading.enumerate() if one.name == "shotcast waits"]
    ) and time.monotonic() < until:
        time.sleep(0.01)
    return lines, left
