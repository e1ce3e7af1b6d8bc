"""A model's thoughts apart from its answer; and web pages of other origins."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import Live, live
from scripted_engine import ScriptedEngine

from shotcast.server.answers import Thoughts

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "time"}}]
THINKS = "{% if tools %}<tool_call>{% endif %}{{ message.split('</think>') }}"


def divided(begun: bool, pieces: Sequence[str]) -> tuple[str, str]:
    thoughts = Thoughts(begun)
    answer = ""
    for number, piece in enumerate(pieces):
        before = thoughts.text
        answer += thoughts.push(piece, last=number == len(pieces) - 1)
        assert thoughts.text.startswith(before)
    return thoughts.text, answer


@pytest.mark.parametrize(
    ("begun", "text", "thoughts", "answer"),
    [
        (False, "\n<think>\n a b \n</think>\n\n c ", "a b", "c "),
        (False, "<think></think>c", "", "c"),
        (False, "<think>a", "a", ""),
        (False, " a <think>b</think>", "", " a <think>b</think>"),
        (False, "<thin", "", "<thin"),
        (True, " a</think> b</think>", "a", "b</think>"),
        (True, "a </thin", "a </thin", ""),
        (True, "", "", ""),
    ],
)
def test_thoughts_end_where_the_answer_begins(begun: bool, text: str, thoughts: str, answer: str) -> None:
    assert divided(begun, [text]) == (thoughts, answer)
    assert divided(begun, [*text, ""]) == (thoughts, answer)


@settings(max_examples=300, deadline=None)
@given(
    begun=st.booleans(),
    text=st.lists(st.sampled_from(["<think>", "</think>", "<", "think", "a", " ", "\n"]), max_size=9).map("".join),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_thoughts_in_any_pieces(begun: bool, text: str, cuts: list[int]) -> None:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[first:last] for first, last in itertools.pairwise(places)] or [""]
    assert divided(begun, pieces) == divided(begun, [text]) == divided(begun, [*text, ""])


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(ScriptedEngine(), allowed_origins=("https://example.org",)) as server:
        yield server


def ask(server: Live, stream: bool, **changes: Any) -> tuple[str, str, list[str], str]:
    """Return thoughts, content, names of calls and the finish reason."""
    answer = server.client().chat.completions.create(
        **{"model": "letters", "messages": HELLO, "stream": stream} | changes
    )
    thoughts, content, names, finish = "", "", [], ""
    if not stream:
        (choice,) = answer.choices
        message = choice.message
        names = [call.function.name for call in message.tool_calls or ()]
        return getattr(message, "reasoning_content", ""), message.content or "", names, choice.finish_reason
    for chunk in answer:
        (choice,) = chunk.choices
        thoughts += getattr(choice.delta, "reasoning_content", "")
        content += choice.delta.content or ""
        names += [part.function.name for part in choice.delta.tool_calls or () if part.function.name]
        finish = choice.finish_reason or finish
    return thoughts, content, names, finish


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_of_an_output(server: Live, stream: bool) -> None:
    server.engine.tokenizer.chat_template = THINKS
    server.engine.answer = "<think>\nIs it?\n</think>\n\nYes."
    assert ask(server, stream) == ("Is it?", "Yes.", [], "stop")
    server.engine.answer = 'It may be.</think><tool_call>{"name": "time", "arguments": {}}</tool_call>'
    begun = [{"role": "user", "content": "hello<think>\n"}]  # as if the template had written it
    assert ask(server, stream, messages=begun, tools=TOOLS) == ("It may be.", "", ["time"], "tool_calls")
    server.engine.answer = "Yes."
    assert ask(server, stream) == ("", "Yes.", [], "stop")
    server.engine.answer = "<think>a</think>b"
    server.engine.tokenizer.chat_template = ""
    assert ask(server, stream) == ("", "<think>a</think>b", [], "stop")


def test_an_output_by_a_grammar_has_no_thoughts(server: Live) -> None:
    server.engine.tokenizer.chat_template = THINKS
    begun = [{"role": "user", "content": "hello<think>"}]
    extra = {"structured_outputs": {"choice": ["yes"]}}
    assert ask(server, False, messages=begun, extra_body=extra) == ("", "yes", [], "stop")


def test_thoughts_may_come_back(server: Live) -> None:
    server.engine.tokenizer.chat_template, server.engine.answer = "", None
    messages = [*HELLO, {"role": "assistant", "content": "Yes.", "reasoning_content": "Is it?"}, *HELLO]
    assert ask(server, False, messages=messages)[3] == "stop"
    response = server.post(
        "/v1/chat/completions",
        {"model": "letters", "messages": [{"role": "assistant", "content": "a", "reasoning_content": 5}]},
    )
    assert "messages[0].reasoning_content must be a string" in response.json()["error"]["message"]


def test_only_allowed_origins_may_use_the_server(server: Live) -> None:
    def asked(url: str, origin: str) -> httpx.Response:
        wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        return httpx.options(f"{url}/v1/chat/completions", headers={"Origin": origin} | wanted)

    granted = asked(server.url, "https://example.org")
    assert granted.status_code == 200
    assert granted.headers["access-control-allow-origin"] == "https://example.org"
    assert "authorization" in granted.headers["access-control-allow-headers"]
    assert asked(server.url, "https://example.com").status_code == 400
    answer = server.post(
        "/v1/completions", {"model": "letters", "prompt": "x"}, headers={"Origin": "https://example.org"}
    )
    assert answer.headers["access-control-allow-origin"] == "https://example.org"
    with live() as other:
        assert asked(other.url, "https://example.org").status_code == 405
        assert (
            "access-control-allow-origin"
            not in httpx.get(f"{other.url}/health", headers={"Origin": "https://example.org"}).headers
        )
