"""Constrained outputs and tools of a real model on real ranks over HTTP, through its own chat template."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import torch
import transformers

from grammar_vocabulary import CHARACTERS, SPECIAL, characters
from shotcast.engine.async_llm import AsyncLLM
from shotcast.engine.grammar import Grammar
from shotcast.engine.llm import LLM
from shotcast.engine.sampling_params import SamplingParams
from shotcast.errors import ConfigError
from shotcast.server.config import ServerConfig
from shotcast.server.main import serve

pytest.importorskip("llguidance")
pytestmark = [pytest.mark.long, pytest.mark.timing]

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}<1>{{ message.role }}:"
    "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<2>{% endfor %}"
)
ARGUMENTS = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "CET"]}, "hour": {"type": "integer", "minimum": 0, "maximum": 23}},
    "required": ["zone", "hour"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "time", "parameters": ARGUMENTS}}]
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("constrained")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=characters(), eos_token="<2>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS) + 9,  # more columns than tokens
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
    llm = AsyncLLM(folder, device="cpu", max_model_len=1024, max_num_batched_tokens=64, max_num_seqs=4, **options)

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


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2)])
def test_tools_and_schemas_of_a_model_on_two_ranks(folder: Path, tensor: int, stages: int) -> None:
    def questions(client: openai.OpenAI) -> None:
        def chat(**changes: Any) -> Any:
            return client.chat.completions.create(
                **{"model": "tiny", "messages": HELLO, "seed": 1, "max_tokens": 200} | changes
            )

        form = {"type": "json_schema", "json_schema": {"name": "time", "schema": ARGUMENTS, "strict": True}}
        (plain,) = chat(response_format=form).choices
        assert plain.finish_reason == "stop"
        jsonschema.validate(json.loads(plain.message.content), ARGUMENTS)

        tools = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        (choice,) = chat(**tools).choices
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, call.function.name) == ("tool_calls", "time")
        jsonschema.validate(json.loads(call.function.arguments), ARGUMENTS)
        streamed = "".join(
            part.function.arguments
            for chunk in chat(**tools, stream=True)
            for part in chunk.choices[0].delta.tool_calls or ()
        )
        assert streamed == call.function.arguments

        result = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
        answer = chat(messages=[*HELLO, choice.message, result], tools=TOOLS, max_tokens=3)
        assert answer.usage.completion_tokens > 0

        several = client.completions.create(
            model="tiny",
            prompt=["a", "b", "c"],
            n=2,
            max_tokens=30,
            temperature=2.0,
            extra_body={"structured_outputs": {"regex": "[a-f]{5,9}"}},
        )
        assert all(re.fullmatch("[a-f]{5,9}", one.text) for one in several.choices)
        assert len({one.text for one in several.choices}) > 1
        with pytest.raises(openai.BadRequestError, match="cannot be compiled"):
            chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "x"}}})

    ask(folder, questions, tensor_parallel=tensor, pipeline_parallel=stages)


def test_constraints_from_python(folder: Path) -> None:
    with LLM(folder, device="cpu", max_model_len=256) as llm:
        params = [
            SamplingParams(grammar=Grammar.json_schema(ARGUMENTS), max_tokens=100),
            SamplingParams(grammar=Grammar.choice(["left", "right"]), max_tokens=100, temperature=3.0),
            SamplingParams(allowed_token_ids=[40, 41], max_tokens=8),
            SamplingParams(min_tokens=6, max_tokens=9, logit_bias={2: 100}, temperature=0),
        ]
        schema, choice, allowed, long = llm.generate(["x"] * 4, params)
        jsonschema.validate(json.loads(schema.text), ARGUMENTS)
        assert choice.text in ("left", "right")
        assert set(allowed.tokens) <= {40, 41}
        assert long.tokens[6:] == [2]
        assert 2 not in long.tokens[:6]
        vocab = llm.model.vocab
        for wrong, message in (
            (SamplingParams(logit_bias={vocab: 1}), f"logit_bias holds {vocab}; its token ids must be from 0 to"),
            (SamplingParams(allowed_token_ids=[vocab]), f"allowed_token_ids holds {vocab}"),
            (SamplingParams(grammar=Grammar.regex("é")), "no tokens of the model spell"),
        ):
            with pytest.raises(ConfigError, match=message):
                llm.generate("x", wrong)
