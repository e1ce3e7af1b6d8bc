"""The exceptions that shotcast raises deliberately, and how their messages show a value."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_STOPPED = "The communicator is stopped: reset() it when every rank is alive, otherwise close() it and build a new one"


class ShotcastError(RuntimeError):
    """The base class of all errors of this package."""

    def __reduce__(self) -> str | tuple[Any, ...]:
        fields = getattr(self, "__dataclass_fields__", None)  # an error with attributes is a dataclass
        return super().__reduce__() if fields is None else (type(self), tuple(getattr(self, name) for name in fields))


class ConfigError(ShotcastError, ValueError):
    """An argument, an environment variable or a file requests something impossible."""


class UnsupportedError(ShotcastError, TypeError):
    """The input is well formed, but neither this package nor the vendor library can serve it."""


class ClosedError(ShotcastError):
    """The communicator was closed."""


@dataclass(eq=False, repr=False)
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

    rank: int
    missing: Sequence[int]
    op: str
    epoch: int
    timeout_s: float
    reason: str = "late"
    where: str = ""
    group: str = ""
    advice: str = ""
    refused: str = ""

    def __post_init__(self) -> None:
        self.missing = tuple(self.missing)
        ranks = self.where or ", ".join(map(str, self.missing))
        after, timeout = self.advice or _STOPPED, f"{self.timeout_s:g} s"
        late = ranks or "none (all started the call, but data did not arrive)"
        happened = {
            "dead": f"cannot complete, as processes have ended; dead ranks: {ranks}",
            "left": f"cannot complete, as ranks have left the group; ranks that left: {ranks}",
            "pending": f"was not over after {timeout} (Work.wait){f'; dead ranks: {ranks}' if ranks else ''}",
            "interrupted": f"cannot complete, as a signal or an abort interrupted it; interrupted ranks: {ranks}",
            "unreachable": f"cannot complete, as connections were lost or nodes do not answer (within {timeout}); "
            f"unreachable ranks: {ranks}",
        }.get(self.reason, f"did not complete within its timeout of {timeout} (timeout_s); missing ranks: {late}")
        if self.reason == "left":
            after = self.advice or "The communicator is stopped: close() it and build a new one"
        elif self.reason == "pending":
            after = "The call goes on: wait for it again"
        if self.refused:
            what = f"{_not_made(self.refused, self.group, self.epoch)}: {self.op}"
        else:
            what = call_text(self.op, self.epoch, self.group)
        super().__init__(f"rank {self.rank}: {what} {happened}. {after}")


@dataclass(eq=False, repr=False)
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

    rank: int
    calls: Mapping[int, str]
    differing: Sequence[int]
    fields: Sequence[str]
    epoch: int
    group: str = ""
    advice: str = ""
    refused: str = ""

    def __post_init__(self) -> None:
        self.calls, self.differing, self.fields = dict(self.calls), tuple(self.differing), tuple(self.fields)
        descriptions = "; ".join(f"rank {r}: {call}" for r, call in sorted(self.calls.items()))
        descriptions = descriptions or "The rank that found the mismatch reports the calls"
        if self.refused:
            what = f"{_not_made(self.refused, self.group, self.epoch)}: it"
        else:
            what = call_text("call", self.epoch, self.group)
        after = f". {self.advice}" if self.advice else "; reset() the communicator to go on"
        super().__init__(
            f"rank {self.rank}: {what} differs between ranks in {', '.join(self.fields) or 'its header'}; "
            f"differing ranks: {', '.join(map(str, self.differing)) or 'unknown'}. {descriptions}. "
            f"Every rank must make the same calls in the same order{after}"
        )


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
    if isinstance(first, CollectiveTimeout | CollectiveMismatch):
        later: ShotcastError = dataclasses.replace(first, refused=op)
    else:
        later = type(first)(f"{op} was not made: the group was stopped before. {first}")
    later.__cause__ = first
    return later


@dataclass(eq=False, repr=False)
class RankFailed(ShotcastError):
    """A process started by :func:`shotcast.spawn` raised, exited or was killed.

    Attributes:
        rank: the first rank that failed.
        detail: its traceback, or how the process ended.
    """

    rank: int
    detail: str

    def __post_init__(self) -> None:
        super().__init__(f"rank {self.rank} failed\n{self.detail}")


@dataclass(eq=False, repr=False)
class EngineDead(ShotcastError):
    """The inference engine stopped for good; all unfinished requests are lost.

    Attributes:
        reason: why it stopped, for example which rank failed.
    """

    reason: str

    def __post_init__(self) -> None:
        super().__init__(f"the engine stopped: {self.reason}")


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
