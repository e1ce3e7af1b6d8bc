"""Text to tokens and back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shotcast.errors import ConfigError
from shotcast.models.gguf_header import GgufHeader
from shotcast.models.source import RANDOM, find_model

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""One of these makes a folder have a tokenizer."""

_UNDECODABLE = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile("<0x[0-9A-F]{2}>")

_HELD = 8
"""Tokens that may be held because they end within a character, before it is asked which of them really do."""


class Tokenizer:
    """The tokenizer that comes with a model, by transformers.

    Attributes:
        byte_tokens: those that stand for one byte each, if it has such.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._alone: dict[tuple[int, bool], str] = {}
        self._anchor = self._find_anchor()
        self._anchor_length = len(self.decode(self._anchor))
        self.byte_tokens = self._find_bytes()

    @classmethod
    def load(cls, model: str) -> Tokenizer:
        """Of a model as :func:`shotcast.models.source.open_checkpoint` names it. Nothing is fetched from a network.

        Raises:
            ConfigError: it has none, or it cannot be read.
        """
        path = cls.find(model)
        from transformers import AutoTokenizer

        folder, options = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
        except Exception as error:  # whatever a library finds wrong with files that are not ours
            raise ConfigError(f"the tokenizer of {path} cannot be read: {error}") from error
        if not path.is_dir():
            _fit_to_gguf(tokenizer, path)
        return cls(tokenizer)

    @staticmethod
    def find(model: str) -> Path:
        """The folder, or the GGUF file, of a model that has a tokenizer. ConfigError if it has none."""
        if model.startswith(RANDOM):
            raise ConfigError(f"{model} has no tokenizer, since its weights are random; LLM takes token ids too")
        path = find_model(model)
        if path.is_dir() and not any((path / name).is_file() for name in _FILES):
            raise ConfigError(f"{path} has no tokenizer: none of {', '.join(_FILES)} is there")
        return path

    @property
    def eos(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        end = self._tokenizer.eos_token_id
        return () if end is None else (end,)

    @property
    def vocab_size(self) -> int:
        """Tokens that it knows; a model's vocabulary may be larger."""
        return len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """With the token that begins a text, if this tokenizer puts one there."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the text is not valid Unicode: {error}") from error
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Tokens that it does not know leave no text."""
        if any(token < 0 for token in ids):
            raise ConfigError(f"token ids are whole numbers from 0 up, not {min(ids)}")
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return text

    def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Tokens of a conversation by the model's template, up to where the answer begins.

        Args:
            messages: each with ``role`` and ``content``.

        Raises:
            ConfigError: the model has no template, or it refuses the messages.
        """
        if not self._tokenizer.chat_template:
            raise ConfigError("the model has no chat template; give a prompt instead of messages")
        from jinja2 import TemplateError

        try:
            ids: list[int] = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=False,
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise ConfigError(f"the model's chat template refuses these messages: {error}") from error
        return ids

    def alone(self, token: int, skip_special: bool = True) -> str:
        """:meth:`continuation` of one token, which is decoded once: afterwards it takes a tenth of the time.

        Unknown tokens leave no text, nor special ones that are skipped.
        """
        key = token, skip_special
        if (text := self._alone.get(key)) is None:
            text = self._alone[key] = self.continuation([token], skip_special)
        return text

    def continuation(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of tokens that follow others. (At the start of a text, some tokenizers leave out a space.)"""
        return self.decode([*self._anchor, *ids], skip_special)[self._anchor_length :]

    def _find_anchor(self) -> list[int]:
        """A token that is an ordinary character wherever it stands, to put before others."""
        for token in range(len(self._tokenizer)):
            piece = self._tokenizer.convert_ids_to_tokens(token)
            if piece is None or _BYTE.fullmatch(piece):
                continue
            text = self.decode([token])
            if text.isascii() and text.isalnum() and not text[0].isspace():
                return [token]
        raise ConfigError("the tokenizer has no token that is a letter or a digit")

    def _find_bytes(self) -> frozenset[int]:
        """Tokens that stand for one byte, by which sentencepiece spells what its vocabulary lacks.

        A run of them that is not valid UTF-8 becomes as many replacement characters, the valid part of it too.
        """
        pieces = [f"<0x{byte:02X}>" for byte in range(256)]
        ids = dict(zip(pieces, self._tokenizer.convert_tokens_to_ids(pieces), strict=True))
        found = frozenset(
            token
            for piece, token in ids.items()
            if token is not None and self._tokenizer.convert_ids_to_tokens(token) == piece
        )
        return found if found and self.continuation([ids["<0x41>"]]) == "A" else frozenset()


class IncrementalDecoder:
    """Text of tokens as they come: all pieces together are the :meth:`Tokenizer.continuation` of all tokens.

    Only complete characters are given out. Tokens are held until those are known, and no longer, so that a token takes
    constant time however long the text is.

    Args:
        skip_special: special tokens leave no text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """What is known of the text now, beyond what was given out."""
        alone = self._tokenizer.alone(token, self._skip_special)
        if not alone:
            return ""
        self._held.append(token)
        byte_tokens = self._tokenizer.byte_tokens
        if token in byte_tokens:
            return ""
        text = alone if len(self._held) == 1 else self._text(self._held)
        if byte_tokens or not text.endswith(_UNDECODABLE):
            return self._give_out(len(self._held), text)
        if len(self._held) <= _HELD:
            return ""
        # Bytes that are no text, one after another. A character has at most four, so only the last tokens are open;
        # what is before them is given out, where that cuts no character.
        for count in range(len(self._held) - 4, len(self._held) - 8, -1):
            head, tail = self._held[:count], self._held[count:]
            before = self._text(head)
            if before and before + self._text(tail) == text:
                return self._give_out(count, before)
        return ""

    def flush(self) -> str:
        """What is left at the end; incomplete characters become replacement characters."""
        return self._give_out(len(self._held), self._text(self._held))

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.continuation(tokens, self._skip_special)

    def _give_out(self, count: int, text: str) -> str:
        if text:
            del self._held[:count]
        return text


def _fit_to_gguf(tokenizer: Any, path: Path) -> None:
    """Set what transformers, or some versions of it, do not take from a GGUF file."""
    metadata = GgufHeader.read(path).metadata
    special = {}
    for name, ours in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None and (piece := tokenizer.convert_ids_to_tokens(token)) is not None:
            special[f"{ours}_token"] = piece
    tokenizer.add_special_tokens(special)
    if (add_bos := metadata.get("tokenizer.ggml.add_bos_token")) is not None:
        tokenizer.add_bos_token = add_bos
    if metadata.get("tokenizer.ggml.pre") == "smollm":
        _split_digits(tokenizer)


def _split_digits(tokenizer: Any) -> None:
    """Make each digit a token of its own."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
