"""Strings that end a text which arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets a text through up to the first of ``stops`` in it, and never a part of what may become one.

    The first is the one that starts earliest; of two that start at one place, the shorter.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""
        self._found: str | None = None

    def push(self, delta: str, last: bool = False) -> tuple[str, str | None]:
        """Take the next piece of the text.

        Args:
            last: the text ends here, so nothing that is held back can become a stop string any more.

        Returns:
            What may be released now, and the stop string if it was found. Then all before it has been released, and
            later pieces release nothing.
        """
        if not self._stops:
            return delta, None
        if self._found is not None:
            return "", self._found
        text = self._held + delta
        found = [(start, len(stop), stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        start, _, stop = min(found) if found else (len(text), 0, None)
        begun = start if last else min((self._begun(text, stop) for stop in self._stops), default=start)
        if begun < start:
            self._held = text[begun:]
            return text[:begun], None
        self._held = ""
        self._found = stop
        return text[:start], stop

    @staticmethod
    def _begun(text: str, stop: str) -> int:
        """Where the longest end of ``text`` that is a beginning of ``stop`` starts; its length if there is none."""
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                return len(text) - length
        return len(text)
