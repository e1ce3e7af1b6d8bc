"""Requests that are rejected, and their error responses."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import Live, eventually, live
from scripted_engine import NOTHING, ScriptedEngine

from shotcast.errors import ConfigError
from shotcast.server.api_error import ApiError
from shotcast.server.request_body import MAX_PARTS, UNSUPPORTED, Body, ChatBody, CompletionBody, parse

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(max_prompt_tokens=100, max_output_tokens=60, max_queue=8, max_body_bytes=2000) as server:
        yield server


def refused(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    """Check an error response in OpenAI's format, and return its message."""
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    return error["message"]


@pytest.mark.parametrize("many", ['"x": {' + '"y": 1,' * MAX_PARTS + '"z": 1}', '"x": [' + "[]," * MAX_PARTS + "[]]"])
def test_bodies_of_many_parts_are_not_parsed(monkeypatch: pytest.MonkeyPatch, many: str) -> None:
    monkeypatch.setattr("shotcast.server.request_body.from_json", lambda raw: pytest.fail("parsed"))
    with pytest.raises(ApiError, match="more than 65536 lists, objects and keys"):
        parse(CompletionBody, ('{"model": "letters",' + many + "}").encode())


def test_texts_hold_any_number_of_marks() -> None:
    prompt = "[{:" * MAX_PARTS
    assert parse(CompletionBody, json.dumps({"model": "letters", "prompt": prompt}).encode()).prompt == prompt


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("wrong", "param", "says"),
    [
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"temperature": "hot"}, "temperature", "a number of at least 0"),
        ({"temperature": True}, "temperature", "a number of at least 0"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"top_p": 1.5}, "top_p", "at most 1"),
        ({"top_k": -2}, "top_k", "31 bits"),
        ({"top_k": 2**31}, "top_k", "31 bits"),
        ({"min_p": 2}, "min_p", "from 0 to 1"),
        ({"presence_penalty": 3}, "presence_penalty", "from -2 to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "from -2 to 2"),
        ({"seed": 2**63}, "seed", "64 bits"),
        ({"seed": 1.5}, "seed", "64 bits"),
        ({"n": 0}, "n", "from 1 to 128"),
        ({"n": 129}, "n", "from 1 to 128"),
        ({"n": 9}, "n", "takes 8 at a time"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"stop": ""}, "stop", "none of them empty"),
        ({"stop": [1]}, "stop", "list of at most 4 strings"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "token ids"),
        ({"stream": 1}, "stream", "true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more", "no parameter stream_options.more"),
        (
            {"stream": True, "stream_options": {"includ_usage": 1}},
            "stream_options.includ_usage",
            "mean stream_options.include_usage?",
        ),
        ({"temprature": 1}, "temprature", "no parameter temprature; did you mean temperature?"),
        ({"completely_other": 1}, "completely_other", "no parameter completely_other"),
        ({"skip_special_tokens": 0}, "skip_special_tokens", "true or false"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "at least 1, or -1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "from 0.001 to 10"),
        ({"metadata": []}, "metadata", "an object"),
        ({"store": "yes"}, "store", "true or false"),
        ({"user": 1}, "user", "a string"),
        ({"model": None}, "model", "the name of a model"),
    ],
)
@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_bad_parameters_are_named(server: Live, kind: str, wrong: dict[str, object], param: str, says: str) -> None:
    prompt = {"prompt": "x"} if kind == "completions" else {"messages": HELLO}
    started = len(server.engine.started)
    message = refused(server.post(f"/v1/{kind}", {"model": "letters", **prompt, **wrong}), 400, param)
    assert says in message
    assert param in message
    assert len(server.engine.started) == started


@pytest.mark.parametrize(
    ("wrong", "param", "says"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": ["a", ""]}, "prompt", "empty"),
        ({"prompt": [[1], []]}, "prompt", "empty"),
        ({"prompt": NOTHING}, "prompt", "at least one token"),
        ({"prompt": None}, "prompt", "a string, a list"),
        ({"prompt": [1, "a"]}, "prompt", "a string, a list"),
        ({"prompt": [3, -1]}, "prompt", "below 0"),
        ({"prompt": ["x"] * 9}, "prompt", "takes 8 at a time"),
        ({"prompt": "x" * 101}, "prompt", "101 tokens; this server takes 100"),
        ({"best_of": 2}, "best_of", "must equal n"),
        ({"max_tokens": 0}, "max_tokens", "or 0 with echo or prompt_logprobs"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "or 0 with echo or prompt_logprobs"),
        ({"echo": True, "logprobs": 0, "stream": True}, "echo", "cannot be streamed"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "cannot be streamed"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "from 0 to 20"),
        ({"echo": True, "logprobs": 21}, "logprobs", "logprobs must be"),
        ({"logprobs": 21}, "logprobs", "from 0 to 20"),
        ({"logprobs": True}, "logprobs", "from 0 to 20"),
        ({"suffix": "tail"}, "suffix", "not supported"),
        ({"chat_template_kwargs": {}}, "chat_template_kwargs", "no parameter"),
        ({"messages": HELLO}, "messages", "no parameter"),
    ],
)
def test_bad_completions(server: Live, wrong: dict[str, object], param: str, says: str) -> None:
    assert says in refused(server.post("/v1/completions", {"model": "letters", "prompt": "x", **wrong}), 400, param)


@pytest.mark.parametrize(
    ("wrong", "param", "says"),
    [
        ({"messages": []}, "messages", "list of objects"),
        ({"messages": "hello"}, "messages", "list of objects"),
        (
            {"messages": [{"role": "critic", "content": "x"}]},
            "messages",
            "messages[0].role must be one of system, developer, user, assistant",
        ),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages", "messages[0].role must be"),
        ({"messages": [*HELLO, {"role": "user"}]}, "messages", "messages[1].content must be"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
            "messages[0].content[0]",
        ),
        ({"messages": [{**HELLO[0], "tool_calls": [{"id": "x"}]}]}, "messages", "messages[0].tool_calls"),
        ({"messages": [{**HELLO[0], "name": "me"}]}, "messages", "messages[0].name"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "the user's word last"),
        ({"logprobs": 1}, "logprobs", "true or false"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "an object of variables"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs", "chat_template is reserved"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be None or a whole number from 0 to 20"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be a whole number"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "differ"),
    ],
)
def test_bad_chats(server: Live, wrong: dict[str, object], param: str, says: str) -> None:
    body = {"model": "letters", "messages": HELLO, **wrong}
    assert says in refused(server.post("/v1/chat/completions", body), 400, param)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "prompt", "either prompt or messages"),
        ({"prompt": "x", "messages": HELLO}, "prompt", "either prompt or messages"),
        ({"prompt": ["x"]}, "prompt", "a string"),
        ({"messages": []}, "messages", "a list of objects"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "the user's word last"),
        ({"messages": HELLO, "chat_template_kwargs": {"chat_template": ""}}, "chat_template_kwargs", "reserved"),
        ({"messages": HELLO, "add_special_tokens": True}, "add_special_tokens", "needs prompt"),
        ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt", "needs messages"),
        ({"prompt": "x", "return_token_str": True}, "return_token_str", "mean return_token_strs?"),
    ],
)
def test_bad_texts_to_tokenize(server: Live, body: dict[str, object], param: str, says: str) -> None:
    assert says in refused(server.post("/tokenize", body), 400, param)
    refused(server.post("/tokenize", {"prompt": "x", "model": "other"}), 404, "model", "model_not_found")


@pytest.mark.parametrize("tokens", ["x", [1, "a"], [1, -1], [2**31], [True], None])
def test_bad_tokens(server: Live, tokens: object) -> None:
    assert "a list of token ids" in refused(server.post("/detokenize", {"tokens": tokens}), 400, "tokens")


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_parameters_are_named(server: Live, name: str) -> None:
    path, prompt = "/v1/chat/completions", {"messages": HELLO}
    if name in ChatBody.model_fields:  # tools are for chats
        path, prompt = "/v1/completions", {"prompt": "x"}
    body = {"model": "letters", name: {"something": 1}, **prompt}
    message = refused(server.post(path, body), 400, name, "unsupported_parameter")
    assert message == f"{name} is not supported"


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_missing_parameters(server: Live, missing: str) -> None:
    body = {"model": "letters", "messages": HELLO}
    del body[missing]
    assert "is missing" in refused(server.post("/v1/chat/completions", body), 400, missing, "missing_parameter")


def test_context_length(server: Live) -> None:
    server.engine.max_model_len = 50
    try:
        for tokens in (50, 90):
            response = server.post("/v1/completions", {"model": "letters", "prompt": "x" * tokens})
            assert "at most 50" in refused(response, 400, "prompt", "context_length_exceeded")
        response = server.post("/v1/completions", {"model": "letters", "prompt": "x" * 40, "max_tokens": 11})
        assert "max_tokens is 11" in refused(response, 400, "max_tokens", "context_length_exceeded")
        response = server.post("/v1/completions", {"model": "letters", "prompt": "x" * 40, "max_tokens": 10})
        assert response.status_code == 200
    finally:
        server.engine.max_model_len = 200


def test_context_length_without_other_limits() -> None:
    with live() as server:
        server.engine.max_model_len = 50
        ask = {"model": "letters", "prompt": "x" * 40}
        for asked, gets in ((None, 10), (10, 10)):
            assert server.post("/v1/completions", ask | {"max_tokens": asked}).status_code == 200
            assert server.engine.params[-1].max_tokens == gets
        response = server.post("/v1/completions", ask | {"max_tokens": 11})
        assert "max_tokens is 11" in refused(response, 400, "max_tokens", "context_length_exceeded")


@pytest.mark.parametrize(("value", "status"), [(False, 200), (None, 200), (True, 400)])
def test_stream_options_that_request_nothing(server: Live, value: bool | None, status: int) -> None:
    options = {"include_usage": True, "include_obfuscation": value}
    body = {"model": "letters", "prompt": "x", "stream": True, "stream_options": options}
    assert server.post("/v1/completions", body).status_code == status


@pytest.mark.parametrize(("asked", "gets"), [(None, 60), (59, 59), (60, 60), (1000, 60)])
def test_max_output_tokens_caps_and_is_the_default(server: Live, asked: int | None, gets: int) -> None:
    response = server.post("/v1/completions", {"model": "letters", "prompt": "x", "max_tokens": asked})
    assert response.status_code == 200
    assert server.engine.params[-1].max_tokens == gets


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{", b"\xff", b"[1]", b"null", b"[" * 1500, b"1" * 1900),
        *(b'{"model": "letters", "prompt": "x", "temperature": NaN}', b'{"model": "\\ud800"}'),
        b'{"model": "letters", "prompt": "x", "temperature": ' + b"1" * 400 + b"}",
    ],
)
def test_invalid_bodies(server: Live, raw: bytes) -> None:
    response = httpx.post(
        f"{server.url}/v1/completions", content=raw, headers={"Content-Type": "application/json; charset=utf-8"}
    )
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_other_content_types(server: Live, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    response = httpx.post(
        f"{server.url}/v1/completions", content=b'{"model": "letters", "prompt": "x"}', headers=headers
    )
    assert "application/json" in refused(response, 415)


def test_no_such_model_path_or_method(server: Live) -> None:
    response = server.post("/v1/completions", {"model": "other", "prompt": "x"})
    assert "'letters'" in refused(response, 404, "model", "model_not_found")
    refused(httpx.get(f"{server.url}/v1/models/other"), 404, "model", "model_not_found")
    assert "GET /v2: Not Found" in refused(httpx.get(f"{server.url}/v2"), 404)
    response = httpx.get(f"{server.url}/v1/completions")
    refused(response, 405)
    assert response.headers["allow"] == "POST"


def test_bodies_up_to_the_limit(server: Live) -> None:
    def padded(size: int) -> bytes:
        raw = json.dumps({"model": "letters", "prompt": "x", "user": ""}).encode()
        return raw.replace(b'"user": ""', b'"user": "' + b"u" * (size - len(raw)) + b'"')

    def pieces(raw: bytes) -> Iterator[bytes]:
        yield raw[:1000]
        yield raw[1000:]

    headers = {"Content-Type": "application/json"}
    for size, status in ((2000, 200), (2001, 413)):
        assert len(padded(size)) == size
        # Both with Content-Length, and in chunks without.
        for content in (padded(size), pieces(padded(size))):
            response = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers)
            assert response.status_code == status, response.text
    refused(response, 413, code="body_too_large")


def test_a_body_is_refused_before_its_end(server: Live) -> None:
    lines = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", "Transfer-Encoding: chunked")
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        for _ in range(3):
            connection.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall("\r\n".join([*lines[:3], "Content-Length: 2001", "", ""]).encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.full
def test_key() -> None:
    with live(api_key="s3cret") as server:
        assert server.client("s3cret").completions.create(model="letters", prompt="x").choices[0].text == "abcde"
        with pytest.raises(openai.AuthenticationError):
            server.client("s3cre").completions.create(model="letters", prompt="x")
        for header in (None, "s3cret", "Bearer", "Basic s3cret", "Bearer s3cret2", b"Bearer \xe9"):
            headers = {} if header is None else {"Authorization": header}
            for path in ("/v1/models", "/v1/models/letters", "/metrics", "/version"):
                response = httpx.get(server.url + path, headers=headers)
                refused(response, 401, code="invalid_api_key")
                assert response.headers["www-authenticate"] == "Bearer"
        # Without the key, the server does not read a body.
        response = httpx.post(f"{server.url}/v1/completions", content=b"{" * 5000)
        refused(response, 401)
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/metrics", headers={"Authorization": "bearer s3cret"}).status_code == 200


def test_metrics_may_be_public() -> None:
    with live(api_key="s3cret", public_metrics=True) as server:
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        refused(httpx.get(f"{server.url}/v1/models"), 401)


def test_full_queue() -> None:
    engine = ScriptedEngine()
    engine.hold_after = 2
    with live(engine, max_queue=3) as server:
        client = server.client()
        with client.completions.create(model="letters", prompt="x", n=2, stream=True) as stream:
            next(stream)
            # One place is left: too few for two outputs, enough for one.
            response = server.post("/v1/completions", {"model": "letters", "prompt": ["x", "y"]})
            assert "2 of 3 queue places" in refused(response, 429, code="queue_full")
            assert response.json()["error"]["type"] == "rate_limit_error"
            assert int(response.headers["retry-after"]) >= 1
            with client.completions.create(model="letters", prompt="x", stream=True) as other:
                next(other)
                with pytest.raises(openai.RateLimitError):
                    client.completions.create(model="letters", prompt="x", stream=True)
                for path, text in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
                    refused(server.post(path, text), 429, code="queue_full")
                server.call(engine.let_go)
                list(other)
            list(stream)
        # Requests that ended, or were rejected for another reason, hold no place.
        for _ in range(4):
            with pytest.raises(openai.BadRequestError):
                client.completions.create(model="letters", prompt="x" * 300)
        assert len(client.completions.create(model="letters", prompt="x", n=3).choices) == 3
        assert eventually(lambda: engine.running == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_the_engine_rejects(stream: bool) -> None:
    engine = ScriptedEngine()
    engine.fault = ConfigError("token 99 is none of the model's")
    with live(engine) as server:
        body = {"model": "letters", "prompt": [99], "stream": stream}
        assert "token 99" in refused(server.post("/v1/completions", body), 400, "prompt")
        engine.fault = RuntimeError("a secret of the house")
        assert "secret" not in refused(server.post("/v1/completions", body), 500)


def test_a_fault_during_a_stream(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine()
    engine.fault, engine.fault_at = RuntimeError("a secret of the house"), 2
    with live(engine) as server:
        response = server.post("/v1/completions", {"model": "letters", "prompt": "x", "stream": True})
    *_, last, rest = response.text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "internal error; the server's log has more"
    assert rest == ""
    assert "secret" not in response.text
    assert "a secret of the house" in caplog.text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, *UNSUPPORTED})


def refusal(kind: type[Body], raw: bytes) -> ApiError | None:
    try:
        parse(kind, raw).sampling({})
    except ApiError as error:
        return error
    return None


@pytest.mark.full
@settings(max_examples=200)
@given(kind=st.sampled_from([CompletionBody, ChatBody]), extra=st.dictionaries(st.sampled_from(NAMES), JSON))
def test_any_json_is_a_request_or_a_400_that_names_a_parameter(kind: type[Body], extra: dict[str, object]) -> None:
    prompt = {"prompt": "x"} if kind is CompletionBody else {"messages": HELLO}
    error = refusal(kind, json.dumps({"model": "letters", **prompt, **extra}).encode())
    if error is not None:
        assert error.status == 400
        assert str(error.param).split(".")[0] in extra


@given(raw=st.binary(max_size=50))
def test_any_bytes_are_a_400(raw: bytes) -> None:
    error = refusal(CompletionBody, raw)
    assert error is not None
    assert error.status == 400
