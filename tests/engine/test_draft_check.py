"""Draft models that cannot propose tokens for a model are refused before any rank starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from grammar_vocabulary import characters
from shotcast.engine.config import EngineConfig
from shotcast.engine.startup import require_draft, start_facts
from shotcast.errors import ConfigError
from shotcast.models.source import open_checkpoint


def save(folder: Path, tokens: dict[str, int] | None, vocab: int = 130, positions: int = 256) -> str:
    """Save a small model, with a tokenizer that has some tokens more than characters, or without one."""
    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "vocab_size": vocab, "max_position_embeddings": positions}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    if tokens is not None:
        backend = characters()
        backend.add_tokens(list(tokens))
        transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {
        "model": save(tmp_path_factory.mktemp("model"), {}),
        "padded": save(tmp_path_factory.mktemp("padded"), {}, vocab=140),
        "other": save(tmp_path_factory.mktemp("other"), {"more": 1}),
        "short": save(tmp_path_factory.mktemp("short"), {}, positions=64),
        "bare": save(tmp_path_factory.mktemp("bare"), None),
        "bare and padded": save(tmp_path_factory.mktemp("bare_and_padded"), None, vocab=140),
    }
    return made


def check(model: str, draft: str, **options: Any) -> None:
    config = EngineConfig(model, speculative_config={"model": draft, "num_speculative_tokens": 2}, **options)
    require_draft(config, open_checkpoint(model).config)


def test_drafts_that_suit(folders: dict[str, str]) -> None:
    check(folders["model"], folders["model"])
    check(folders["model"], folders["padded"], max_model_len=100)
    check(folders["model"], folders["short"], max_model_len=64)
    check(folders["bare"], folders["bare"])


@pytest.mark.parametrize(
    ("model", "draft", "options", "message"),
    [
        ("model", "other", {}, "must have the tokenizer of"),
        ("model", "bare", {}, "must have the tokenizer of"),
        ("bare", "bare and padded", {}, "must have the tokenizer of"),
        ("model", "short", {}, r"was made for 64 tokens, fewer than max_model_len \(256\)"),
        ("model", "short", {"max_model_len": 65}, r"fewer than max_model_len \(65\)"),
        ("model", "model", {"tensor_parallel": 131}, "130 words cannot be divided between 131 ranks"),
    ],
)
def test_drafts_that_do_not_suit(
    folders: dict[str, str], model: str, draft: str, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(folders[model], folders[draft], **options)


def test_ranks_of_a_job_compare_the_files_of_the_draft(folders: dict[str, str]) -> None:
    """Its path may differ from host to host."""
    config = EngineConfig(folders["model"], device="cpu")
    found = {}
    for name in ("model", "other"):
        options = {"model": folders[name], "num_speculative_tokens": 2}
        found[name] = start_facts(replace(config, speculative_config=options))
    differ = {fact for fact, value in found["model"].items() if found["other"][fact] != value}
    assert differ == {"model.safetensors of the draft model"}
    assert "model.safetensors of the draft model" not in start_facts(config)
