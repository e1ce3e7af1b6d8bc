"""Ranks as the process that started them sees them: what they report, how they end, and which of them is to blame."""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from shotcast.errors import CollectiveMismatch, CollectiveTimeout, RankFailed
from shotcast.launcher.rank_process import RankProcess, Surroundings, run_rank

_log = logging.getLogger(__name__)

_SETTLE_S = 0.5
"""After a failure, time for the rank that caused it to be heard: its neighbours may notice first."""
_SETTLE_TIMEOUT_S = 2.0
"""The same when the failure heard first is a timeout or mismatch, which another rank caused by definition."""
_EXIT_GRACE_S = 10.0
"""From the last rank's result to the end of all processes (process groups are destroyed meanwhile)."""
_TERM_GRACE_S = 2.0
"""From SIGTERM to SIGKILL."""


@dataclass(slots=True)
class Failure:
    """Why a rank failed.

    Attributes:
        detail: in words, with its traceback if it raised.
        exception: what it raised, if that could travel.
        killed: it ended without a word.
    """

    detail: str
    exception: BaseException | None = None
    killed: bool = False

    def as_exception(self, rank: int) -> BaseException:
        if self.exception is None:
            return RankFailed(rank, self.detail)
        # Tracebacks do not travel; their text does.
        self.exception.__cause__ = RankFailed(rank, self.detail)
        return self.exception

    @property
    def consequence(self) -> int:
        """How likely another rank is to blame: 0 died without a word, 1 raised, 2 lost a peer, 3 waited in vain, 4 saw
        the end of a connection."""
        if self.killed:
            return 0
        if isinstance(self.exception, ConnectionError):
            return 4
        if isinstance(self.exception, CollectiveTimeout | CollectiveMismatch):
            return 3
        lost_peer = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
        if isinstance(self.exception, dist.DistError) or any(text in self.detail for text in lost_peer):
            return 2
        return 1


@dataclass(slots=True, eq=False)
class WatchedRank:
    """One process, seen from the parent."""

    rank: int
    process: RankProcess
    results: Connection
    stacks: Connection
    alive: Connection
    ends: tuple[Connection, ...]
    reported: bool = False
    value: Any = None
    failure: Failure | None = None

    @classmethod
    def made(cls, rank: int, env: dict[str, str], payload: bytes) -> WatchedRank:
        """Not started yet."""
        context = multiprocessing.get_context("forkserver")
        results, results_w = context.Pipe(duplex=False)
        stacks, stacks_w = context.Pipe(duplex=False)
        alive_r, alive = context.Pipe(duplex=False)
        ends = (results_w, stacks_w, alive_r)
        process = RankProcess(target=run_rank, args=(Surroundings.here(env), payload, *ends))
        process.name = f"shotcast rank {rank}"
        return cls(rank, process, results, stacks, alive, ends)

    def start(self) -> None:
        try:
            self.process.start()
        finally:
            for end in self.ends:
                end.close()

    @property
    def finished(self) -> bool:
        return self.reported or self.failure is not None

    @property
    def succeeded(self) -> bool:
        return self.reported and self.failure is None

    def receive(self) -> None:
        """Take the rank's report, or, if it ended without one, learn how it died."""
        try:
            # of what a rank has started, something may live on, and hold the pipe open
            if not self.results.poll():
                raise EOFError
            report = self.results.recv_bytes()
        except (EOFError, OSError):
            self.note_exit(timeout_s=_EXIT_GRACE_S)
            return
        self.reported = True
        kind, value, text = pickle.loads(report)
        if kind == "error":
            self.failure = Failure(text, exception=_unpickle(value))
            return
        try:
            self.value = pickle.loads(value)
        except Exception:
            self.failure = Failure(f"its return value cannot be unpickled here\n{traceback.format_exc()}")

    def note_exit(self, timeout_s: float) -> None:
        """Record an exit that was no clean one; the process has ended or is about to."""
        self.process.join(timeout_s)
        code = self.process.exitcode
        if self.failure is not None or (self.reported and code in (0, None)):
            return
        after = " after it had returned" if self.reported else ""
        if code is not None and code < 0:
            hint = "; the kernel does that when memory runs out" if -code == signal.SIGKILL else ""
            name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
            self.failure = Failure(f"the process was killed by {name}{after}{hint}", killed=True)
        elif self.reported:
            self.failure = Failure(f"the process exited with code {code}{after}; its standard error says why")
        else:
            self.failure = Failure(f"the process exited with code {code} and returned nothing", killed=True)

    def stack(self) -> str:
        """Where the rank stood when SIGTERM reached it."""
        text = io.BytesIO()
        with contextlib.suppress(EOFError, OSError):
            while self.stacks.poll(0):
                chunk = os.read(self.stacks.fileno(), 65536)
                if not chunk:
                    break
                text.write(chunk)
        return text.getvalue().decode(errors="replace").strip()

    def close(self) -> None:
        """Of an ended process, or one whose start was interrupted: it ends as ``alive`` is closed."""
        for connection in (self.results, self.stacks, self.alive, *self.ends):
            connection.close()
        self.process.close()


def collect(ranks: Sequence[WatchedRank], deadline: float | None, *, stop_at_failure: bool) -> bool:
    """Wait for reports; True when the deadline passed first. A failure ends the wait after a moment for its cause."""
    while unfinished := [rank for rank in ranks if not rank.finished]:
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            return True
        ends = {end: rank for rank in unfinished for end in (rank.results, rank.process.sentinel)}
        ready = wait(list(ends), None if deadline is None else deadline - now)
        for rank in dict.fromkeys(ends[end] for end in ready):  # type: ignore[index]
            rank.receive()
        failures = [rank.failure for rank in ranks if rank.failure is not None]
        if failures and stop_at_failure:
            settle_s = _SETTLE_TIMEOUT_S if all(f.consequence == 3 for f in failures) else _SETTLE_S
            if not failures[0].killed:
                collect(ranks, time.monotonic() + settle_s, stop_at_failure=False)
            return False
    return False


def join_all(ranks: Sequence[WatchedRank]) -> None:
    """Let processes end by themselves once all have reported; a crash on the way out is a failure too."""
    deadline = time.monotonic() + _EXIT_GRACE_S
    for rank in ranks:
        rank.note_exit(timeout_s=max(0.0, deadline - time.monotonic()))
        if rank.process.exitcode is None:
            _log.warning("rank %d returned but did not exit within %g s; it is ended", rank.rank, _EXIT_GRACE_S)


def end_all(ranks: Sequence[WatchedRank]) -> None:
    """End what still runs: SIGTERM, then SIGKILL."""
    running = [rank for rank in ranks if rank.process.pid is not None and rank.process.exitcode is None]
    for stop, grace_s in (("terminate", _TERM_GRACE_S), ("kill", None)):
        for rank in running:
            getattr(rank.process, stop)()
        deadline = time.monotonic() + grace_s if grace_s is not None else None
        for rank in running:
            rank.process.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        running = [rank for rank in running if rank.process.exitcode is None]


def timeout_detail(rank: WatchedRank, unfinished: Sequence[WatchedRank], timeout_s: float | None) -> str:
    """Who had not finished, and where this one of them stood."""
    names = ", ".join(str(other.rank) for other in unfinished)
    stack = rank.stack()
    where = f"\nrank {rank.rank} stood here:\n{stack}" if stack else ""
    return f"ranks that had not finished within {timeout_s:g} s: {names}; they were ended{where}"


def root_cause(failed: Sequence[WatchedRank]) -> RankFailed:
    """The failure least likely to be another's consequence; among equals the first heard of."""
    rank = min(failed, key=lambda rank: rank.failure.consequence if rank.failure else 0)
    assert rank.failure is not None
    others = [str(other.rank) for other in failed if other is not rank]
    also = f"\n(ranks that failed as well: {', '.join(others)})" if others else ""
    error = RankFailed(rank.rank, rank.failure.detail.rstrip() + also)
    error.__cause__ = rank.failure.exception
    return error


def _unpickle(data: bytes | None) -> BaseException | None:
    """A rank's exception, or None where it does not travel (its text does)."""
    if data is None:
        return None
    try:
        error = pickle.loads(data)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None
