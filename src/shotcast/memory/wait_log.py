"""Log messages about waiting calls, long before their deadline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from shotcast.errors import call_text
from shotcast.memory.members import Members

logger = logging.getLogger(__name__)

_AT_S = (10.0, 60.0, 300.0, 1200.0)
"""Wait times after which a message is logged."""


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
