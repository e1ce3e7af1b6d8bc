"""The exceptions that shotcast raises deliberately, and how their messages show a value."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence


class ShotcastError(RuntimeError):
    """The base class of all errors of this package."""


class ConfigError(ShotcastError, ValueError):
    """An argument, an environment variable or a file asks for something that cannot be done."""


class UnsupportedError(ShotcastError, TypeError):
    """The input is well formed, but neither this package nor the vendor library can serve it."""


class ClosedError(ShotcastError):
    """The communicator was closed."""


class CollectiveTimeout(ShotcastError):
    """Not every rank took part in a call: a rank is late beyond the deadline, or cannot come any more.

    Attributes:
        rank: the rank that reports.
        missing: the ranks that had not arrived, ascending.
        op: the name of the operation, for example ``"all_reduce"``.
        epoch: the number of the call on this communicator, counted from 1.
        timeout_s: the deadline of the call, in seconds.
        reason: ``"late"``: the missing ranks did not come within ``timeout_s``, though no process is known to have
            ended; ``"pending"``: a wait for the call ended before the call, which goes on, and ``missing`` has the
            ranks whose processes have ended; ``"dead"``: their processes have ended, which is said at once;
            ``"interrupted"``: a signal, such as that of Ctrl-C, or an abort ended the call on them;
            ``"unreachable"``: the connection to them was lost, which is said at once, or their node did not answer
            within ``timeout_s``.
        where: the missing ranks with their nodes, such as ``2, 3 (node b)``; empty where all ranks are on one node.
    """

    def __init__(
        self,
        rank: int,
        missing: Sequence[int],
        op: str,
        epoch: int,
        timeout_s: float,
        reason: str = "late",
        where: str = "",
    ):
        self.rank = rank
        self.missing = tuple(missing)
        self.op = op
        self.epoch = epoch
        self.timeout_s = timeout_s
        self.reason = reason
        self.where = where
        ranks = where or ", ".join(map(str, self.missing))
        after = (
            "The communicator is stopped: reset() it when every rank is alive, otherwise close() it and build a new one"
        )
        if reason == "dead":
            happened = f"cannot complete, as processes have ended; dead ranks: {ranks}"
        elif reason == "pending":
            happened = f"was not over after {timeout_s:g} s (Work.wait)"
            happened += f"; dead ranks: {ranks}" if ranks else ""
            after = "The call goes on: wait for it again"
        elif reason == "interrupted":
            happened = f"cannot complete, as a signal or an abort interrupted it; interrupted ranks: {ranks}"
        elif reason == "unreachable":
            happened = (
                f"cannot complete, as connections were lost or nodes do not answer (within {timeout_s:g} s); "
                f"unreachable ranks: {ranks}"
            )
        else:
            ranks = ranks or "none (all started the call, but data did not arrive)"
            happened = f"did not complete within its timeout of {timeout_s:g} s (timeout_s); missing ranks: {ranks}"
        super().__init__(f"rank {rank}: {op} (call {epoch}) {happened}. {after}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rank, self.missing, self.op, self.epoch, self.timeout_s, self.reason, self.where)


class CollectiveMismatch(ShotcastError):
    """The ranks did not make the same call.

    Attributes:
        rank: the rank that reports.
        calls: a description of each rank's call, by rank, as far as it is known.
        differing: the ranks outside the largest group of equal calls, ascending.
        fields: the fields that differ, a subset of ``("op", "dtype", "algorithm", "root", "reduction", "nbytes")``, or
            ``("sizes",)`` where the parts of an uneven all_to_all have other sizes than their receiver expects.
        epoch: the number of the call on this communicator, counted from 1.
    """

    def __init__(
        self, rank: int, calls: Mapping[int, str], differing: Sequence[int], fields: Sequence[str], epoch: int
    ):
        self.rank = rank
        self.calls = dict(calls)
        self.differing = tuple(differing)
        self.fields = tuple(fields)
        self.epoch = epoch
        descriptions = "; ".join(f"rank {r}: {call}" for r, call in sorted(self.calls.items()))
        descriptions = descriptions or "The rank that found the mismatch reports the calls"
        super().__init__(
            f"rank {rank}: call {epoch} differs between ranks in {', '.join(self.fields) or 'its header'}; "
            f"differing ranks: {', '.join(map(str, self.differing)) or 'unknown'}. {descriptions}. "
            f"Every rank must make the same calls in the same order; reset() the communicator to go on"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rank, self.calls, self.differing, self.fields, self.epoch)


class RankFailed(ShotcastError):
    """A process started by :func:`shotcast.spawn` raised, exited or was killed.

    Attributes:
        rank: the first rank that failed.
        detail: its traceback, or how the process ended.
    """

    def __init__(self, rank: int, detail: str):
        self.rank = rank
        self.detail = detail
        super().__init__(f"rank {rank} failed\n{detail}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rank, self.detail)


class EngineDead(ShotcastError):
    """The inference engine stopped for good; all unfinished requests are lost.

    Attributes:
        reason: why it stopped, for example which rank failed.
    """

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(f"the engine stopped: {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.reason,)


def shorten(value: object) -> str:
    """Return a representation of any value that fits on a line."""
    if isinstance(value, int) and value.bit_length() > 1 << 10:
        return f"one of {value.bit_length()} bits"  # Python refuses to write out very long integers
    return reprlib.repr(value)
