"""Likelihoods of texts over HTTP, as evaluation harnesses ask for them, compared with Transformers."""

from __future__ import annotations

import asyncio
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from shotcast.engine.async_llm import AsyncLLM
from shotcast.server.config import ServerConfig
from shotcast.server.main import serve

pytestmark = [pytest.mark.long, pytest.mark.timing]

WORDS = ["<unk>", "<s>", "</s>", *string.ascii_letters]
TOLERANCE = 1e-4
"""Log-probabilities in float32 differ by as much, with the order of summation."""
TEXTS = ["a b c d e", " ".join(string.ascii_letters * 2), "z", " ".join(string.ascii_letters[:41]), "a b c d f g"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("likelihoods")
    backend = Tokenizer(models.WordLevel({word: token for token, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
        eos_token_id=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def ask(folder: Path, questions: Callable[[openai.OpenAI], Any], **options: Any) -> Any:
    """Return what ``questions`` returns, which gets a client of a server in this process."""
    llm = AsyncLLM(folder, device="cpu", max_model_len=256, max_num_batched_tokens=40, max_num_seqs=4, **options)

    async def main() -> Any:
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        stop = asyncio.Event()
        config = ServerConfig(port=0, served_model_name="tiny")
        serving = asyncio.create_task(serve(llm, config, port.set_result, stop))
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{await port}/v1", api_key="none", max_retries=0, timeout=300)
        try:
            return await asyncio.to_thread(questions, client)
        finally:
            stop.set()
            await serving

    return asyncio.run(main())


@pytest.fixture(scope="module")
def expected(folder: Path) -> Iterator[list[torch.Tensor]]:
    """Log-probabilities of every token after each token of the texts."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    tokens = [torch.tensor([[WORDS.index(word) for word in text.split()]]) for text in TEXTS]
    with torch.inference_mode():
        yield [model(each).logits[0].log_softmax(-1) for each in tokens]


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.full)])
def test_likelihoods_are_those_of_transformers(
    folder: Path, expected: list[torch.Tensor], tensor: int, stages: int
) -> None:
    """Requests like those of lm-eval, twice, so that all prompts are known to the cache."""

    def questions(client: openai.OpenAI) -> list[Any]:
        options: dict[str, Any] = {"model": "tiny", "prompt": TEXTS, "temperature": 0, "echo": True, "logprobs": 2}
        extra = {"prompt_logprobs": 1}
        return [client.completions.create(**options, max_tokens=tokens, extra_body=extra) for tokens in (1, 0, 0)]

    for number, answer in enumerate(ask(folder, questions, tensor_parallel=tensor, pipeline_parallel=stages)):
        assert len(answer.choices) == len(TEXTS)
        for choice, text, rows in zip(answer.choices, TEXTS, expected, strict=True):
            words = text.split()
            assert choice.text.startswith(text)
            assert (choice.text == text) == (number > 0 or choice.finish_reason == "stop")
            said = choice.logprobs
            assert [word.strip() for word in said.tokens[: len(words)]] == words
            assert said.token_logprobs[0] is said.top_logprobs[0] is None
            later = [row[WORDS.index(word)].item() for row, word in zip(rows, words[1:], strict=False)]
            assert said.token_logprobs[1 : len(words)] == pytest.approx(later, abs=TOLERANCE)
            if number:
                assert len(said.tokens) == len(words)
            for top, row in zip(said.top_logprobs[1 : len(words)], rows, strict=False):
                best = row.topk(2).values.tolist()
                assert sorted(top.values(), reverse=True)[:2] == pytest.approx(best, abs=TOLERANCE)
            entries = choice.prompt_logprobs
            assert entries[0] is None
            for entry, row, word in zip(entries[1:], rows, words[1:], strict=False):
                token = WORDS.index(word)
                chosen = entry[str(token)]
                assert chosen["logprob"] == pytest.approx(row[token].item(), abs=TOLERANCE)
                assert chosen["decoded_token"].strip() == word
                assert len(entry) == (1 if chosen["rank"] == 1 else 2)
