"""Waiting for a job's ranks, ending them, and finding the rank to blame."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from multiprocessing.connection import wait

from shotcast.errors import RankFailed
from shotcast.launcher.job import RemoteRank
from shotcast.launcher.rank_handle import EXIT_GRACE_S, RankHandle

_log = logging.getLogger(__name__)

_SETTLE_S = 0.5
"""Time for ranks to report after a failure: neighbors may notice it before its cause is reported."""
_SETTLE_TIMEOUT_S = 2.0
"""The same after a timeout or mismatch, which by definition another rank caused."""
_TERM_GRACE_S = 2.0
"""Time from SIGTERM to SIGKILL."""


WatchedRank = RankHandle | RemoteRank
"""A rank whose report is awaited: a local process, or a connected rank on another host."""


def wait_for_reports(ranks: Sequence[WatchedRank], deadline: float | None, *, stop_at_failure: bool) -> bool:
    """Wait until all ranks have reported; return True if the deadline passed first.

    With ``stop_at_failure`` a failure ends the wait, after a grace period for its cause to be reported.
    """
    while unfinished := [rank for rank in ranks if not rank.finished]:
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            return True
        ends = {end: rank for rank in unfinished for end in rank.ends}
        ready = wait(list(ends), None if deadline is None else deadline - now)
        for rank in dict.fromkeys(ends[end] for end in ready):
            rank.receive()
        failures = [rank.failure for rank in ranks if rank.failure is not None]
        if failures and stop_at_failure:
            settle_s = _SETTLE_TIMEOUT_S if all(f.consequence == 3 for f in failures) else _SETTLE_S
            if not failures[0].killed:
                wait_for_reports(ranks, time.monotonic() + settle_s, stop_at_failure=False)
            return False
    return False


def join_all(ranks: Sequence[RankHandle]) -> None:
    """Wait for the processes to exit after all have reported; a crash on exit is a failure too."""
    deadline = time.monotonic() + EXIT_GRACE_S
    for rank in ranks:
        rank.record_exit(timeout_s=max(0.0, deadline - time.monotonic()))
        if rank.process.exitcode is None:
            _log.warning("rank %d returned but did not exit within %g s; it is ended", rank.rank, EXIT_GRACE_S)


def terminate_all(ranks: Sequence[RankHandle]) -> None:
    """End the processes that are still running: SIGTERM, then SIGKILL."""
    running = [rank for rank in ranks if rank.process.pid is not None and rank.process.exitcode is None]
    for stop, grace_s in (("terminate", _TERM_GRACE_S), ("kill", None)):
        for rank in running:
            getattr(rank.process, stop)()
        deadline = time.monotonic() + grace_s if grace_s is not None else None
        for rank in running:
            rank.process.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        running = [rank for rank in running if rank.process.exitcode is None]


def timeout_detail(rank: RankHandle, unfinished: Sequence[RankHandle], timeout_s: float | None) -> str:
    """Describe a timeout: the unfinished ranks, and this rank's stack."""
    names = ", ".join(str(other.rank) for other in unfinished)
    stack = rank.stack()
    position = f"\nrank {rank.rank} was here:\n{stack}" if stack else ""
    return f"ranks that had not finished within {timeout_s:g} s: {names}; they were ended{position}"


def root_cause(failed: Sequence[WatchedRank]) -> RankFailed:
    """Return the failure least likely to be a consequence of another; among equals, the first."""
    rank = min(failed, key=lambda rank: rank.failure.consequence if rank.failure else 0)
    assert rank.failure is not None
    others = [str(other.rank) for other in failed if other is not rank]
    also = f"\n(ranks that failed as well: {', '.join(others)})" if others else ""
    error = RankFailed(rank.rank, rank.failure.detail.rstrip() + also)
    error.__cause__ = rank.failure.exception
    return error
