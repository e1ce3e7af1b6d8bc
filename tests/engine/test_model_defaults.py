"""Facts that a model's files hold beside its weights: the end tokens of its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from test_tokenizer import byte_level
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from shotcast.engine.llm import LLM
from shotcast.engine.sampling_params import SamplingParams
from shotcast.errors import ConfigError
from shotcast.models.generation_config import read_sampling_defaults
from shotcast.server.request_body import ChatBody, CompletionBody, parse

PROMPT = [5, 6, 7]
VOCAB = 288
DEFAULTS = {
    "do_sample": True,
    "temperature": 0.0,
    "top_k": -1,
    "top_p": None,
    "repetition_penalty": 0.2,
    "max_new_tokens": 6,
    "eos_token_id": [2],
    "transformers_version": "5.0",
}


def greedy_tokens(model: transformers.LlamaForCausalLM, count: int, penalty: float = 1.0) -> list[int]:
    """Return the likeliest continuation of PROMPT, past all end tokens."""
    context = torch.tensor([PROMPT])
    with torch.inference_mode():
        for _ in range(count):
            scores = RepetitionPenaltyLogitsProcessor(penalty)(context, model(context).logits[:, -1])
            context = torch.cat((context, scores.argmax(1, keepdim=True)), dim=1)
    return context[0, len(PROMPT) :].tolist()


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
    (folder / "generation_config.json").write_text(json.dumps(DEFAULTS))
    return continuation


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    folder = tmp_path_factory.mktemp("model")
    return folder, save_model(folder)


@pytest.fixture(scope="module")
def llm(saved: tuple[Path, list[int]]) -> Iterator[LLM]:
    with LLM(saved[0], device="cpu", max_model_len=64, max_num_seqs=4) as llm:
        yield llm


def test_the_end_token_of_the_tokenizer_ends_a_text(llm: LLM, saved: tuple[Path, list[int]]) -> None:
    continuation = saved[1]
    assert continuation[-1] not in llm.model.eos
    params = SamplingParams(temperature=0.0, max_tokens=10)
    (output,) = llm.generate([PROMPT], params)
    assert (output.tokens, output.finish_reason, output.stop_reason) == (continuation, "stop", None)
    (output,) = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True))
    assert (len(output.tokens), output.finish_reason) == (10, "length")


def test_a_request_without_parameters_samples_as_the_model_says(llm: LLM, saved: tuple[Path, list[int]]) -> None:
    assert llm.default_params() == SamplingParams(temperature=0.0, repetition_penalty=0.2, max_tokens=6)
    model = transformers.LlamaForCausalLM.from_pretrained(saved[0]).eval()
    wanted = greedy_tokens(model, 6, penalty=0.2)
    ends = [number for number, token in enumerate(wanted) if token in (2, saved[1][-1])]
    (output,) = llm.generate([PROMPT])
    assert output.tokens == wanted[: ends[0] + 1 if ends else 6]
    assert wanted != greedy_tokens(model, 6)
    *_, streamed = llm.stream(PROMPT)
    assert streamed.tokens == output.tokens
    (own,) = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=2))
    assert own.tokens == greedy_tokens(model, 2), "defaults were mixed into parameters that were given"


def test_where_the_defaults_come_from(saved: tuple[Path, list[int]], tmp_path: Path) -> None:
    found = {"temperature": 0.0, "top_k": 0, "repetition_penalty": 0.2, "max_tokens": 6}
    assert read_sampling_defaults(str(saved[0]), "auto") == found
    assert read_sampling_defaults(str(saved[0]), "none") == {}
    assert read_sampling_defaults("random:llama-3.1-8b", "auto") == {}
    (tmp_path / "generation_config.json").write_text('{"min_p": 0.1, "top_p": 0.8}')
    assert read_sampling_defaults(str(saved[0]), str(tmp_path)) == {"min_p": 0.1, "top_p": 0.8}
    with pytest.raises(ConfigError, match="must be auto, none or a folder that has generation_config"):
        read_sampling_defaults(str(saved[0]), str(tmp_path / "absent"))
    (tmp_path / "generation_config.json").unlink()
    assert read_sampling_defaults(str(saved[0]), "none") == {}


@pytest.mark.parametrize(
    "said", ['{"top_p": 2}', '{"temperature": "hot"}', '{"top_k": 1.5}', '{"max_new_tokens": 0}', "[]"]
)
def test_defaults_that_make_no_sense_are_refused(saved: tuple[Path, list[int]], tmp_path: Path, said: str) -> None:
    (tmp_path / "generation_config.json").write_text(said)
    with pytest.raises(ConfigError, match="generation_config"):
        LLM(saved[0], device="cpu", generation_config=str(tmp_path))


def test_a_request_to_the_server_takes_defaults_where_it_says_nothing() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1, "max_tokens": 9}
    silent = parse(CompletionBody, b'{"model": "m", "prompt": "x"}').sampling(defaults)
    assert silent == SamplingParams(**defaults)
    said = parse(CompletionBody, b'{"model": "m", "prompt": "x", "temperature": 1, "top_k": -1, "top_p": null}')
    assert said.sampling(defaults) == SamplingParams(**{**defaults, "temperature": 1, "top_k": 0})
    own = parse(ChatBody, b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "repetition_penalty": 1.5}')
    assert own.sampling({}).repetition_penalty == 1.5
