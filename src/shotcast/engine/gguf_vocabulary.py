"""The vocabulary of SmolLM's GGUF files, which takes no transformers to read and to use.

That library takes a second to import, and as long again to read such a file.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from shotcast.models.gguf_header import GgufHeader

_NORMAL, _CONTROL = 1, 3
"""Types of tokens."""


def is_smollm(path: Path) -> bool:
    """Return whether a GGUF file has a vocabulary of SmolLM's kind: pieces of bytes, and digits apart."""
    metadata = GgufHeader.read(path).metadata
    kind = [metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre", "add_bos_token")]
    types = metadata.get("tokenizer.ggml.token_type") or [None]
    return kind == ["gpt2", "smollm", False] and {_NORMAL, _CONTROL}.issuperset(types)


class GgufVocabulary:
    """A vocabulary of SmolLM's kind, as a tokenizer of transformers is used. That library has what is not defined here,
    such as chat templates.

    Args:
        path: a file that :func:`is_smollm`.
    """

    def __init__(self, path: Path):
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

        metadata = GgufHeader.read(path, with_strings=True).metadata
        tokens, types = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        vocabulary = {token: number for number, token in enumerate(tokens)}
        made = Tokenizer(models.BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix=""))
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
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
            for key, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad"))
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
