"""Fuzzed bodies, from grammars and by mutation, for every POST endpoint of a real server."""

from __future__ import annotations

import copy
import datetime
import http.client
import importlib.metadata
import json
import os
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import Live, live, loop_lag, max_lag_s
from scripted_engine import NOTHING, ScriptedEngine

from shotcast.hardware.detect import detect
from shotcast.server.config import ServerConfig
from shotcast.server.request_body import UNSUPPORTED, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

pytestmark = pytest.mark.timing

PATHS = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}

MAX_BODY_BYTES = ServerConfig().max_body_bytes

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
CALLED = {"name": "add", "arguments": '{"a": 1}'}

VALID: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"model": "letters", "prompt": "hello"},
        {"model": "letters", "prompt": ["a", "b"], "n": 2, "echo": True, "stream": True},
        {"model": "letters", "prompt": [104, 105], "logprobs": 3, "seed": -5, "stop": ["c", "de"], "max_tokens": 7},
        {"model": "letters", "prompt": ["ab", "c"], "echo": True, "logprobs": 1, "max_tokens": 0, "prompt_logprobs": 2},
        {"model": "letters", "prompt": "a", "structured_outputs": {"choice": ["x", "yz"]}, "logit_bias": {"97": -5.5}},
        {"model": "letters", "prompt": "a", "structured_outputs": {"json": NUMBERS}, "min_tokens": 1, "max_tokens": 9},
        {"model": "letters", "prompt": "a", "structured_outputs": {"regex": "a[bc]{2,5}"}, "allowed_token_ids": [97]},
        {"model": "letters", "prompt": [[1, 2], [3]], "stop_token_ids": [99], "best_of": 1, "top_k": 5, "min_p": 0.5},
    ],
    "/v1/chat/completions": [
        {"model": "letters", "messages": [{"role": "user", "content": "hello"}]},
        {
            "model": "letters",
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]},
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 2,
        },
        {
            "model": "letters",
            "messages": [{"role": "user", "content": "hello", "tool_calls": []}],
            "max_completion_tokens": 9,
            "temperature": 0.5,
            "top_p": 0.9,
            "presence_penalty": -1,
            "frequency_penalty": 1.5,
            "ignore_eos": True,
            "chat_template_kwargs": {"enable_thinking": False},
            "truncate_prompt_tokens": 20,
            "metadata": {"run": "7"},
            "tools": [],
            "response_format": {"type": "text"},
            "user": "me",
        },
        {
            "model": "letters",
            "messages": [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": CALLED}]},
                {"role": "tool", "tool_call_id": "a", "content": "5"},
            ],
            "tools": [{"type": "function", "function": {"name": "add", "parameters": NUMBERS, "strict": True}}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "stream": True,
        },
        {
            "model": "letters",
            "messages": [{"role": "user", "content": "hello"}],
            "tools": [{"type": "function", "function": {"name": "add", "description": "adds"}}],
            "tool_choice": {"type": "function", "function": {"name": "add"}},
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBERS, "strict": True}},
        },
    ],
    "/tokenize": [
        {"model": "letters", "prompt": "hello", "add_special_tokens": False, "return_token_strs": True},
        {"messages": [{"role": "user", "content": "hello"}], "add_generation_prompt": False},
    ],
    "/detokenize": [{"model": "letters", "tokens": [104, 105]}],
}

ODD: list[Any] = [
    None, True, False, 0, -0.0, -1, 1, 2, 5, 128, 129, 1.5, 1e308, -1e308, 2**31, 2**63, 2**64, -(2**63), 10**400,
    float("nan"), float("inf"), "", "a", NOTHING, "letters", "\x00", "é😀中", "\u2028", "x" * 300, [], [[]], [""],
    [None], {}, {"type": "text"}, {"role": "user", "content": "x"}, [1, "a"], ["a", 1], [[1], "a"], [-1], [2**40],
    [0xD800], {"include_usage": 1}, [{"type": "text", "text": 5}],
]  # fmt: skip


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from paths_in(item, (*path, key))


def mutated(chance: random.Random, body: dict[str, Any], names: list[str]) -> bytes:
    """Return a valid body with changed values, keys or bytes."""
    body = copy.deepcopy(body)
    factor = chance.choice((1, 10, 1000, 10_000))  # for one value: a body of several would be too large to send
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
        body.setdefault("model", "letters")
        *parents, key = chance.choice(list(paths_in(body)))
        target = body
        for parent in parents:
            target = target[parent]
        action = chance.randrange(6)
        if action == 0 and isinstance(target, dict):
            del target[key]
        elif action == 1:
            body[chance.choice(names)] = copy.deepcopy(chance.choice(ODD))
        elif action == 2 and isinstance(target, list):
            target.extend(copy.deepcopy(target) * factor)
            factor = 1
        elif action == 3 and isinstance(target[key], str):
            target[key] *= 1 + factor
            factor = 1
        else:
            target[key] = copy.deepcopy(chance.choice(ODD))
    raw = bytearray(json.dumps(body, ensure_ascii=chance.random() < 0.5).encode())
    for _ in range(chance.choice((0, 0, 0, 0, 0, 1, 2, 5))):  # most bodies stay JSON
        place = chance.randrange(len(raw) + 1)
        action = chance.randrange(5)
        if action == 0:
            raw[place : place + chance.choice((1, 1, 5, 50))] = b""
        elif action == 1:
            raw[place:place] = chance.randbytes(chance.choice((1, 1, 4)))
        elif action == 2:
            raw[place:place] = raw[place : place + 20] * chance.choice((1, 10, 2000))
        elif action == 3:
            raw[place:place] = chance.choice(
                (b"[", b"{", b'"', b",", b"\\ud800", b"\xed\xa0\x80", b"\xff", b"1" * 5000)
            )
        else:
            raw[place : place + 1] = chance.randbytes(1)
    return bytes(raw[:MAX_BODY_BYTES])  # the server closes the connection of a larger one without reading it


JSON_VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(exclude_categories=[]), max_size=20)
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)


@st.composite
def generated(draw: Callable[..., Any], path: str) -> bytes:
    """Draw a body whose parameters exist, with any JSON values or those of a valid body."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.one_of(st.binary(max_size=60), JSON_VALUES.map(json.dumps).map(str.encode)))
    body = dict(draw(st.sampled_from(VALID[path])))
    names = st.sampled_from([*PATHS[path].model_fields, *UNSUPPORTED])
    values = st.one_of(JSON_VALUES, st.sampled_from(ODD), st.integers(0, 20), st.floats(-2, 2))
    body |= draw(st.dictionaries(names, values, max_size=3))
    return json.dumps(body).encode(errors="surrogatepass")


class Fuzzed:
    """A server, a connection to it that is kept, and what became of the requests."""

    def __init__(self, server: Live):
        self.server = server
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=100)
        self.seeds: set[int] = set()
        self.bodies: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.refused: Counter[str] = Counter()
        self.lags_ms: list[float] = []
        self.measured_again = 0

    def post(self, path: str, raw: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        try:
            self.connection.request("POST", path, raw, {"Content-Type": "application/json"})
            response = self.connection.getresponse()
            return response, response.read()
        except Exception:
            self.connection.close()  # the next request opens it again
            raise

    def check(self, path: str, raw: bytes, kind: str) -> None:
        """Post a body; require a well-formed result or error, and an event loop that goes on."""
        lags = []
        for _ in range(10):  # another process may be the reason, so a long lag is measured again, and the least counts
            with loop_lag(self.server) as lag:
                response, content = self.post(path, raw)
            lags.append(lag.max_s)
            if lag.max_s < max_lag_s() / 4 or (len(lags) > 3 and min(lags) < max_lag_s()):
                break
        self.lags_ms.append(min(lags) * 1e3)
        self.measured_again += len(lags) > 1
        assert min(lags) < max_lag_s(), (lags, raw[:300])
        self.statuses[response.status] += 1
        assert response.status == 200 or 400 <= response.status < 500, (response.status, content, raw)
        if response.status == 200 and response.headers["content-type"].startswith("text/event-stream"):
            *events, done = [line[6:] for line in content.decode().split("\n") if line.startswith("data: ")]
            assert done == "[DONE]", (content, raw)
            assert all("choices" in json.loads(event) for event in events), raw
        elif response.status == 200:
            answer = json.loads(content, parse_constant=refuse)
            if path.startswith("/v1"):
                assert answer["choices"]
                assert answer["usage"]["total_tokens"] > 0
            else:
                assert answer.keys() in ({"prompt"}, {"count", "max_model_len", "tokens", "token_strs"})
        else:
            assert len(content) < 10_000, raw
            error = json.loads(content, parse_constant=refuse)["error"]
            assert error.keys() == {"message", "type", "param", "code"}, content
            assert isinstance(error["message"], str)
            assert error["type"] == ("rate_limit_error" if response.status == 429 else "invalid_request_error")
            known = error["param"] in (*PATHS[path].model_fields, *UNSUPPORTED)
            self.refused[error["param"] if known else "another body"] += 1
        self.bodies[f"{kind} {path}"] += 1

    def record(self, hypothesis_seed: str | None) -> dict[str, Any]:
        """Return the figures of a run: among others how many bodies were refused for each parameter."""
        libraries = "fastapi", "h11", "hypothesis", "pydantic", "starlette", "uvicorn"
        return {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": "sh research/measure.sh benchmarks/data/cpu fuzz",
            "environment": detect().as_json(),
            "libraries": {name: importlib.metadata.version(name) for name in libraries},
            "seeds": {"mutated": sorted(self.seeds), "generated": hypothesis_seed},
            "bodies": dict(self.bodies),
            "total": self.bodies.total(),
            "statuses": dict(sorted(self.statuses.items())),
            "refused_for": dict(self.refused.most_common()),
            "lag_ms": {
                "limit": max_lag_s() * 1e3,
                "median": round(statistics.median(self.lags_ms), 2),
                "worst": round(max(self.lags_ms), 2),
                "bodies_measured_again": self.measured_again,
            },
        }


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.fixture(scope="module")
def fuzzed(request: pytest.FixtureRequest) -> Iterator[Fuzzed]:
    engine = ScriptedEngine()
    engine.length = 3
    engine.tokenizer.chat_template = "tools <tool_call>"
    with live(engine, max_queue=64) as server:
        fuzzed = Fuzzed(server)
        yield fuzzed
        fuzzed.connection.close()
        assert engine.running == 0
    if file := os.environ.get("SERVER_FUZZ_JSON"):
        record = fuzzed.record(request.config.getoption("--hypothesis-seed"))
        Path(file).write_text(json.dumps(record, indent=1) + "\n")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 26))])
@pytest.mark.parametrize("path", PATHS)
def test_mutated_bodies(fuzzed: Fuzzed, path: str, seed: int) -> None:
    chance = random.Random(f"{path} {seed}")
    names = [*PATHS[path].model_fields, *UNSUPPORTED]
    fuzzed.seeds.add(seed)
    for _ in range(300):
        fuzzed.check(path, mutated(chance, chance.choice(VALID[path]), names), "mutated")


@pytest.mark.every(3)
@pytest.mark.parametrize("examples", [100, pytest.param(2500, marks=pytest.mark.full)])
@pytest.mark.parametrize("path", PATHS)
def test_generated_bodies(fuzzed: Fuzzed, path: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(generated(path))
    def check(raw: bytes) -> None:
        fuzzed.check(path, raw, "generated")

    check()
