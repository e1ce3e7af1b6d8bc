"""LangChain and an evaluation harness, as their users run them, against a server of a model.

Their packages are no part of what the tests install: ``pip install langchain-openai 'lm-eval[api]'``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from pydantic import BaseModel, Field

from grammar_vocabulary import CHARACTERS, SPECIAL, characters

pytest.importorskip("llguidance")
pytestmark = [pytest.mark.full, pytest.mark.timing]

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}<1>{{ message.role }}:"
    "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<2>{% endfor %}"
)
TASKS = {"choices": "multiple_choice", "texts": "loglikelihood_rolling", "answers": "generate_until"}
DOCUMENTS = [
    {"question": f"{a} + {b} =", "options": [str(a + b), str(a * b + 1), "none"], "answer": 0}
    for a in range(2, 9, 2)
    for b in range(3, 10, 2)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clients") / "tiny"
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=characters(), eos_token="<2>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a model on two CPU ranks by the command line. Yield the address."""
    command = [sys.executable, "-m", "shotcast", "serve", str(folder), "--served-model-name", "tiny", "--port", "0"]
    options = ["--device", "cpu", "--tensor-parallel", "2", "--max-model-len", "2048"]
    with subprocess.Popen([*command, *options], stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if found := re.search(r"http://\S+/v1", line):
                    break
            else:
                raise AssertionError("".join(lines))
            yield found[0]
        finally:
            process.terminate()
            process.communicate(timeout=300)


class Meeting(BaseModel):
    """A meeting."""

    zone: Literal["UTC", "CET"]
    hour: int = Field(ge=0, le=23)


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Tell the weather of a city."""
    return f"sunny in {city}"


def test_langchain(folder: Path) -> None:
    langchain = pytest.importorskip("langchain_openai")
    messages = pytest.importorskip("langchain_core.messages")
    with served(folder) as url:
        chat = langchain.ChatOpenAI(model="tiny", base_url=url, api_key="none", seed=1, max_tokens=200, max_retries=0)

        plain = chat.invoke("hi")
        assert plain.response_metadata["token_usage"]["completion_tokens"] > 0
        assert "".join(chunk.text for chunk in chat.stream("hi")) == plain.text

        for method in ("json_schema", "function_calling"):
            structured = chat.with_structured_output(Meeting, method=method)
            meeting = structured.invoke("when?")
            assert isinstance(meeting, Meeting)
            assert list(structured.stream("when?"))[-1] == meeting
        mode = chat.with_structured_output(None, method="json_mode").bind(max_tokens=400)
        assert json.loads(json.dumps(mode.invoke("a JSON object"))) is not None

        tools = chat.bind_tools([weather, Meeting], tool_choice="any")
        one = tools.bind(parallel_tool_calls=False).invoke("the weather?")
        (call,) = one.tool_calls
        assert call["name"] in ("weather", "Meeting")
        assert one.response_metadata["finish_reason"] == "tool_calls"
        streamed: Any = None
        for chunk in tools.bind(parallel_tool_calls=False).stream("the weather?"):
            streamed = chunk if streamed is None else streamed + chunk
        assert [(each["name"], each["args"]) for each in streamed.tool_calls] == [(call["name"], call["args"])]

        named = chat.bind_tools([weather], tool_choice="weather").invoke("the weather?")
        assert {each["name"] for each in named.tool_calls} == {"weather"}
        assert all(each["args"]["city"] in ("Oslo", "Rome") for each in named.tool_calls)
        results = [messages.ToolMessage(weather(**each["args"]), tool_call_id=each["id"]) for each in named.tool_calls]
        answer = chat.bind_tools([weather]).invoke([messages.HumanMessage("the weather?"), named, *results])
        assert answer.response_metadata["token_usage"]["completion_tokens"] > 0


def write_tasks(to: Path) -> list[dict[str, Any]]:
    """Write documents, and return a task of the harness for each kind of request that it makes."""
    data = to / "documents.json"
    data.write_text(json.dumps(DOCUMENTS))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "num_fewshot": 0,
    }
    special: dict[str, dict[str, Any]] = {
        "choices": {
            "doc_to_choice": "{{options}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "texts": {
            "doc_to_text": "",
            "doc_to_target": "{{question}} {{options[0]}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        "answers": {
            "doc_to_target": "{{options[0]}}",
            "generation_kwargs": {"until": ["~"], "max_gen_toks": 24, "do_sample": False, "temperature": 0.0},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    return [{"task": name, "output_type": TASKS[name], **common, **special[name]} for name in TASKS]


def test_an_evaluation_harness(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    harness = pytest.importorskip("lm_eval")
    tasks = write_tasks(tmp_path)

    def evaluate(model: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return harness.simple_evaluate(
            model=model, model_args=arguments, tasks=tasks, batch_size=4, log_samples=True, bootstrap_iters=0
        )

    with served(folder) as url:
        ours = evaluate(
            "local-completions",
            {
                "model": "tiny",
                "base_url": f"{url}/completions",
                "tokenizer": str(folder),
                "tokenizer_backend": "huggingface",
                "num_concurrent": 4,
                "max_length": 2048,
                "tokenized_requests": True,
            },
        )
    theirs = evaluate("hf", {"pretrained": str(folder), "device": "cpu", "dtype": "float32"})
    for task in TASKS:
        mine, other = ours["results"][task], theirs["results"][task]
        figures = [name for name, value in other.items() if isinstance(value, float) and "stderr" not in name]
        assert figures
        expected = {name: other[name] for name in figures}
        assert {name: mine[name] for name in figures} == pytest.approx(expected, rel=1e-4)
        for one, another in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            if task == "answers":
                assert one["resps"] == another["resps"]
            else:
                assert _numbers(one["resps"]) == pytest.approx(_numbers(another["resps"]), abs=1e-3)


def _numbers(responses: Any) -> list[float]:
    if isinstance(responses, list | tuple):
        return [number for each in responses for number in _numbers(each)]
    return [float(responses)]
