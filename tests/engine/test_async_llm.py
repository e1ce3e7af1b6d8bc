"""Outputs for an event loop, from news as the client has them: no ranks, no threads but the one that tells."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shotcast.engine import base_llm
from shotcast.engine.async_llm import AsyncLLM
from shotcast.engine.client import RequestUpdate, UpdateCallback
from shotcast.engine.outputs import EngineCoreOutput, RequestOutput
from shotcast.engine.sampling_params import SamplingParams
from shotcast.errors import EngineDead


class Client:
    """Of an engine whose steps the test says. Tokens are letters."""

    has_tokenizer = True
    byte_tokens = frozenset[int]()

    def __init__(self) -> None:
        self.tokenizer = self
        self.info = SimpleNamespace(model=SimpleNamespace(eos=(0,)))
        self.listening: dict[str, UpdateCallback] = {}
        self.aborted: list[str] = []

    def prompt_tokens(self, prompt: list[int]) -> tuple[int, ...]:
        return tuple(prompt)

    def submit(self, request_id: str, prompt: tuple[int, ...], params: SamplingParams, listen: UpdateCallback) -> None:
        self.listening[request_id] = listen

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def decode_token(self, token: int, skip_special: bool = True) -> str:
        if token == FAULT:
            raise ZeroDivisionError
        return chr(token)

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return "".join(map(chr, ids))

    decode_continuation = decode

    def step(self, **tokens: int | Exception | None) -> None:
        """RequestUpdate of a step, on a thread: the token of each request; None for its end."""
        news = []
        for name, token in tokens.items():
            if isinstance(token, Exception):
                news.append(RequestUpdate(name, token, 0.0))
            else:
                drawn = () if token is None else (token,)
                news.append(
                    RequestUpdate(name, EngineCoreOutput(name, drawn, None, "length" if token is None else None), 0.0)
                )
        (listen,) = {self.listening[name] for name in tokens}
        thread = threading.Thread(target=listen, args=(news,))
        thread.start()
        thread.join()


FAULT = 7


def engine() -> tuple[AsyncLLM, Client]:
    client = Client()
    with patch.object(base_llm, "EngineClient", lambda config: client):
        return AsyncLLM("letters"), client


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@settings(max_examples=50)
@given(st.data())
def test_all_tokens_come_in_order(data: st.DataObject) -> None:
    """However the steps fall between the looks of the loop."""

    async def main() -> None:
        llm, client = engine()
        names = ["a", "b", "c"]
        tokens: dict[str, list[int]] = {name: [] for name in names}
        told: dict[str, list[Any]] = {name: [] for name in names}
        for name in names:
            llm.start([1], SamplingParams(), name, lambda output, name=name: told[name].append(output.delta))
        for _ in range(data.draw(st.integers(1, 10))):
            drawing = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
            for name in drawing:
                tokens[name].append(ord("a") + len(tokens[name]))
            client.step(**{name: tokens[name][-1] for name in drawing})
            if data.draw(st.booleans()):
                await settle()
        await settle()
        for name in names:
            assert "".join(told[name]) == "".join(map(chr, tokens[name]))
            assert llm._running[name][0].copy().tokens == tokens[name]

    asyncio.run(main())


def test_the_loop_is_woken_up_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        llm, client = engine()
        loop = asyncio.get_running_loop()
        woken = []
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: woken.append(args))
        names = [f"r{number}" for number in range(64)]
        for name in names:
            llm.start([1], SamplingParams(), name, lambda output: None)
        client.step(**dict.fromkeys(names, ord("a")))
        assert len(woken) == 1

    asyncio.run(main())


def test_what_goes_wrong_with_one_is_told_to_that_one() -> None:
    async def main() -> None:
        llm, client = engine()
        told: dict[str, list[Any]] = {"a": [], "b": [], "c": []}
        for name in told:
            llm.start([1], SamplingParams(), name, told[name].append)
        client.step(a=FAULT, b=EngineDead("gone"), c=ord("x"))
        client.step(a=ord("y"), b=ord("y"), c=None)
        await settle()
        assert [type(one) for one in told["a"]] == [ZeroDivisionError]
        assert [type(one) for one in told["b"]] == [EngineDead]
        assert [one.finished for one in told["c"]] == [True, True]  # always the same, which has grown since
        assert told["c"][0].text == "x"
        assert llm._running == {}

    asyncio.run(main())


def test_a_listener_that_fails_keeps_nothing_from_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        llm, client = engine()
        told: list[Any] = []

        def fail(output: RequestOutput | Exception) -> None:
            raise ZeroDivisionError

        llm.start([1], SamplingParams(), "a", fail)
        llm.start([1], SamplingParams(), "b", told.append)
        client.step(a=ord("x"), b=ord("x"))
        await settle()
        assert [one.text for one in told] == ["x"]
        assert "request a" in caplog.text

    asyncio.run(main())


def test_news_for_a_loop_that_is_gone_harm_nobody() -> None:
    """Least of all the thread that tells them, which tells others too."""
    llm, client = engine()

    async def main() -> None:
        llm.start([1], SamplingParams(), "a", lambda output: None)

    asyncio.run(main())
    client.listening["a"]([RequestUpdate("a", EngineCoreOutput("a", (1,)), 0.0)])


def test_an_end_that_the_ranks_do_not_know_is_told_to_them() -> None:
    """By a stop string; and of a request that was aborted nothing more is heard."""

    async def main() -> None:
        llm, client = engine()
        told: list[RequestOutput | Exception] = []
        llm.start([1], SamplingParams(stop=("b",)), "a", told.append)
        llm.start([1], SamplingParams(), "c", told.append)
        client.step(a=ord("a"))
        client.step(a=ord("b"))
        await settle()
        assert client.aborted == ["a"]
        llm.abort("c")
        llm.abort("c")
        count = len(told)
        client.step(a=ord("x"), c=ord("x"))
        await settle()
        assert client.aborted == ["a", "c"]
        assert len(told) == count == 2
        (output,) = {id(one): one for one in told}.values()
        assert isinstance(output, RequestOutput)
        assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "b")

    asyncio.run(main())
