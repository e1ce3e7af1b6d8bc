"""A model's tokenizer: text to tokens and back."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from shotcast.errors import ConfigError, shorten
from shotcast.models.gguf_header import GgufHeader
from shotcast.models.source import RANDOM, find_model, open_checkpoint

_NORMAL, _CONTROL = 1, 3
"""Token types in GGUF files."""
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""Special tokens of GGUF files, by their transformers names."""


def is_smollm(path: Path) -> bool:
    """Return whether a GGUF file has a vocabulary of SmolLM's kind: byte pieces, with each digit separate."""
    metadata = GgufHeader.read(path).metadata
    kind = [metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre", "add_bos_token")]
    types = metadata.get("tokenizer.ggml.token_type") or [None]
    return kind == ["gpt2", "smollm", False] and {_NORMAL, _CONTROL}.issuperset(types)


class GgufVocabulary:
    """The vocabulary in a file that :func:`is_smollm`, with the interface of a transformers tokenizer.

    Anything not defined here, such as chat templates, comes from that library, which takes a second to import and
    another to read such a file.
    """

    def __init__(self, path: Path):
        from tokenizers import AddedToken, Tokenizer, decoders, models, processors

        metadata = GgufHeader.read(path, with_strings=True).metadata
        tokens, types = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        vocabulary = {token: number for number, token in enumerate(tokens)}
        made = Tokenizer(models.BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix=""))
        _split_digits(made)
        made.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens(
            [
                AddedToken(token, normalized=False, special=True)
                for token, kind in zip(tokens, types, strict=True)
                if kind == _CONTROL
            ]
        )
        self.backend_tokenizer = made
        self.chat_template: str | None = metadata.get("tokenizer.chat_template")
        self._special = {
            f"{name}_token": tokens[number]
            for key, name in _SPECIAL.items()
            if (number := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None
        }
        self.eos_token_id: int | None = metadata.get("tokenizer.ggml.eos_token_id")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_transformers, name)

    @cached_property
    def _of_transformers(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=self.backend_tokenizer, chat_template=self.chat_template, **self._special
        )

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    def get_chat_template(self, tools: object = None) -> str | None:
        return self.chat_template

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token: int) -> str | None:
        return self.backend_tokenizer.id_to_token(token)

    def convert_tokens_to_ids(self, pieces: list[str]) -> list[int | None]:
        return [self.backend_tokenizer.token_to_id(piece) for piece in pieces]


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""A folder with one of these files has a tokenizer."""

_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


class Tokenizer:
    """A model's tokenizer. Most are read by transformers, which takes seconds."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._token_texts: dict[tuple[int, bool], str] = {}
        self._anchor = self._find_anchor()
        self._anchor_length = len(self.decode(self._anchor))
        self.byte_tokens: dict[int, bytes] = {}  # of the tokens that stand for one byte each
        self.byte_tokens = self._find_byte_tokens()

    @classmethod
    def load(cls, model: str) -> Tokenizer:
        """Load the tokenizer of a model, named as in :func:`shotcast.models.source.open_checkpoint`.

        Nothing is downloaded.

        Raises ConfigError if the model has no tokenizer, or it cannot be read.
        """
        path = cls.find(model)
        if path.is_file() and is_smollm(path):
            return cls(GgufVocabulary(path))
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        try:
            folder, options = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
            read = AutoTokenizer if path.is_dir() or _has_a_class(path) else PreTrainedTokenizerFast
            tokenizer = read.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
        except Exception as error:  # the library raises errors of any type for files that it cannot read
            raise ConfigError(f"the tokenizer of {path} cannot be read: {error}") from error
        if not path.is_dir():
            _apply_gguf_metadata(tokenizer, path)
        return cls(tokenizer)

    @staticmethod
    def find(model: str) -> Path:
        """Find the folder or GGUF file with a model's tokenizer. Raises ConfigError if the model has no tokenizer, or
        the folder has no model. Raises UnsupportedError if the kind of model is not implemented.
        """
        if model.startswith(RANDOM):
            raise ConfigError(f"{model} has no tokenizer, since its weights are random; LLM takes token ids too")
        path = find_model(model)
        if path.is_dir() and not any((path / name).is_file() for name in _TOKENIZER_FILES):
            open_checkpoint(model).close()  # a folder that has no model either is refused for that
            raise ConfigError(f"{path} has no tokenizer: it has none of {', '.join(_TOKENIZER_FILES)}")
        return path

    @property
    def eos(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        end = self._tokenizer.eos_token_id
        return () if end is None else (end,)

    @property
    def chat_template(self) -> str:
        """The source of the chat template for conversations with tools; "" if there is none."""
        if not self._tokenizer.chat_template:
            return ""
        template: str = self._tokenizer.get_chat_template(tools=[{}])
        return template

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Tokens that are not spelled by any text, by name."""
        added = self._tokenizer.added_tokens_decoder.items()
        return {str(token): number for number, token in added if token.special}

    def vocabulary(self) -> dict[str, int]:
        """Return all tokens by their spelling, including special ones."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    def to_json(self) -> str:
        """Return the tokenizer in the JSON format of Hugging Face's tokenizers. Raises ConfigError for other kinds."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"{type(self._tokenizer).__name__} is no tokenizer of Hugging Face's fast kind")
        text: str = backend.to_str()
        return text

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the tokens of a text, including a begin-of-text token if this tokenizer adds one.

        Without ``add_special``, no token is added.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the text is not valid Unicode: {error}") from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special)
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of tokens. Unknown tokens have no text."""
        if any(token < 0 for token in ids):
            raise ConfigError(f"token ids must be whole numbers of at least 0, not {min(ids)}")
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Return the tokens of a conversation in the model's chat template, up to where the answer begins. Raises
        ConfigError if the model has no template, or if it rejects the messages or the variables.

        Args:
            messages: each with ``role`` and ``content``.
            variables: further template variables by name, such as ``enable_thinking`` for Qwen3.
            add_generation_prompt: end with the tokens that begin an answer.
            tools: the functions that the answer may call, in OpenAI's format.
        """
        if not self._tokenizer.chat_template:
            raise ConfigError("the model has no chat template; give a prompt instead of messages")
        if not all(hasattr(message, "keys") for message in messages):
            example = '[{"role": "user", "content": "Hello"}]'
            raise ConfigError(f"messages are a list such as {example}; got {shorten(messages)}")
        variables = variables or {}
        self.check_template_variables(variables)
        try:
            ids: list[int] = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=False,
                tools=None if tools is None else [dict(tool) for tool in tools],
                **variables,
            )
        except Exception as error:  # a template is a program, here with variables of any type
            raise ConfigError(f"the model's chat template refuses these messages: {error}") from error
        return ids

    def check_template_variables(self, names: Iterable[str]) -> None:
        """Raise ConfigError if a name is an option of transformers' ``apply_chat_template``, such as ``chat_template``
        or ``tokenize``, rather than a template variable."""
        options = {"messages", *inspect.signature(self._tokenizer.apply_chat_template).parameters}
        for name in names:
            if name in options:
                raise ConfigError(f"chat templates have no variable {name}: the name is reserved")

    def decode_token(self, token: int, skip_special: bool = True) -> str:
        """Return :meth:`decode_continuation` of one token. The text is cached, so later calls take a tenth of the time.

        Unknown tokens and skipped special tokens have no text.
        """
        key = token, skip_special
        if (text := self._token_texts.get(key)) is None:
            text = self._token_texts[key] = self.decode_continuation([token], skip_special)
        return text

    def decode_continuation(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of tokens that follow others. (Some tokenizers leave out a space at the start of a text.)

        Runs of byte tokens are decoded as UTF-8 with replacement characters for invalid parts. (The library replaces
        every byte of a run that is invalid anywhere, so no character would be known before the end of its run.)
        """
        if self.byte_tokens.keys().isdisjoint(ids):
            return self._decode_after_anchor(ids, skip_special)
        texts = []
        run = bytearray()
        others: list[int] = []
        for token in ids:
            if (value := self.byte_tokens.get(token)) is not None:
                if others:
                    texts.append(self._decode_after_anchor(others, skip_special))
                    others = []
                run += value
            elif self.decode_token(token, skip_special):  # tokens without a text do not end a run
                texts.append(run.decode("utf-8", "replace"))
                run.clear()
                others.append(token)
        texts.append(self._decode_after_anchor(others, skip_special) if others else run.decode("utf-8", "replace"))
        return "".join(texts)

    def _decode_after_anchor(self, ids: Sequence[int], skip_special: bool) -> str:
        return self.decode([*self._anchor, *ids], skip_special)[self._anchor_length :]

    def _find_anchor(self) -> list[int]:
        """Find a token that is an ordinary character in any context, to put before other tokens."""
        for token in range(len(self._tokenizer)):
            piece = self._tokenizer.convert_ids_to_tokens(token)
            if piece is None or _BYTE_PIECE.fullmatch(piece):
                continue
            text = self.decode([token])
            if text.isascii() and text.isalnum() and not text[0].isspace():
                return [token]
        raise ConfigError("the tokenizer has no token that is a letter or a digit")

    def _find_byte_tokens(self) -> dict[int, bytes]:
        """Find the tokens for single bytes, with which sentencepiece spells text outside its vocabulary."""
        pieces = [f"<0x{byte:02X}>" for byte in range(256)]
        ids = self._tokenizer.convert_tokens_to_ids(pieces)
        tokens = {
            token: bytes([byte])
            for byte, (piece, token) in enumerate(zip(pieces, ids, strict=True))
            if token is not None and self._tokenizer.convert_ids_to_tokens(token) == piece
        }
        return tokens if tokens and self._decode_after_anchor([ids[0x41]], True) == "A" else {}


def _has_a_class(path: Path) -> bool:
    """Return whether a GGUF vocabulary needs more than transformers' common class: a first token, or pieces.

    To find a specific class, transformers also reads the file for its configuration, which takes seconds.
    """
    metadata = GgufHeader.read(path).metadata
    kind, begins = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.add_bos_token", True)
    return kind != "gpt2" or bool(begins)


def _apply_gguf_metadata(tokenizer: Any, path: Path) -> None:
    """Set the properties of a GGUF file that some or all versions of transformers ignore."""
    metadata = GgufHeader.read(path).metadata
    special = {}
    for gguf_name, name in _SPECIAL.items():
        token = metadata.get(f"tokenizer.ggml.{gguf_name}_token_id")
        if token is not None and (piece := tokenizer.convert_ids_to_tokens(token)) is not None:
            special[f"{name}_token"] = piece
    tokenizer.add_special_tokens(special)
    if (add_bos := metadata.get("tokenizer.ggml.add_bos_token")) is not None:
        tokenizer.add_bos_token = add_bos
    if metadata.get("tokenizer.ggml.pre") == "smollm":
        _split_digits(tokenizer.backend_tokenizer)


def _split_digits(tokenizer: Any) -> None:
    from tokenizers import pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
