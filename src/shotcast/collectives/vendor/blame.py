"""Agreement on the ranks at fault, after a call of the vendor library has failed.

The library says that a call failed, but not which rank caused it. So ranks whose calls fail report to the job's store,
and the first to decide writes its verdict for all others (docs/reference/protocols.md).

The store may belong to the stopped process, and PyTorch waits for its answer forever. So threads query it, and nothing
waits for an answer longer than a moment.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from shotcast.collectives.started import Outcome
from shotcast.wire import HeaderWords

_PATIENCE_S = 0.5
"""Time from a rank's report to its decision; calls of ranks that wait for the same rank all fail within it."""

_KERNEL_S = 0.2
"""Time for this rank's kernels to notice a fault reported by another rank, which may have left since."""

_LOOK_S = 0.3
"""The time limit of a store query for other ranks' reports."""

_ANSWER_S = 0.8
"""The time without an answer after which the store counts as silent. A busy store takes a while for each answer, and
several answers together may take longer."""

_ALL_ANSWERS_S = 10.0
"""The time limit for all answers to one query."""


class SilentStoreError(Exception):
    """The job's store did not answer."""


class Verdict(NamedTuple):
    """The ranks' shared verdict on a failed call."""

    # `late`, `dead` or `interrupted`; `mismatch` if the calls differ; `library` if all ranks are in the same call, so
    # that nobody is at fault
    reason: str
    ranks: tuple[int, ...]  # the ranks at fault
    headers: dict[int, HeaderWords]  # those of the calls that failed, by rank


class Blame:
    """The ranks' agreement on at most one fault.

    The ``store`` is a dedicated part of the job's store; ``gone`` are ranks whose processes have ended, or that have
    left.
    """

    def __init__(self, store: dist.Store, rank: int, gone: Collection[int]):
        self._store, self._rank, self._gone = store, rank, gone
        self._asking: threading.Thread | None = None
        self._heard = 0.0

    def raised(self) -> bool:
        """Return whether any rank has reported a fault, as far as the store answers."""
        with contextlib.suppress(SilentStoreError, dist.DistError):
            return not self._unanswered() and bool(self._asked(lambda: self._has("alarm"), _LOOK_S))
        return False

    def _unanswered(self) -> bool:
        return self._asking is not None and self._asking.is_alive()

    def _asked(self, questions: Callable[[], Any], limit_s: float) -> Any:
        """Run ``questions()`` on a thread and return its result.

        The wait for an unanswered earlier query counts, so a silent store is detected sooner; but this process may have
        been stopped meanwhile, so each query gets some time. Raises SilentStoreError if no answer came for ``limit_s``.
        """
        answer, asked = Outcome(), time.monotonic()
        if not self._unanswered():
            self._heard = asked
        self._asking = threading.Thread(target=answer.run, args=(questions,), name="shotcast store", daemon=True)
        self._asking.start()
        while not answer.over.is_set():
            until = min(max(self._heard + limit_s, asked + _LOOK_S), asked + _ALL_ANSWERS_S)
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise SilentStoreError("the job's store does not answer; the process that holds it may be stopped")
            self._asking.join(left_s)
        return answer.get()

    def _query(self, method: str, *arguments: Any) -> Any:
        found = getattr(self._store, method)(*arguments)
        self._heard = time.monotonic()
        return found

    def _has(self, key: str) -> bool:
        return bool(self._query("check", [key]))

    def verdict(
        self,
        members: Sequence[int],
        header: HeaderWords | None,
        waited_s: float,
        cause: str = "other",
        interrupted: bool = False,
        settled: Callable[[], bool] | None = None,
    ) -> Verdict:
        """Report that this rank's call failed, and return the verdict.

        ``cause`` comes from the :class:`CallError` that ended the call, after ``waited_s``. ``settled`` returns whether
        the fault has become known in another way, so that no verdict is needed. Raises SilentStoreError if the store
        does not answer.
        """
        now = time.time()  # the hosts' clocks: they differ by little, and it matters for a rank that just comes
        facts = {"header": header, "begun": now - waited_s, "cause": cause, "interrupted": interrupted}
        found: Verdict = self._asked(lambda: self._agree(members, now, facts, settled), _ANSWER_S)
        return found

    def _agree(
        self, members: Sequence[int], now: float, facts: dict[str, Any], settled: Callable[[], bool] | None
    ) -> Verdict:
        self._query("compare_set", "alarm", "", repr(now))
        self._query("compare_set", f"report/{self._rank}", "", json.dumps(facts))
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until and not facts["interrupted"] and not self._has("verdict"):
            if settled is not None and settled():
                return Verdict("library", (), {})
            heard = settled is not None and time.monotonic() < until - _PATIENCE_S + _KERNEL_S
            if not heard and all(rank in self._gone or self._has(f"report/{rank}") for rank in members):
                break
            time.sleep(0.01)
        if not self._has("verdict"):
            self._query("compare_set", "verdict", "", self._decide(members))
        found = json.loads(self._query("get", "verdict"))
        headers = {int(rank): HeaderWords(*words) for rank, words in found["headers"].items()}
        if facts["header"] is not None:
            headers[self._rank] = facts["header"]
        return Verdict(found["reason"], tuple(found["ranks"]), headers)

    def _decide(self, members: Sequence[int]) -> str:
        came = [rank for rank in members if self._has(f"report/{rank}")]
        reports = {rank: json.loads(self._query("get", f"report/{rank}")) for rank in came}
        alarm = float(self._query("get", "alarm"))
        reports = {rank: report for rank, report in reports.items() if report["begun"] <= alarm}
        headers = {rank: report["header"] for rank, report in reports.items() if report["header"]}
        absent = [rank for rank in members if rank not in reports]
        dead = [rank for rank in absent if rank in self._gone]
        causes = {report["cause"] for report in reports.values()}
        if "connection" in causes and "deadline" not in causes:
            dead = dead or absent  # nobody gave up before, so a process that ended has broken the connection
        interrupted = [rank for rank, report in reports.items() if report["interrupted"]]
        found = list(headers.values())
        usual = max(found, key=found.count, default=None)
        differing = [rank for rank, words in headers.items() if words != usual]
        reasons = {"interrupted": interrupted, "dead": dead, "mismatch": differing, "late": absent}
        reason = next((each for each, ranks in reasons.items() if ranks), "library")
        return json.dumps({"reason": reason, "ranks": reasons.get(reason, []), "headers": headers})
