"""The ranks of a group, as named in errors, and the log messages about calls that wait for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from shotcast.errors import CollectiveMismatch, CollectiveTimeout, call_text

logger = logging.getLogger(__name__)

# The texts by which Gloo and NCCL report that a call failed after it had begun; Gloo has no error classes for that.
_CAUSES = {
    "connection": ("Connection closed", "Connection reset", "Connection refused", "Broken pipe", "Socket closed"),
    "deadline": ("Timed out", "timed out", "imeout"),
}

_AT_S = (10.0, 60.0, 300.0, 1200.0)
"""Wait times after which a message is logged."""


class Members(NamedTuple):
    """The ranks of a group, as named in errors and the log."""

    rank: int  # of this process, in the group
    ranks: tuple[int, ...] = ()  # the rank in the job of each; empty where they are known by their ranks in the group
    group: str = ""  # what people call the group; empty for all ranks of the job
    advice: str = ""  # what to do once a call has stopped the group; empty for a communicator, which can be reset

    @property
    def own(self) -> int:
        """The rank of this process in the numbering shown to users."""
        return self.known(self.rank)

    def known(self, rank: int) -> int:
        """Return the job rank of a rank of the group."""
        return self.ranks[rank] if self.ranks else rank

    def text(self, ranks: Iterable[int]) -> str:
        """Describe ranks of the group in words."""
        return ", ".join(str(rank) for rank in sorted(map(self.known, ranks)))

    def timeout(
        self, missing: Iterable[int], op: str, epoch: int, timeout_s: float, reason: str = "late", where: str = ""
    ) -> CollectiveTimeout:
        """Return the error of a call without these ranks of the group; ``where`` describes their known nodes."""
        named = sorted(map(self.known, missing))
        return CollectiveTimeout(self.own, named, op, epoch, timeout_s, reason, where, self.group, self.advice)

    def mismatch(
        self, calls: Mapping[int, str], differing: Iterable[int], fields: Sequence[str], epoch: int
    ) -> CollectiveMismatch:
        """Return the error of mismatched calls, by ranks of the group."""
        named = {self.known(rank): call for rank, call in calls.items()}
        guilty = sorted(map(self.known, differing))
        return CollectiveMismatch(self.own, named, guilty, fields, epoch, self.group, self.advice)


def cause_of(error: Exception) -> str:
    """Return how a library call ended, "connection" or "deadline"; empty for errors of other kinds."""
    return next((cause for cause, texts in _CAUSES.items() if any(text in str(error) for text in texts)), "")


def departed(gone: Sequence[int], left: Collection[int]) -> tuple[list[int], str]:
    """Return which of the departed ranks to name, and the reason: the dead ones, or else the ones that left."""
    dead = [rank for rank in gone if rank not in left]
    return (dead, "dead") if dead else (list(gone), "left")


class WaitLog:
    """The log messages about one wait."""

    def __init__(self) -> None:
        self._said = 0

    def look(self, waited_s: float, text: Callable[[], str]) -> None:
        """Log ``text()`` if the wait, at ``waited_s`` so far, has reached the next threshold."""
        passed = sum(waited_s >= at for at in _AT_S)
        if passed > self._said:
            self._said = passed
            logger.warning("%s", text())


def wait_text(
    members: Members, ranks: Collection[int], op: str, epoch: int, waited_s: float, timeout_s: float, by: str = ""
) -> str:
    """Describe a waiting call in words.

    ``by`` is the library that runs the call, which does not report which ranks it waits for.
    """
    whom = f"rank{'s' if len(ranks) > 1 else ''} {members.text(ranks)}" if ranks else f"other ranks{by and f' in {by}'}"
    call = call_text(op, epoch, members.group)
    return f"rank {members.own}: {call} waits for {whom}, for {waited_s:.0f} s so far; its timeout is {timeout_s:g} s"
