"""Say in the log that a call waits, long before its deadline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from shotcast.errors import call_text
from shotcast.memory.members import Members

logger = logging.getLogger(__name__)

_AT_S = (10.0, 60.0, 300.0, 1200.0)
"""Times of a wait after which it is mentioned."""


class WaitLog:
    """The lines of the log about one wait."""

    def __init__(self) -> None:
        self._said = 0

    def look(self, waited_s: float, text: Callable[[], str]) -> None:
        """Write ``text()`` if the wait, which has taken ``waited_s`` so far, has become worth another line."""
        passed = sum(waited_s >= at for at in _AT_S)
        if passed > self._said:
            self._said = passed
            logger.warning("%s", text())


def wait_text(
    members: Members, ranks: Collection[int], op: str, epoch: int, waited_s: float, timeout_s: float, by: str = ""
) -> str:
    """Return that a call waits, in words.

    ``by`` is the library that makes the call, which does not tell whom it waits for.
    """
    whom = f"rank{'s' if len(ranks) > 1 else ''} {members.text(ranks)}" if ranks else f"other ranks{by and f' in {by}'}"
    call = call_text(op, epoch, members.group)
    return f"rank {members.own}: {call} waits for {whom}, for {waited_s:.0f} s so far; its timeout is {timeout_s:g} s"
