"""A rank of the fault matrix: what it does in each cell, and what it sees."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fault_matrix import FUSED, MESSAGES, OPERATIONS, ROOTED, Case, label, served_dtypes
from workers import settle

import shotcast
from shotcast import Communicator

MAX_BYTES = 4 << 20
HIDDEN = 64
LATE_S = 0.4
"""Time after the deadline at which a late rank calls."""
_SETUP_S = 30.0
_PATIENCE_S = 10.0
"""Time beyond the deadline after which a rank that polls gives up; a test fails long before."""


@dataclass
class Report:
    """One case on one rank.

    Attributes:
        error: class, and attributes, of what the call raised; None if it raised nothing.
        waited_s: seconds from the call, or from the moment at which a rank was killed after it, until it was raised.
        freed_s: seconds after that until all work on the GPU had ended.
        again: class of what the next call raised.
        again_s: seconds until then.
        usable: the communicator worked after a reset; None if that was not tried.
        left: kinds of things that are more after ``close`` than they were before the communicator was made.
        trouble: the traceback of an error that nothing promises.
    """

    rank: int
    error: dict[str, Any] | None = None
    waited_s: float = 0.0
    freed_s: float = 0.0
    again: str = ""
    again_s: float = 0.0
    usable: bool | None = None
    left: dict[str, int] = field(default_factory=dict)
    trouble: str = ""


def run_cases(cases: Sequence[Case], device: str, folder: str, limit_s: float) -> None:
    """Run cases one after the other, each on a communicator of its own, and write a report of each to ``folder``.

    Only the last may kill a rank. The process ends after ``limit_s``, whatever it does.
    """
    faulthandler.dump_traceback_later(limit_s, exit=True)
    parent = Communicator(device=device, timeout_s=_SETUP_S, max_bytes=1 << 16)
    Path(folder, f"pid {parent.rank}").write_text(str(os.getpid()))
    _check(parent)
    with parent.split(0, max_bytes=MAX_BYTES) as first:  # libraries start threads that stay at the first use
        _check(first)
    del first
    kept = []
    for number, case in enumerate(cases):
        report = Report(parent.rank)
        try:
            kept.append(_run_case(parent, case, report))
        except BaseException:
            report.trouble = traceback.format_exc()
            raise
        finally:
            part = Path(folder, f"{number} {parent.rank} part")
            part.write_bytes(pickle.dumps(report))
            part.rename(part.with_name(f"{number} {parent.rank}"))
    if cases[-1].ending != "leave":
        parent.close()
    faulthandler.cancel_dump_traceback_later()


def _run_case(parent: Communicator, case: Case, report: Report) -> Communicator | None:
    """Run a case and fill in the report. Return its communicator if it is not to be closed."""
    before = _held()
    comm = parent.split(0, max_bytes=MAX_BYTES)
    assert comm is not None
    calls = _Calls(comm, case)
    pids = comm._host.all_gather(os.getpid())
    begin = max(comm._host.all_gather(time.monotonic())) + 0.15
    comm.set_timeout(case.deadline_s)
    if comm.rank == case.victim:
        _fail(comm, case, calls, begin, report)
    elif calls.takes_part:
        _sleep_until(begin)
        _complain(comm, case, calls, calls.usual, report)
        if report.error is None and case.cell.fault == "mismatched" and case.cell.operation in MESSAGES:
            _complain(comm, case, calls, comm.barrier, report)
        store = comm._host.store("matrix")
        store.set("complained", "")
        if case.cell.fault == "killed":
            killed_at = float(store.get("killed").decode())
            report.waited_s -= max(0.0, killed_at - calls.begun_at)
    if comm.rank == (case.victim + 1) % case.world_size and case.cell.fault == "stopped":
        _continue(pids[case.victim])
    if report.error is not None:
        _call_again(comm, report)
    comm.set_timeout(_SETUP_S)
    if case.ending == "reset":
        comm.reset()
        report.usable = calls.work_again()
    if case.ending != "leave":
        comm.close()
        del comm, calls
        report.left = _left_behind(before)
    if case.cell.fault != "killed":
        _check(parent)
    return comm if case.ending == "leave" else None


# -- what the rank at fault does --------------------------------------------------------------------------------------


def _fail(comm: Communicator, case: Case, calls: _Calls, begin: float, report: Report) -> None:
    fault = case.cell.fault

    store = comm._host.store("matrix")

    def fail_now() -> None:
        if fault == "killed":
            store.set("killed", repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "late":
            _sleep_until(begin + case.deadline_s + LATE_S)
            while not store.check(["complained"]) and time.monotonic() < begin + case.deadline_s + _PATIENCE_S:
                time.sleep(0.01)  # a sender first fills the mailbox
        calls.begun_at = time.monotonic()

    if fault == "absent":
        _sleep_until(begin + case.deadline_s + 0.5)
        return
    if case.cell.inside:
        _sleep_until(begin)
        before_library(comm, fail_now)
    elif fault == "mismatched":
        _sleep_until(begin)
    else:
        _sleep_until(begin + case.at_s)
        fail_now()
    _complain(comm, case, calls, calls.odd if fault == "mismatched" else calls.usual, report)
    if report.error is None and case.cell.inside:  # the library had all that it needed from the others
        assert calls.arrived(), "a call without an error gave something else"
    if report.error is None and (case.cell.inside or case.cell.operation in MESSAGES):  # it may learn by its next call
        _complain(comm, case, calls, comm.barrier, report)


def before_library(comm: Communicator, action: Callable[[], None]) -> None:
    """Run ``action`` once, when the next call has been compared and before the vendor's library takes it."""
    vendor: Any = comm._vendor
    run = vendor.run

    def act_first(*args: Any, **options: Any) -> Any:
        vendor.run = run
        action()
        return run(*args, **options)

    vendor.run = act_first


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _continue(pid: int) -> None:
    """Let a stopped process go on, once it has stopped."""
    until = time.monotonic() + 5
    while _state(pid) != "T" and time.monotonic() < until:
        time.sleep(0.005)
    time.sleep(0.1)  # the others reach their deadlines by themselves
    os.kill(pid, signal.SIGCONT)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# -- what all ranks see -----------------------------------------------------------------------------------------------


def _complain(comm: Communicator, case: Case, calls: _Calls, call: Callable[[], None], report: Report) -> None:
    """Make a call that is expected to fail, and put what it raised into the report."""
    calls.begun_at = time.monotonic()
    try:
        call()
        if case.polls and comm.device.type == "cuda":
            _poll(comm, calls.begun_at + case.deadline_s)
        else:
            settle(comm)
    except Exception as error:
        report.waited_s = time.monotonic() - calls.begun_at
        attributes = {name: vars(error)[name] for name in ("missing", "reason", "op", "fields") if hasattr(error, name)}
        report.error = {"class": type(error).__name__, "text": str(error), **attributes}
        if not isinstance(error, shotcast.ShotcastError):
            report.trouble = traceback.format_exc()
    else:
        report.waited_s = time.monotonic() - calls.begun_at
    if comm.device.type == "cuda":
        started = time.monotonic()
        torch.cuda.synchronize(comm.device)
        report.freed_s = time.monotonic() - started


def _poll(comm: Communicator, deadline: float) -> None:
    """Check again and again until the work of the current stream is done; never wait for it."""
    done = torch.cuda.Event()
    done.record()
    while not done.query() and time.monotonic() < deadline + _PATIENCE_S:
        comm.check()
        time.sleep(0.002)
    comm.check()


def _call_again(comm: Communicator, report: Report) -> None:
    started = time.monotonic()
    try:
        comm.barrier()
        settle(comm)
    except Exception as error:
        report.again = type(error).__name__
    report.again_s = time.monotonic() - started


def _check(comm: Communicator) -> None:
    """Check that a communicator works, by native kernels and by the library."""
    for dtype, algorithm in ((torch.float32, "one_shot"), (torch.int32, "auto")):
        total = comm.all_reduce(torch.ones(8, dtype=dtype, device=comm.device), algorithm=algorithm)
        settle(comm)
        assert total.tolist() == [comm.world_size] * 8


def _held() -> Counter[str]:
    """Count the threads of each name, the sockets and the other open files of this process."""
    gc.collect()
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    sockets = sum(target.startswith("socket:") for target in targets)
    own = {thread.native_id: thread.name for thread in threading.enumerate()}
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has just ended
            names.append(own.get(int(task)) or Path("/proc/self/task", task, "comm").read_text().strip())
    return Counter({"sockets": sockets, "files": len(targets) - sockets}) + Counter(f"thread {name}" for name in names)


def _left_behind(before: Counter[str]) -> dict[str, int]:
    """Return what is more than ``before``, and how much; threads get a moment to end, those of NCCL a longer one."""
    until = time.monotonic() + 10
    while True:
        left = dict(_held() - before)
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.05)


# -- the calls --------------------------------------------------------------------------------------------------------


class _Calls:
    """The usual call of a case and the one that differs from it, warmed up and, in a graph, captured.

    Attributes:
        usual: makes the call; so does ``odd`` with the call of a mismatched rank.
        begun_at: when the last call was begun, as a sender makes several, or when the rank at fault went on with it.
        takes_part: this rank has a part in the call, as not every rank has in a message.
    """

    def __init__(self, comm: Communicator, case: Case):
        self._comm, self._case = comm, case
        self.begun_at = 0.0
        self.takes_part = case.cell.operation not in MESSAGES or comm.rank in (case.victim, _partner(case))
        self._eager = {odd: _Made(comm, case, odd) for odd in (False, True)}
        self._graphs: dict[bool, Any] = {}
        for odd in (False, True, False):
            for _ in range(2):
                self._eager[odd].run()
                settle(comm)
        self._wanted = [output.clone() for output in self._eager[False].outputs]
        for output in self._eager[False].outputs:
            output.zero_()
        comm._host.barrier()
        self._capture(case.cell.fault == "mismatched" and comm.rank == case.victim)
        comm._host.barrier()
        explained = comm.explain(*self._eager[False].explained, algorithm=case.algorithm)
        assert explained.by_library == (case.cell.path == "vendor"), explained

    def _capture(self, odd: bool) -> None:
        if self._case.cell.mode == "graph":
            self._graphs[odd] = graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._eager[odd].call()

    def _run(self, odd: bool) -> None:
        call = self._eager[odd].call if self._case.cell.mode == "eager" else self._graphs[odd].replay
        for _ in range(self._eager[odd].times):
            self.begun_at = time.monotonic()
            call()

    def usual(self) -> None:
        self._run(False)

    def odd(self) -> None:
        self._run(True)

    def arrived(self) -> bool:
        """Return whether the outputs of the usual call are those that it gave before the fault."""
        return all(torch.equal(*pair) for pair in zip(self._eager[False].outputs, self._wanted, strict=True))

    def work_again(self) -> bool:
        """Return whether the usual call gives, three times, what it gave before the fault.

        A graph of a native kernel is replayed as it is; one of the library, whose communicator is another, is captured
        anew.
        """
        if self._case.cell.path == "vendor":
            self._eager[False].run()  # ranks connect outside of captures
            settle(self._comm)
        if False not in self._graphs or self._case.cell.path == "vendor":
            self._capture(False)
        same = True
        for _ in range(3):
            for output in self._eager[False].outputs:
                output.zero_()
            self._run(False)
            settle(self._comm)
            same &= self.arrived()
        return same


def _partner(case: Case) -> int:
    """Return the rank that exchanges a message with the victim."""
    return (case.victim + 1) % case.world_size


class _Made:
    """A call with its tensors.

    Attributes:
        call: makes it once.
        times: how often it is made; a sender goes on until the receiver's mailbox has no room.
        outputs: the tensors that it writes.
        explained: tensor and operation, as ``explain`` takes them.
    """

    def __init__(self, comm: Communicator, case: Case, odd: bool):
        operation, dtype, count = case.cell.operation, case.dtype, case.count
        root, reduction = (case.victim if case.cell.inside else 0), "max" if operation == "all_reduce_max" else "sum"
        if odd and case.difference == "dtype":
            served = served_dtypes(operation, case.algorithm)
            dtype = served[(served.index(dtype) + 1) % len(served)]
        elif odd and case.difference == "nbytes":
            count += 1
        elif odd and case.difference == "op":
            operation = "all_reduce" if operation in ("broadcast", "barrier") else "broadcast"
            dtype = "float32" if operation == "all_reduce" else dtype
        elif odd and case.difference == "root":
            root = (root + 1) % case.world_size
        elif odd:
            reduction = "min" if reduction == "max" else "max"
        self.times = 1
        self.outputs: list[torch.Tensor] = []
        algorithm = case.algorithm if case.algorithm in (*OPERATIONS[operation], "auto") else OPERATIONS[operation][0]
        kind, device, size = getattr(torch, dtype), comm.device, case.world_size
        name = label(operation)

        def filled(*shape: int) -> torch.Tensor:
            numbers = torch.arange(torch.Size(shape).numel(), device=device) % 5 + comm.rank
            return numbers.to(kind).view(shape)

        if operation in FUSED:
            self._make_fused(comm, operation, count, filled, algorithm)
            return
        parts = size if operation in ("reduce_scatter", "all_to_all", "scatter") else 1
        x = filled(parts * count)
        rows = {"reduce_scatter": count, "all_gather": size * count}.get(operation, parts * count)
        out = torch.zeros(rows, dtype=kind, device=device)
        self.explained = (out if operation == "all_gather" else x, name)
        if operation in ROOTED[1:] or operation == "all_to_all_uneven":
            self._make_later(comm, operation, count, filled, algorithm, root, reduction)
            return
        if name == "all_reduce":
            self.call = lambda: comm.all_reduce(x, out, algorithm, reduction)
        elif operation == "reduce_scatter":
            self.call = lambda: comm.reduce_scatter(x, out, algorithm)
        elif operation == "all_gather":
            self.call = lambda: comm.all_gather(x, out, algorithm=algorithm)
        elif operation == "all_to_all":
            self.call = lambda: comm.all_to_all(x, out, algorithm)
        elif operation == "broadcast":
            self.call = lambda: comm.broadcast(out.copy_(x), root, algorithm)
        elif operation == "barrier":
            self.call = comm.barrier
        else:
            self._make_message(comm, case, x, out)
            return
        self.outputs = [] if operation == "barrier" else [out]

    def _make_later(
        self,
        comm: Communicator,
        operation: str,
        count: int,
        filled: Callable[..., torch.Tensor],
        algorithm: str,
        root: int,
        reduction: str,
    ) -> None:
        """Make a call with a root, or of uneven parts: rank r gets r + 1 times ``count`` of each rank."""
        rank, size = comm.rank, comm.world_size
        x, out = filled(count), torch.zeros_like(filled(count))
        if operation == "all_to_all_uneven":
            sent, received = [count * (r + 1) for r in range(size)], [count * (rank + 1)] * size
            x, out = filled(sum(sent)), torch.zeros_like(filled(sum(received)))
            self.call = lambda: comm.all_to_all(x, out, algorithm=algorithm, input_sizes=sent, output_sizes=received)
        elif operation == "scatter":
            x = filled(size * count)
            self.call = lambda: comm.scatter(x, root, out, algorithm)
        else:
            out = torch.zeros_like(filled(count if operation == "reduce" else size * count))
            given = out if rank == root else None
            if operation == "reduce":
                self.call = lambda: comm.reduce(x, root, given, algorithm, reduction)
            else:
                self.call = lambda: comm.gather(x, root, given, algorithm)
            self.outputs = [] if given is None else [given]
            return
        self.outputs = [out]

    def _make_message(self, comm: Communicator, case: Case, x: torch.Tensor, out: torch.Tensor) -> None:
        partner = _partner(case)
        sender, receiver = (partner, case.victim) if case.cell.operation == "send" else (case.victim, partner)
        self.times = comm.waiting_messages(x) + 1
        self.call: Callable[[], Any] = lambda: None
        if comm.rank == sender:
            self.call = lambda: comm.send(x, receiver)
        elif comm.rank == receiver:
            self.call, self.outputs = (lambda: comm.recv(out, sender)), [out]

    def _make_fused(
        self, comm: Communicator, operation: str, rows: int, filled: Callable[..., torch.Tensor], algorithm: str
    ) -> None:
        x, residual, weight = filled(rows, HIDDEN), filled(rows, HIDDEN), filled(HIDDEN)
        out = (torch.zeros_like(x), torch.zeros_like(residual))
        self.outputs, self.explained = [*out], (x, operation)
        self.call = lambda: comm.all_reduce_rms_norm(x, residual, weight, algorithm=algorithm, out=out)

    def run(self) -> None:
        for _ in range(self.times):
            self.call()
