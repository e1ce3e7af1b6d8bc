"""One rank as seen by the process that started it: its pipes, its report, and how it ended."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from shotcast.errors import CollectiveMismatch, CollectiveTimeout, RankFailed
from shotcast.launcher.rank_process import CallerContext, RankProcess, run_rank

EXIT_GRACE_S = 10.0
"""Time from the last rank's result to the end of all processes, which destroy process groups meanwhile."""


@dataclass(slots=True)
class Failure:
    """The reason a rank failed."""

    detail: str  # a description, with the traceback if the rank raised
    exception: BaseException | None = None  # the exception that the rank raised, if it could be pickled
    killed: bool = False  # the process ended without a report

    def as_exception(self, rank: int) -> BaseException:
        if self.exception is None:
            return RankFailed(rank, self.detail)
        # Tracebacks cannot be pickled; their text can.
        self.exception.__cause__ = RankFailed(rank, self.detail)
        return self.exception

    @property
    def consequence(self) -> int:
        """The likelihood that another rank caused this failure, from 0 (lowest) to 5.

        0: the rank died without a report; 1: it raised; 2: it lost a peer; 3: its wait timed out; 4: a process that it
        waited for ended; 5: its connection was closed.
        """
        if self.killed:
            return 0
        if isinstance(self.exception, ConnectionError):
            return 5
        if isinstance(self.exception, CollectiveTimeout) and self.exception.reason in ("dead", "left"):
            return 4
        if isinstance(self.exception, CollectiveTimeout | CollectiveMismatch):
            return 3
        distributed = sys.modules.get("torch.distributed")  # where an instance was unpickled, it is imported
        dist_error = distributed is not None and isinstance(self.exception, distributed.DistError)
        lost_peer = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
        if dist_error or any(text in self.detail for text in lost_peer):
            return 2
        return 1


@dataclass(slots=True, eq=False)
class RankHandle:
    """One rank's process, seen from the parent."""

    rank: int
    process: RankProcess
    results: Connection  # the pipe that the rank's report arrives on
    stacks: Connection  # the pipe that the rank writes its stack to when it receives SIGTERM
    alive: Connection  # the pipe whose closing makes the kernel kill the rank
    child_ends: tuple[Connection, ...]  # the rank's ends of the three pipes, closed here once it has started
    reported: bool = False  # the rank has reported a result or an exception
    value: Any = None
    failure: Failure | None = None

    @classmethod
    def create(cls, rank: int, env: dict[str, str], payload: bytes, own_group: bool = False) -> RankHandle:
        """Create the pipes and the process object; :meth:`start` starts the process, optionally in its own group."""
        context = multiprocessing.get_context("forkserver")
        results, results_w = context.Pipe(duplex=False)
        stacks, stacks_w = context.Pipe(duplex=False)
        alive_r, alive = context.Pipe(duplex=False)
        child_ends = (results_w, stacks_w, alive_r)
        caller = CallerContext.current(env, own_group)
        process = RankProcess(target=run_rank, args=(caller, payload, *child_ends))
        process.name = f"shotcast rank {rank}"
        return cls(rank, process, results, stacks, alive, child_ends)

    def start(self) -> None:
        try:
            self.process.start()
        finally:
            for end in self.child_ends:
                end.close()

    @property
    def finished(self) -> bool:
        return self.reported or self.failure is not None

    @property
    def ends(self) -> list[Any]:
        """The report pipe and the process sentinel, one of which becomes ready."""
        return [self.results, self.process.sentinel]

    @property
    def succeeded(self) -> bool:
        return self.reported and self.failure is None

    def receive(self) -> None:
        """Receive the rank's report or, if it ended without one, record how it died."""
        try:
            # a process that the rank started may outlive it and hold the pipe open
            if not self.results.poll():
                raise EOFError
            report = self.results.recv_bytes()
        except (EOFError, OSError):
            self.record_exit(timeout_s=EXIT_GRACE_S)
            return
        self.reported = True
        self.value, self.failure = read_report(report)

    def record_exit(self, timeout_s: float) -> None:
        """Record an unclean exit; the process has ended or is about to."""
        self.process.join(timeout_s)
        code = self.process.exitcode
        if self.failure is not None or (self.reported and code in (0, None)):
            return
        after = " after it had returned" if self.reported else ""
        if code is not None and code < 0:
            hint = "; if nobody sent it, memory ran out" if -code == signal.SIGKILL else ""
            name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
            self.failure = Failure(f"the process was killed by {name}{after}{hint}", killed=True)
        elif self.reported:
            self.failure = Failure(f"the process exited with code {code}{after}; its standard error says why")
        else:
            self.failure = Failure(f"the process exited with code {code} and returned nothing", killed=True)

    def stack(self) -> str:
        """Return the rank's stack at the time of SIGTERM; empty if it wrote none."""
        text = io.BytesIO()
        with contextlib.suppress(EOFError, OSError):
            while self.stacks.poll(0):
                chunk = os.read(self.stacks.fileno(), 65536)
                if not chunk:
                    break
                text.write(chunk)
        return text.getvalue().decode(errors="replace").strip()

    def close(self) -> None:
        """Close the pipes and the process object.

        The process has ended, or its start was interrupted, in which case closing ``alive`` ends it.
        """
        for connection in (self.results, self.stacks, self.alive, *self.child_ends):
            connection.close()
        self.process.close()


def read_report(report: bytes) -> tuple[Any, Failure | None]:
    """Unpack a rank's report: the returned value, and the failure if it failed."""
    kind, value, text = pickle.loads(report)
    if kind == "error":
        return None, Failure(text, exception=_unpickle(value))
    try:
        return pickle.loads(value), None
    except Exception:
        return None, Failure(f"its return value cannot be unpickled here\n{traceback.format_exc()}")


def _unpickle(data: bytes | None) -> BaseException | None:
    """Return a rank's exception, or None if only its text could be pickled."""
    if data is None:
        return None
    try:
        error = pickle.loads(data)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None
