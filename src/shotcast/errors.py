"""The exceptions that shotcast raises deliberately, and how their messages show a value."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence

_STOPPED = "The communicator is stopped: reset() it when every rank is alive, otherwise close() it and build a new one"


class ShotcastError(RuntimeError):
    """The base class of all errors of this package."""


class ConfigError(ShotcastError, ValueError):
    """An argument, an environment variable or a file requests something impossible."""


class UnsupportedError(ShotcastError, TypeError):
    """The input is well formed, but neither this package nor the vendor library can serve it."""


class ClosedError(ShotcastError):
    """The communicator was closed."""


class CollectiveTimeout(ShotcastError):
    """Not every rank joined a call: a rank is late beyond the deadline, or can no longer join.

    Ranks are numbered within the job, as in torchrun and torch.distributed, even for a subset of its ranks; in a group
    joined only by a store, they are numbered within the group.

    Attributes:
        rank: the rank that reports.
        missing: the ranks that had not arrived, ascending.
        op: the name of the operation, for example ``"all_reduce"``.
        epoch: the number of the call on this communicator, counted from 1; 0 if calls have no numbers.
        timeout_s: the deadline of the call, in seconds.
        reason: ``"late"``: the missing ranks did not arrive within ``timeout_s``, though no process is known to have
            ended; ``"pending"``: a wait for the call ended before the call, which continues, and ``missing`` lists the
            ranks whose processes have ended; ``"dead"``: their processes have ended, which is reported at once;
            ``"left"``: they have closed the communicator or destroyed the group, which is reported at once;
            ``"interrupted"``: a signal, such as from Ctrl-C, or an abort ended the call on them; ``"unreachable"``: the
            connection to them was lost, which is reported at once, or their node did not answer within ``timeout_s``.
        where: the missing ranks with their nodes, such as ``2, 3 (node b)``; empty if all ranks are on one node.
        group: the name of the group; empty for all ranks of the job.
        advice: what to do now; empty for a communicator, which can be reset.
        refused: the name of an operation that did not run because the call ``epoch`` had stopped the group; empty in
            the error of that call.
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
        group: str = "",
        advice: str = "",
        refused: str = "",
    ):
        self.rank = rank
        self.missing = tuple(missing)
        self.op = op
        self.epoch = epoch
        self.timeout_s = timeout_s
        self.reason = reason
        self.where = where
        self.group = group
        self.advice = advice
        self.refused = refused
        ranks = where or ", ".join(map(str, self.missing))
        after = advice or _STOPPED
        if reason == "dead":
            happened = f"cannot complete, as processes have ended; dead ranks: {ranks}"
        elif reason == "left":
            happened = f"cannot complete, as ranks have left the group; ranks that left: {ranks}"
            after = advice or "The communicator is stopped: close() it and build a new one"
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
        if refused:
            super().__init__(f"rank {rank}: {_not_made(refused, group, epoch)}: {op} {happened}. {after}")
        else:
            super().__init__(f"rank {rank}: {call_text(op, epoch, group)} {happened}. {after}")

    def __reduce__(self) -> tuple[object, ...]:
        fields = self.rank, self.missing, self.op, self.epoch, self.timeout_s, self.reason, self.where
        return type(self), (*fields, self.group, self.advice, self.refused)


class CollectiveMismatch(ShotcastError):
    """The ranks did not make the same call.

    Ranks are numbered as in :class:`CollectiveTimeout`.

    Attributes:
        rank: the rank that reports.
        calls: a description of each rank's call, by rank, as far as known.
        differing: the ranks outside the largest group of equal calls, ascending.
        fields: the fields that differ, a subset of ``("op", "dtype", "algorithm", "root", "reduction", "nbytes")``, or
            ``("sizes",)`` if the parts of an uneven all_to_all differ in size from what their receiver expects.
        epoch: the number of the call on this communicator, counted from 1.
        group, advice, refused: as in :class:`CollectiveTimeout`.
    """

    def __init__(
        self,
        rank: int,
        calls: Mapping[int, str],
        differing: Sequence[int],
        fields: Sequence[str],
        epoch: int,
        group: str = "",
        advice: str = "",
        refused: str = "",
    ):
        self.rank = rank
        self.calls = dict(calls)
        self.differing = tuple(differing)
        self.fields = tuple(fields)
        self.epoch = epoch
        self.group = group
        self.advice = advice
        self.refused = refused
        descriptions = "; ".join(f"rank {r}: {call}" for r, call in sorted(self.calls.items()))
        descriptions = descriptions or "The rank that found the mismatch reports the calls"
        what = f"{_not_made(refused, group, epoch)}: it" if refused else call_text("call", epoch, group)
        after = f". {advice}" if advice else "; reset() the communicator to go on"
        super().__init__(
            f"rank {rank}: {what} differs between ranks in {', '.join(self.fields) or 'its header'}; "
            f"differing ranks: {', '.join(map(str, self.differing)) or 'unknown'}. {descriptions}. "
            f"Every rank must make the same calls in the same order{after}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        fields = self.rank, self.calls, self.differing, self.fields, self.epoch
        return type(self), (*fields, self.group, self.advice, self.refused)


def call_text(op: str, epoch: int, group: str) -> str:
    """Describe a call in words, such as ``all_reduce (call 12) of group tp``."""
    number = "" if epoch == 0 else f" {epoch}" if op == "call" else f" (call {epoch})"
    return f"{op}{number}{f' of group {group}' if group else ''}"


def _not_made(refused: str, group: str, epoch: int) -> str:
    by = f"call {epoch}" if epoch else "a call before"
    return f"{refused} was not made: {f'group {group}' if group else 'the group'} was stopped by {by}"


def not_made(op: str, first: ShotcastError) -> ShotcastError:
    """Return the error of a call that did not run because ``first`` had stopped its group, with ``first`` as the cause.

    It has the class and the attributes of ``first``.
    """
    later: ShotcastError
    if isinstance(first, CollectiveTimeout):
        fields = first.rank, first.missing, first.op, first.epoch, first.timeout_s, first.reason, first.where
        later = CollectiveTimeout(*fields, first.group, first.advice, op)
    elif isinstance(first, CollectiveMismatch):
        about = first.rank, first.calls, first.differing, first.fields, first.epoch
        later = CollectiveMismatch(*about, first.group, first.advice, op)
    else:
        later = type(first)(f"{op} was not made: the group was stopped before. {first}")
    later.__cause__ = first
    return later


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


def similar(text: str, name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> str:
    """Fill {} in a text with the known names that resemble ``name``; "" if none does."""
    import difflib

    found = difflib.get_close_matches(name, list(known), most, cutoff)
    return text.format(", ".join(found)) if found else ""


def shorten(value: object) -> str:
    """Return a one-line representation of any value."""
    if isinstance(value, int) and value.bit_length() > 1 << 10:
        return f"one of {value.bit_length()} bits"  # Python refuses to write out very long integers
    return reprlib.repr(value)
