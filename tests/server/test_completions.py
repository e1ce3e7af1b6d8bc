"""Responses of /v1/completions and /v1/chat/completions, as OpenAI's own client reads them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_server import Live, live
from scripted_engine import BEGIN, END, HALF, NEVER, ScriptedEngine, ScriptedTokenizer

import shotcast
from shotcast.engine.outputs import FinishReason, RequestOutput, TokenLogprob
from shotcast.server.config import ServerConfig
from shotcast.server.request_body import ChatBody, CompletionBody
from shotcast.server.responses import ApiResponse, ChatCompletionResponse, CompletionResponse
from shotcast.server.service import Service
from shotcast.server.streaming import event


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live() as server:
        yield server


@pytest.fixture
def client(server: Live) -> openai.OpenAI:
    return server.client()


HELLO = [{"role": "user", "content": "hello"}]


def test_completion(client: openai.OpenAI) -> None:
    response = client.completions.create(model="letters", prompt="hello")
    assert response.object == "text_completion"
    assert response.id.startswith("cmpl-")
    assert response.model == "letters"
    (choice,) = response.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("abcde", "stop", None)
    assert response.usage is not None
    assert response.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_chat(server: Live, client: openai.OpenAI) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]},
        {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "more"},
    ]
    response = client.chat.completions.create(model="letters", messages=messages)
    assert response.object == "chat.completion"
    assert response.id.startswith("chatcmpl-")
    (choice,) = response.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "abcde", "stop")
    expected = "<system>be brief<user>hello<assistant>yes<user>more"
    assert server.engine.tokenizer.decode(server.engine.prompts[-1]) == expected
    assert response.usage.prompt_tokens == len(expected)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_prompts(server: Live, client: openai.OpenAI, prompt: object, prompts: list[list[int]]) -> None:
    server.engine._prompts.clear()
    response = client.completions.create(model="letters", prompt=prompt, n=2, seed=3)
    assert server.engine.prompts == [one for one in prompts for _ in range(2)]
    assert [choice.index for choice in response.choices] == list(range(2 * len(prompts)))
    assert [choice.text for choice in response.choices] == ["defgh", "efghi"] * len(prompts)
    assert response.usage.prompt_tokens == sum(map(len, prompts))
    assert response.usage.completion_tokens == 6 * 2 * len(prompts)
    assert response.usage.prompt_tokens_details.cached_tokens == sum(len(one) // 2 for one in prompts)


def test_parameters_reach_the_engine(server: Live, client: openai.OpenAI) -> None:
    client.completions.create(
        model="letters",
        prompt="x",
        max_tokens=3,
        temperature=0,
        top_p=0.5,
        n=1,
        best_of=1,
        stop=["q", "r"],
        logprobs=2,
        seed=-5,
        presence_penalty=1,
        frequency_penalty=-1.5,
        user="me",
        extra_body={
            "top_k": 7,
            "min_p": 0.25,
            "ignore_eos": True,
            "stop_token_ids": [3, 4],
            "repetition_penalty": 1.25,
            "skip_special_tokens": False,
        },
    )
    params = server.engine.params[-1]
    assert (params.max_tokens, params.temperature, params.top_p, params.stop) == (3, 0, 0.5, ("q", "r"))
    assert (params.logprobs, params.seed, params.presence_penalty, params.frequency_penalty) == (2, -5, 1, -1.5)
    assert (params.top_k, params.min_p, params.ignore_eos, params.stop_token_ids) == (7, 0.25, True, {3, 4})
    assert (params.repetition_penalty, params.skip_special_tokens) == (1.25, False)


def test_parameters_without_effect(client: openai.OpenAI) -> None:
    response = client.chat.completions.create(
        model="letters",
        messages=HELLO,
        metadata={"run": "7"},
        store=True,
        reasoning_effort="low",
        service_tier="flex",
        user="me",
        safety_identifier="me",
        prompt_cache_key="hello",
        verbosity="low",
        extra_body={"prompt_cache_retention": "24h"},
    )
    assert response.choices[0].message.content == "abcde"


def test_a_developer_is_a_system(server: Live, client: openai.OpenAI) -> None:
    messages = [{"role": "developer", "content": "be brief"}, *HELLO]
    client.chat.completions.create(model="letters", messages=messages)
    assert server.engine.tokenizer.decode(server.engine.prompts[-1]) == "<system>be brief<user>hello"


def test_variables_reach_the_chat_template(server: Live, client: openai.OpenAI) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    client.chat.completions.create(model="letters", messages=HELLO, extra_body=extra)
    assert server.engine.tokenizer.decode(server.engine.prompts[-1]) == "[enable_thinking=False]<user>hello"


@pytest.mark.parametrize(
    ("kept", "limits", "tokens"),
    [(3, {}, "llo"), (9, {}, "hello"), (-1, {}, "hello"), (-1, {"max_tokens": 46}, "ello")],
)
def test_a_prompt_keeps_its_end(server: Live, kept: int, limits: dict[str, int], tokens: str) -> None:
    server.engine.max_model_len = 50
    try:
        body = {"model": "letters", "prompt": ["hello"], "echo": True, "truncate_prompt_tokens": kept, **limits}
        answer = server.post("/v1/completions", body).json()
        assert answer["choices"][0]["text"] == tokens + "abcde"
        assert answer["usage"]["prompt_tokens"] == len(tokens)
        chat = {"model": "letters", "messages": [{"role": "user", "content": "x" * 90}], "truncate_prompt_tokens": -1}
        answer = server.post("/v1/chat/completions", chat).json()
        assert (answer["usage"]["prompt_tokens"], answer["choices"][0]["finish_reason"]) == (49, "length")
    finally:
        server.engine.max_model_len = 200


def test_a_prompt_is_cut_to_what_the_server_takes() -> None:
    with live(max_prompt_tokens=4) as server:
        body = {"model": "letters", "prompt": "hello", "truncate_prompt_tokens": -1}
        assert server.post("/v1/completions", body).json()["usage"]["prompt_tokens"] == 4


def test_values_that_request_nothing_are_accepted(server: Live) -> None:
    body = {"model": "letters", "messages": HELLO, "tools": [], "tool_choice": "none", "logit_bias": {}, "audio": None}
    body |= {
        "response_format": {"type": "text"},
        "top_k": -1,
        "stop": None,
        "n": None,
        "stream": False,
        "logprobs": None,
    }
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    assert server.engine.params[-1].top_k == 0


def test_tokenize_and_detokenize(server: Live) -> None:
    answer = server.post("/tokenize", {"model": "letters", "prompt": "begin"}).json()
    tokens = [BEGIN, *map(ord, "begin")]
    assert answer == {"count": 6, "max_model_len": 200, "tokens": tokens, "token_strs": None}
    answer = server.post("/tokenize", {"prompt": "begin", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["<begin>", *"begin"]
    assert server.post("/tokenize", {"prompt": "begin", "add_special_tokens": False}).json()["tokens"] == tokens[1:]
    assert server.post("/tokenize", {"prompt": ""}).json()["count"] == 0
    assert server.post("/detokenize", {"tokens": [*tokens, 2**31 - 1]}).json() == {"prompt": "<begin>begin"}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_the_tokens_of_a_long_text(server: Live) -> None:
    text = "ab" * 5000
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert (answer["tokens"], "".join(answer["token_strs"])) == (list(map(ord, text)), text)


def test_the_tokens_of_a_conversation_are_those_of_a_chat(server: Live, client: openai.OpenAI) -> None:
    options = {"chat_template_kwargs": {"enable_thinking": True}}
    client.chat.completions.create(model="letters", messages=HELLO, extra_body=options)
    body = {"messages": HELLO, **options}
    assert server.post("/tokenize", body).json()["tokens"] == server.engine.prompts[-1]
    tokens = server.post("/tokenize", body | {"add_generation_prompt": False}).json()["tokens"]
    assert tokens == [*server.engine.prompts[-1], ord(".")]


def test_version(server: Live) -> None:
    assert httpx.get(f"{server.url}/version").json() == {"version": shotcast.__version__}


def test_seeds_of_choices_stay_within_64_bits(server: Live, client: openai.OpenAI) -> None:
    client.completions.create(model="letters", prompt="x", n=2, seed=2**63 - 1)
    assert [params.seed for params in server.engine.params[-2:]] == [2**63 - 1, -(2**63)]


def test_stop(client: openai.OpenAI) -> None:
    response = client.completions.create(model="letters", prompt="x", stop="cd")
    assert (response.choices[0].text, response.choices[0].finish_reason) == ("ab", "stop")
    assert response.choices[0].stop_reason == "cd"
    response = client.completions.create(model="letters", prompt="x", max_tokens=2)
    assert (response.choices[0].text, response.choices[0].finish_reason) == ("ab", "length")


def test_echo(client: openai.OpenAI) -> None:
    response = client.completions.create(model="letters", prompt=["x", "yz"], echo=True, n=2)
    assert [choice.text for choice in response.choices] == ["xabcde", "xabcde", "yzabcde", "yzabcde"]
    stream = client.completions.create(model="letters", prompt=[104, 105], echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "hiabcde"


def test_output_length_defaults_to_the_model_limit(server: Live, client: openai.OpenAI) -> None:
    client.completions.create(model="letters", prompt="x" * 150)
    assert server.engine.params[-1].max_tokens == 50
    client.chat.completions.create(model="letters", messages=HELLO, max_completion_tokens=4)
    assert server.engine.params[-1].max_tokens == 4


def test_stream(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="letters", prompt="hello", stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert len({chunk.id for chunk in [*chunks, last]}) == 1
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abcde"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 6)


def test_chat_stream_of_several_choices(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="letters", messages=HELLO, n=3, seed=0, stream=True))
    texts, ends = ["", "", ""], ["", "", ""]
    for number in range(3):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == number]
        assert own[0].delta.role == "assistant"
        assert all(choice.delta.role is None for choice in own[1:])
        texts[number] = "".join(choice.delta.content or "" for choice in own)
        ends[number] = own[-1].finish_reason
    assert texts == ["abcde", "bcdef", "cdefg"]
    assert ends == ["stop"] * 3
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)


def test_bytes_of_a_stream(server: Live) -> None:
    body = {"model": "letters", "messages": HELLO, "stream": True, "max_tokens": 1}
    response = server.post("/v1/chat/completions", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    said = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert [choice["delta"] for choice in said] == [{"role": "assistant", "content": ""}, {"content": "a"}]
    assert [choice["finish_reason"] for choice in said] == [None, "length"]


def test_completion_logprobs(client: openai.OpenAI) -> None:
    response = client.completions.create(model="letters", prompt="x", logprobs=4)
    logprobs = response.choices[0].logprobs
    assert logprobs.tokens == ["a", "b", "c", "d", "e"]
    assert logprobs.token_logprobs == [-0.5] * 5
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    assert logprobs.top_logprobs[1] == {"b": -0.5, "\ufffd": -1.5, chr(NEVER): -9999.0}
    response = client.completions.create(model="letters", prompt="x", logprobs=0)
    assert response.choices[0].logprobs.top_logprobs[0] == {"a": -0.5}


def test_echoed_logprobs(server: Live, client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "letters", "prompt": "begin", "echo": True, "logprobs": 1, "n": 2, "seed": 0}
    for choice, letters in zip(client.completions.create(**options, max_tokens=2).choices, ("ab", "bc"), strict=True):
        assert choice.text == "begin" + letters
        assert choice.logprobs.tokens == ["<begin>", *"begin", *letters]
        assert choice.logprobs.token_logprobs == [None, -1, -2, -3, -4, -5, -0.5, -0.5]
        assert choice.logprobs.text_offset == [0, 0, 1, 2, 3, 4, 5, 6]
        tops = [{"\ufffd": -0.25, letter: -float(place)} for place, letter in enumerate("begin", 1)]
        assert choice.logprobs.top_logprobs == [None, *tops, *({letter: -0.5} for letter in letters)]
    alone = client.completions.create(**options, max_tokens=0)
    for choice in alone.choices:
        assert (choice.text, choice.finish_reason) == ("begin", "length")
        assert choice.logprobs.token_logprobs == [None, -1, -2, -3, -4, -5]
    assert (alone.usage.prompt_tokens, alone.usage.completion_tokens, alone.usage.total_tokens) == (6, 0, 6)
    assert server.engine.params[-1].max_tokens == 0
    shown = client.completions.create(**options, max_tokens=0, extra_body={"skip_special_tokens": False})
    assert shown.choices[0].logprobs.text_offset[:3] == [0, 7, 8]


def test_prompt_logprobs(server: Live) -> None:
    body = {"model": "letters", "prompt": ["ab", "c"], "prompt_logprobs": 1, "max_tokens": 0}
    answer = server.post("/v1/completions", body).json()
    first, second = answer["choices"]
    half = {"logprob": -0.25, "rank": 1, "decoded_token": "\ufffd"}
    letter = {"logprob": -1.0, "rank": 2, "decoded_token": "b"}
    assert first["prompt_logprobs"] == [None, {str(ord("b")): letter, str(HALF): half}]
    assert second["prompt_logprobs"] == [None]
    assert (first["text"], first["logprobs"]) == ("", None)
    body |= {"echo": True, "logprobs": 2}
    echoed = server.post("/v1/completions", body).json()["choices"][0]
    assert echoed["prompt_logprobs"] == first["prompt_logprobs"]
    assert echoed["logprobs"]["top_logprobs"][1] == {"\ufffd": -0.25, chr(NEVER): -9999.0, "b": -1.0}
    without = server.post("/v1/completions", {"model": "letters", "prompt": "ab", "echo": True}).json()
    assert "prompt_logprobs" not in without["choices"][0]
    assert server.engine.params[-1].prompt_logprobs is None


class Named(ScriptedTokenizer):
    """A tokenizer in which END has a name, like a special token, but no text."""

    def decode_token(self, token: int, skip_special: bool = True) -> str:
        return ("" if skip_special else "<end>") if token == END else " " + self.decode([token])


def test_logprobs_show_tokens_as_they_follow_others() -> None:
    entries = [TokenLogprob(token, -1.0, 1, ((END, -2.0),)) for token in (ord("a"), END, ord("b"))]
    output = RequestOutput("r", (1,), [97, END, 98], " a b", finish_reason="length", logprobs=entries)
    body = CompletionBody(model="m", prompt="x", logprobs=1)
    said = CompletionResponse(body, "m", Named()).complete({0: output})["choices"][0]["logprobs"]
    assert said["tokens"] == [" a", "<end>", " b"]
    assert said["text_offset"] == [0, 2, 2]
    assert said["top_logprobs"][0] == {"<end>": -2.0, " a": -1.0}
    chat = ChatBody(model="m", messages=HELLO, logprobs=True, top_logprobs=1)
    content = ChatCompletionResponse(chat, "m", Named()).complete({0: output})["choices"][0]["logprobs"]["content"]
    assert [(one["token"], bytes(one["bytes"])) for one in content] == [
        (" a", b" a"),
        ("<end>", b"<end>"),
        (" b", b" b"),
    ]
    assert content[0]["top_logprobs"][0]["token"] == "<end>"


@given(st.text())
def test_an_event_is_one_line(text: str) -> None:
    """This also holds for clients that end lines at other characters than line feeds."""
    line, *rest = event({"text": f"a\u2028b\u2029c\x85{text}"}).decode().splitlines()
    assert rest == [""]
    assert json.loads(line.removeprefix("data: ")) == {"text": f"a\u2028b\u2029c\x85{text}"}


def test_completion_logprobs_of_a_stream_are_those_of_the_whole(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="letters", prompt="x", logprobs=2).choices[0].logprobs
    stream = client.completions.create(model="letters", prompt="x", logprobs=2, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in stream]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [entry for part in parts for entry in getattr(part, name)] == getattr(whole, name)


def test_chat_logprobs(client: openai.OpenAI) -> None:
    options = {"model": "letters", "messages": HELLO, "logprobs": True, "top_logprobs": 3}
    content = client.chat.completions.create(**options).choices[0].logprobs.content
    assert [entry.token for entry in content] == ["a", "b", "c", "d", "e"]
    assert [(entry.logprob, entry.bytes) for entry in content[:2]] == [(-0.5, [97]), (-0.5, [98])]
    top = [(entry.token, entry.logprob, entry.bytes) for entry in content[0].top_logprobs]
    assert top == [("a", -0.5, [97]), ("\ufffd", -1.5, None), (chr(NEVER), -9999.0, [NEVER])]
    stream = client.chat.completions.create(**options, stream=True)
    with_logprobs = [chunk.choices[0].logprobs for chunk in stream if chunk.choices[0].logprobs is not None]
    assert [entry for logprobs in with_logprobs for entry in logprobs.content] == content
    without = client.chat.completions.create(model="letters", messages=HELLO, logprobs=True)
    assert without.choices[0].logprobs.content[0].top_logprobs == []


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"stop_token_ids": [ord("c")]}, ["a", "b"]),  # the token that ended it is not part of the text
        ({"stop": "c"}, ["a", "b", "c"]),
        ({"max_tokens": 3}, ["a", "b", "c"]),
    ],
)
def test_logprobs_up_to_the_end(server: Live, options: dict[str, object], tokens: list[str]) -> None:
    response = server.post("/v1/completions", {"model": "letters", "prompt": "x", "logprobs": 0, **options}).json()
    assert response["choices"][0]["logprobs"]["tokens"] == tokens


def test_held_back_text_makes_no_chunk() -> None:
    response = CompletionResponse(CompletionBody(model="letters", prompt="x"), "letters", ScriptedTokenizer())
    output = RequestOutput("", (1,), text="a", tokens=[97])
    assert [chunk["choices"][0]["text"] for chunk in response.chunks(0, output)] == ["a"]
    output.tokens.append(HALF)
    assert response.chunks(0, output) == []
    output.finish_reason = "stop"
    (chunk,) = response.chunks(0, output)
    assert (chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) == ("", "stop")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["letters"]
    assert client.models.retrieve("letters").owned_by == "shotcast"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_served_model_name() -> None:
    with live(served_model_name="org/mine") as server:
        client = server.client()
        assert client.models.retrieve("org/mine").id == "org/mine"
        assert client.completions.create(model="org/mine", prompt="x").model == "org/mine"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="letters", prompt="x")


@pytest.mark.full
def test_a_hundred_streams_at_once() -> None:
    engine = ScriptedEngine()
    engine.hold_after, engine.length = 3, 20

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(model="letters", prompt="x", stream=True, seed=number)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        http = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=100)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http) as client:
            tasks = [asyncio.create_task(one(client, number)) for number in range(100)]
            while engine.running < 100:
                await asyncio.sleep(0.01)
            server.call(engine.let_go)
            return await asyncio.gather(*tasks)

    with live(engine) as server:
        texts = asyncio.run(all_of_them())
    assert engine.most_running == 100
    assert texts == ["".join(chr(97 + (start + i) % 26) for i in range(20)) for start in range(100)]


def test_slow_readers_get_fewer_and_larger_chunks() -> None:
    """The engine does not wait for clients, and the server does not queue what they have not read."""

    async def main() -> list[list[str]]:
        engine = ScriptedEngine()
        service = Service(engine, ServerConfig())
        body = CompletionBody(model="letters", prompt="x", n=2)
        texts: list[list[str]] = [[], []]
        async with aclosing(service.generate(body, "slow")) as updates:
            async for number, output in updates:
                texts[number].append(output.text)
                while len(engine.finished) < 2:
                    await asyncio.sleep(0)
        service.close()
        return texts

    first, second = asyncio.run(main())
    assert first == ["a", "abcde"]
    assert second == ["abcde"]


@given(st.lists(st.integers(1, 8), min_size=1, max_size=10), st.sampled_from(["stop", "length"]), st.booleans())
def test_chunks_of_any_size_make_the_whole(sizes: list[int], finish: FinishReason, chat: bool) -> None:
    """Text, log-probabilities, ending and usage do not depend on how the stream is divided into chunks."""
    options = {"model": "letters", "logprobs": True if chat else 1, "stream_options": {"include_usage": True}}
    response: ApiResponse[Any]
    if chat:
        chat_body = ChatBody(**options, messages=HELLO, stream=True)
        response = ChatCompletionResponse(chat_body, "letters", ScriptedTokenizer())
    else:
        response = CompletionResponse(
            CompletionBody(**options, prompt="x", stream=True), "letters", ScriptedTokenizer()
        )
    output = RequestOutput("", (1,), logprobs=[])
    chunks = []
    for number, size in enumerate(sizes):
        last = number == len(sizes) - 1
        for one in range(size):
            token = 97 + len(output.tokens) % 26
            ends = last and one == size - 1 and finish == "stop"
            output.tokens.append(END if ends else token)
            output.text += "" if ends else chr(token)
            output.logprobs.append(TokenLogprob(output.tokens[-1], -0.25 * len(output.tokens), 1, ()))
        if last:
            output.finish_reason = finish
        chunks += response.chunks(0, output)
    whole = response.complete({0: output})
    choices = [chunk["choices"][0] for chunk in chunks]
    (expected,) = whole["choices"]
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    if chat:
        assert "".join(choice["delta"].get("content", "") for choice in choices) == expected["message"]["content"]
        assert [one for said in logprobs for one in said["content"]] == expected["logprobs"]["content"]
    else:
        assert "".join(choice["text"] for choice in choices) == expected["text"]
        for name, all_of_them in expected["logprobs"].items():
            assert [one for said in logprobs for one in said[name]] == all_of_them
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [finish]
    assert len(choices) <= len(sizes) + chat
    assert response.usage_chunk({0: output})["usage"] == whole["usage"]
