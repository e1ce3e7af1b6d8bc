"""A small vocabulary for grammars: a token for each printable character of ASCII."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from shotcast.engine.grammar import Vocabulary

FIRST = 24
"""The token of the first character, a space. Tokens before it have no text."""


def characters() -> Backend:
    """Return a tokenizer whose tokens from FIRST on are the characters."""
    special = [f"<{number}>" for number in range(FIRST)]
    pieces = [*special, *("Ġ" if code == 32 else chr(code) for code in range(32, 127))]
    backend = Backend(models.BPE({piece: token for token, piece in enumerate(pieces)}, []))
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in special])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def vocabulary(size: int, end_tokens: tuple[int, ...]) -> Vocabulary:
    return Vocabulary(characters().to_str(), size, end_tokens)


def text_of(tokens: list[int]) -> str:
    return "".join(chr(token - FIRST + 32) for token in tokens if token >= FIRST)
