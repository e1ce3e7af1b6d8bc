"""A small vocabulary for grammars: a token for each printable character of ASCII, and one for the end of a line."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from shotcast.engine.grammar import Vocabulary

FIRST = 24
"""The token of the first character, a space. Tokens before it are special, the marks of calls of tools among them."""

CHARACTERS = [*map(chr, range(32, 127)), "\n"]

SPECIAL = [*(f"<{number}>" for number in range(FIRST - 2)), "<tool_call>", "</tool_call>"]


def characters() -> Backend:
    """Return a tokenizer whose tokens from FIRST on are the characters."""
    bytes_of = {" ": "\u0120", "\n": "\u010a"}
    pieces = [*SPECIAL, *(bytes_of.get(character, character) for character in CHARACTERS)]
    backend = Backend(models.BPE({piece: token for token, piece in enumerate(pieces)}, []))
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in SPECIAL])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def vocabulary(size: int, end_tokens: tuple[int, ...]) -> Vocabulary:
    return Vocabulary(characters().to_str(), size, end_tokens)


def text_of(tokens: list[int]) -> str:
    return "".join(CHARACTERS[token - FIRST] for token in tokens if token >= FIRST)
