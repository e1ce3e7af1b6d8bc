"""Stop strings: strings that end a text which arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Release a text up to the first stop string in it, and hold back any part that may become a stop string.

    The first stop string is the one that starts earliest, and of those that start at the same place the shortest.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""
        self._found: str | None = None

    def push(self, delta: str, last: bool = False) -> tuple[str, str | None]:
        """Add the next piece of the text.

        Args:
            delta: the piece.
            last: the text ends here, so text that is held back cannot become a stop string any more.

        Returns:
            The text that may be released now, and the stop string if one was found. Then all text before it has been
            released, and later pieces release nothing.
        """
        if not self._stops:
            return delta, None
        if self._found is not None:
            return "", self._found
        text = self._held + delta
        found = [(start, len(stop), stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        start, _, stop = min(found) if found else (len(text), 0, None)
        held_from = start if last else min((self._partial_start(text, stop) for stop in self._stops), default=start)
        if held_from < start:
            self._held = text[held_from:]
            return text[:held_from], None
        self._held = ""
        self._found = stop
        return text[:start], stop

    @staticmethod
    def _partial_start(text: str, stop: str) -> int:
        """Return where the longest end of ``text`` starts that begins ``stop``; the length of ``text`` if none does."""
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                return len(text) - length
        return len(text)
