"""AsyncLLM with a scripted client: no ranks, and one thread that delivers the updates."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shotcast.engine.async_llm import AsyncLLM
from shotcast.engine.client import EngineClient, RequestUpdate, UpdateCallback
from shotcast.engine.outputs import EngineCoreOutput, RequestOutput
from shotcast.engine.requests import CheckedPrompt
from shotcast.engine.sampling_params import SamplingParams
from shotcast.errors import EngineDead


class ScriptedLLM(AsyncLLM):
    """An AsyncLLM whose steps the test scripts. Tokens are letters."""

    _has_tokenizer = True
    _end_tokens = (0,)
    byte_tokens: ClassVar[dict[int, bytes]] = {}

    def __init__(self) -> None:
        with patch.object(EngineClient, "__init__", lambda self, model: None):
            super().__init__("letters")
        self.callbacks: dict[str, UpdateCallback] = {}
        self.aborted: list[str] = []

    @property
    def tokenizer(self) -> ScriptedLLM:
        return self

    def check_prompt(self, prompt: list[int]) -> CheckedPrompt:
        return CheckedPrompt(tuple(prompt))

    def _send(
        self, request_id: str, prompt: tuple[int, ...], params: SamplingParams, on_update: UpdateCallback
    ) -> None:
        self.callbacks[request_id] = on_update

    def _abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def decode_token(self, token: int, skip_special: bool = True) -> str:
        if token == FAULT:
            raise ZeroDivisionError
        return chr(token)

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return "".join(map(chr, ids))

    decode_continuation = decode

    def step(self, **tokens: int | Exception | None) -> None:
        """Deliver the updates of a step on a thread: the token of each request; None for its end."""
        updates = []
        for name, token in tokens.items():
            if isinstance(token, Exception):
                updates.append(RequestUpdate(name, token, 0.0))
            else:
                ids, finish_reason = ((), "length") if token is None else ((token,), None)
                output = EngineCoreOutput(name, ids, None, finish_reason)  # type: ignore[arg-type]
                updates.append(RequestUpdate(name, output, 0.0))
        (on_update,) = {self.callbacks[name] for name in tokens}
        thread = threading.Thread(target=on_update, args=(updates,))
        thread.start()
        thread.join()


FAULT = 7


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@settings(max_examples=50)
@given(st.data())
def test_all_tokens_arrive_in_order(data: st.DataObject) -> None:
    """The order holds for any interleaving of steps with the event loop."""

    async def main() -> None:
        llm = ScriptedLLM()
        names = ["a", "b", "c"]
        tokens: dict[str, list[int]] = {name: [] for name in names}
        received: dict[str, list[Any]] = {name: [] for name in names}
        for name in names:
            llm.start([1], SamplingParams(), name, lambda output, name=name: received[name].append(output.delta))
        for _ in range(data.draw(st.integers(1, 10))):
            stepping = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
            for name in stepping:
                tokens[name].append(ord("a") + len(tokens[name]))
            llm.step(**{name: tokens[name][-1] for name in stepping})
            if data.draw(st.booleans()):
                await settle()
        await settle()
        for name in names:
            assert "".join(received[name]) == "".join(map(chr, tokens[name]))
            assert llm._running[name][0].copy().tokens == tokens[name]

    asyncio.run(main())


def test_the_loop_wakes_up_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        llm = ScriptedLLM()
        loop = asyncio.get_running_loop()
        woken = []
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: woken.append(args))
        names = [f"r{number}" for number in range(64)]
        for name in names:
            llm.start([1], SamplingParams(), name, lambda output: None)
        llm.step(**dict.fromkeys(names, ord("a")))
        assert len(woken) == 1

    asyncio.run(main())


def test_an_error_reaches_only_its_own_request() -> None:
    async def main() -> None:
        llm = ScriptedLLM()
        received: dict[str, list[Any]] = {"a": [], "b": [], "c": []}
        for name in received:
            llm.start([1], SamplingParams(), name, received[name].append)
        llm.step(a=FAULT, b=EngineDead("gone"), c=ord("x"))
        llm.step(a=ord("y"), b=ord("y"), c=None)
        await settle()
        assert [type(one) for one in received["a"]] == [ZeroDivisionError]
        assert [type(one) for one in received["b"]] == [EngineDead]
        assert [one.finished for one in received["c"]] == [True, True]  # always the same object, which has grown since
        assert received["c"][0].text == "x"
        assert llm._running == {}

    asyncio.run(main())


def test_a_failing_callback_does_not_affect_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        llm = ScriptedLLM()
        received: list[Any] = []

        def fail(output: RequestOutput | Exception) -> None:
            raise ZeroDivisionError

        llm.start([1], SamplingParams(), "a", fail)
        llm.start([1], SamplingParams(), "b", received.append)
        llm.step(a=ord("x"), b=ord("x"))
        await settle()
        assert [one.text for one in received] == ["x"]
        assert "request a" in caplog.text

    asyncio.run(main())


def test_updates_for_a_closed_loop_do_no_harm() -> None:
    """They must not stop the client's thread, which serves other loops too."""
    llm = ScriptedLLM()

    async def main() -> None:
        llm.start([1], SamplingParams(), "a", lambda output: None)

    asyncio.run(main())
    llm.callbacks["a"]([RequestUpdate("a", EngineCoreOutput("a", (1,)), 0.0)])


def test_the_ranks_learn_of_an_end_by_a_stop_string() -> None:
    """A stop string ends a request; and the callback of an aborted request is not called again."""

    async def main() -> None:
        llm = ScriptedLLM()
        received: list[RequestOutput | Exception] = []
        llm.start([1], SamplingParams(stop=("b",)), "a", received.append)
        llm.start([1], SamplingParams(), "c", received.append)
        llm.step(a=ord("a"))
        llm.step(a=ord("b"))
        await settle()
        assert llm.aborted == ["a"]
        llm.abort("c")
        llm.abort("c")
        count = len(received)
        llm.step(a=ord("x"), c=ord("x"))
        await settle()
        assert llm.aborted == ["a", "c"]
        assert len(received) == count == 2
        (output,) = {id(one): one for one in received}.values()
        assert isinstance(output, RequestOutput)
        assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "b")

    asyncio.run(main())
