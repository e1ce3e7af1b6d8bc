"""Incremental detokenization: the text of an output as its tokens arrive, up to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from shotcast.engine.tokenizer import Tokenizer


class StopStrings:
    """Releases a text up to its first stop string, and holds back any part that may become one.

    The first stop string is the one that starts earliest; of several at the same place, the shortest.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""
        self._found: str | None = None

    def push(self, delta: str, last: bool = False) -> tuple[str, str | None]:
        """Add the next piece of the text. Returns the text that may be released now, and the stop string if one was
        found. In that case all text before it has been released, and later pieces release nothing.

        Args:
            last: the text ends here, so text that is held back can no longer become a stop string.
        """
        if not self._stops:
            return delta, None
        if self._found is not None:
            return "", self._found
        text = self._held + delta
        found = [(start, len(stop), stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        start, _, stop = min(found) if found else (len(text), 0, None)
        held_from = start if last else min(len(text) - partial(text, stop) for stop in self._stops)
        if held_from < start:
            self._held = text[held_from:]
            return text[:held_from], None
        self._held = ""
        self._found = stop
        return text[:start], stop


def partial(text: str, marker: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a prefix of ``marker``."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


_UNDECODABLE = "\N{REPLACEMENT CHARACTER}"

_MAX_HELD = 8
"""The number of held tokens that may end mid-character before the detokenizer searches for the ones that do."""


class IncrementalDetokenizer:
    """Turns the tokens of an output into text one by one.

    All pieces of text together equal :meth:`Tokenizer.decode_continuation` of all tokens. Only complete characters are
    released. Tokens are held back only until their characters are known, so the time per token does not grow with the
    text. In vocabularies with byte tokens, a character is released with its last byte.

    Args:
        skip_special: special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._held: list[int] = []
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Add a token and return the newly known text."""
        if byte_tokens := self._tokenizer.byte_tokens:
            if (value := byte_tokens.get(token)) is not None:
                return self._bytes.decode(value)
            own_text = self._tokenizer.decode_token(token, self._skip_special)
            return self._bytes.decode(b"", final=True) + own_text if own_text else ""
        own_text = self._tokenizer.decode_token(token, self._skip_special)
        if not own_text:
            return ""
        self._held.append(token)
        text = own_text if len(self._held) == 1 else self._decode(self._held)
        if not text.endswith(_UNDECODABLE):
            return self._release(len(self._held), text)
        if len(self._held) <= _MAX_HELD:
            return ""
        # These are successive bytes that are not valid text. A character has at most four bytes, so only the last
        # tokens are undecided; the tokens before them are released at a point that does not split a character.
        for count in range(len(self._held) - 4, len(self._held) - 8, -1):
            head, tail = self._held[:count], self._held[count:]
            head_text = self._decode(head)
            if head_text and head_text + self._decode(tail) == text:
                return self._release(count, head_text)
        return ""

    def flush(self) -> str:
        """Return the rest of the text at the end of the output, with replacement characters for incomplete ones."""
        if self._tokenizer.byte_tokens:
            return self._bytes.decode(b"", final=True)
        return self._release(len(self._held), self._decode(self._held))

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode_continuation(tokens, self._skip_special)

    def _release(self, count: int, text: str) -> str:
        if text:
            del self._held[:count]
        return text
