"""Facts that a model's files hold beside its weights: the end tokens of its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from test_tokenizer import byte_level

from shotcast.engine.llm import LLM
from shotcast.engine.sampling_params import SamplingParams

PROMPT = [5, 6, 7]
VOCAB = 288


def greedy_tokens(model: transformers.LlamaForCausalLM, count: int) -> list[int]:
    """Return the likeliest continuation of PROMPT, past all end tokens."""
    tokens = list(PROMPT)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def save_model(folder: Path) -> list[int]:
    """Save a model whose tokenizer alone says that the third token of PROMPT's continuation ends a text.

    Returns:
        The continuation up to there.
    """
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.5,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    continuation = greedy_tokens(model, 3)
    assert continuation[2] not in (2, *continuation[:2])
    backend = byte_level()
    piece = backend.id_to_token(continuation[2])
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=piece).save_pretrained(folder)
    return continuation


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    folder = tmp_path_factory.mktemp("model")
    return folder, save_model(folder)


@pytest.fixture(scope="module")
def llm(saved: tuple[Path, list[int]]) -> Iterator[LLM]:
    with LLM(saved[0], device="cpu", max_model_len=64, max_sequences=4) as llm:
        yield llm


def test_the_end_token_of_the_tokenizer_ends_a_text(llm: LLM, saved: tuple[Path, list[int]]) -> None:
    continuation = saved[1]
    assert continuation[-1] not in llm.model.eos
    params = SamplingParams(temperature=0.0, max_tokens=10)
    (output,) = llm.generate([PROMPT], params)
    assert (output.tokens, output.finish_reason, output.stop_reason) == (continuation, "stop", None)
    (output,) = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True))
    assert (len(output.tokens), output.finish_reason) == (10, "length")
