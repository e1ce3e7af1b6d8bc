"""The ends of requests and of the server: clients that disconnect, engines that die, signals."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from live_server import Live, eventually, live
from scripted_engine import ScriptedEngine

from shotcast.engine.outputs import EngineStats, FinishReason, OutputCallback, RequestOutput
from shotcast.engine.sampling_params import SamplingParams
from shotcast.errors import ConfigError
from shotcast.server.api_error import ApiError
from shotcast.server.config import ServerConfig
from shotcast.server.main import run
from shotcast.server.metrics import Metrics
from shotcast.server.service import _Sequences

pytestmark = pytest.mark.timing

HELLO = [{"role": "user", "content": "hello"}]


def held(after: int = 2) -> ScriptedEngine:
    engine = ScriptedEngine()
    engine.hold_after = after
    return engine


def head(length: int) -> bytes:
    lines = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {length}")
    return "\r\n".join([*lines, "", ""]).encode()


@contextmanager
def raw_request(server: Live, body: object) -> Iterator[socket.socket]:
    content = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head(len(content)) + content)
        yield connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 2], ids=["before the first token", "after some"])
def test_a_client_that_disconnects_aborts_its_sequences(stream: bool, after: int) -> None:
    engine = held(after)
    with live(engine) as server:
        with raw_request(server, {"model": "letters", "prompt": ["x", "y"], "n": 2, "stream": stream}) as connection:
            assert eventually(lambda: engine.running == 4)
            if stream and after:
                assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
        assert eventually(lambda: len(engine.aborted) == 4)
        assert sorted(engine.aborted) == sorted(engine.started)
        assert engine.finished == []
        metrics = httpx.get(f"{server.url}/metrics").text
        assert 'shotcast_requests_total{finish_reason="abort"} 4.0' in metrics


def test_an_early_disconnect_disturbs_no_other_client() -> None:
    engine = held()
    with live(engine) as server:
        with server.client().completions.create(model="letters", prompt="stays", stream=True) as stream:
            next(stream)
            with raw_request(server, {"model": "letters", "prompt": "leaves"}):
                assert eventually(lambda: engine.running == 2)
            assert eventually(lambda: len(engine.aborted) == 1)
            server.call(engine.let_go)
            assert "".join(chunk.choices[0].text for chunk in stream).endswith("e")
        assert len(engine.finished) == 1


def test_an_incomplete_body() -> None:
    with live() as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head(99) + b"{")
        assert eventually(lambda: 'responses_total{status="499"} 1.0' in httpx.get(f"{server.url}/metrics").text)
        assert server.engine.started == []


def test_engine_dies_during_a_stream() -> None:
    engine = ScriptedEngine()
    engine.dies_at = 3
    with live(engine) as server:
        answer = server.post("/v1/completions", {"model": "letters", "prompt": "x", "stream": True})
        assert answer.status_code == 200
        *events, last, rest = answer.text.split("\n\n")
        assert "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events) == "abc"
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["message"] == "the engine stopped: rank 1 was killed"
        assert (error["type"], error["code"], rest) == ("server_error", "engine_dead", "")
        assert server.join() == 1


def test_openai_client_raises_when_the_engine_dies_during_a_stream() -> None:
    engine = held()
    with live(engine) as server:
        stream = server.client().chat.completions.create(
            model="letters", messages=[{"role": "user", "content": "x"}], stream=True
        )
        next(stream)
        server.call(engine.die)
        with pytest.raises(openai.APIError, match="rank 1 was killed"):
            list(stream)
        assert server.join() == 1


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_a_stream_that_fails_before_its_first_text_is_an_error(kind: str) -> None:
    """Tokens without text, such as parts of characters, do not begin a stream."""
    engine = ScriptedEngine()
    engine.textless, engine.dies_at = 3, 3
    prompt = {"prompt": "x", "echo": True} if kind == "completions" else {"messages": HELLO}
    with live(engine) as server:
        response = server.post(f"/v1/{kind}", {"model": "letters", "stream": True, **prompt})
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "engine_dead"
        assert server.join() == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_quiet_stream_sends_comments(fails: bool) -> None:
    """A comment sends the status, so a later error is an event."""
    engine = held(after=0)
    if fails:
        engine.fault = ZeroDivisionError()
    with live(engine, ping_s=0.05) as server:
        body = {"model": "letters", "prompt": "x", "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=100) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            assert [next(lines) for _ in range(6)] == [": ping", ""] * 3
            server.call(engine.let_go)
            events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    if fails:
        (error,) = map(json.loads, events)
        assert error["error"]["type"] == "server_error"
    else:
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == "abcde"
        assert events[-1] == "[DONE]"


def test_a_stream_that_sends_events_sends_no_comments() -> None:
    engine = ScriptedEngine()
    engine.delay_s = 0.05
    with live(engine, ping_s=1.0) as server:
        body = {"model": "letters", "prompt": "x" * 50, "stream": True}
        # on a busy machine an event may come late
        answers = (server.post("/v1/completions", body).text for _ in range(5))
        assert any("ping" not in text for text in answers)


@pytest.mark.parametrize("stream", [False, True])
def test_engine_dies_before_the_first_token(stream: bool) -> None:
    engine = ScriptedEngine()
    engine.dies_at = 0
    with live(engine) as server:
        answer = server.post("/v1/completions", {"model": "letters", "prompt": "x", "stream": stream})
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "engine_dead"
        assert server.join() == 1


def test_a_dead_engine_is_reported_until_the_server_ends() -> None:
    engine = ScriptedEngine()
    with live(engine) as server:
        with httpx.Client(base_url=server.url) as client:
            assert client.get("/health").json() == {"status": "ok"}
            engine.dead = RuntimeError("rank 0 was killed")  # before the server notices
            completion = client.post("/v1/completions", json={"model": "letters", "prompt": "x"})
            for answer, status in ((client.get("/health"), 503), (completion, 500)):
                assert answer.status_code == status
                assert answer.json()["error"]["code"] == "engine_dead"
            metrics = client.get("/metrics").text
            assert "shotcast_engine_up 0.0" in metrics
            assert "shotcast_requests_running" not in metrics
        server.call(engine.die)
        assert server.join() == 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_output_that_ends_with_an_error_is_an_error(stream: bool) -> None:
    engine = ScriptedEngine()
    engine.end_reason, engine.end_error = "error", "the logits are not numbers"
    with live(engine) as server:
        answer = server.post("/v1/completions", {"model": "letters", "prompt": "x", "stream": stream})
        assert answer.status_code == (200 if stream else 500)
        assert "the logits are not numbers" in answer.text
        assert '"code":"generation_failed"' in answer.text
        assert "[DONE]" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_an_output_that_the_engine_aborts_is_an_error(stream: bool) -> None:
    engine = ScriptedEngine()
    engine.end_reason = "abort"
    with live(engine) as server:
        answer = server.post("/v1/completions", {"model": "letters", "prompt": "x", "stream": stream})
        assert answer.status_code == (200 if stream else 503)
        assert '"code":"aborted"' in answer.text
        assert "[DONE]" not in answer.text


def test_stop_lets_requests_finish() -> None:
    engine = held()
    with live(engine) as server:
        stream = server.client().completions.create(model="letters", prompt="x", stream=True)
        text = next(stream).choices[0].text
        server.call(server.stop.set)
        assert eventually(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        answer = server.post("/v1/completions", {"model": "letters", "prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        server.call(engine.let_go)
        assert text + "".join(chunk.choices[0].text for chunk in stream) == "abcde"
        assert server.join() == 0
    assert engine.closed


def test_stop_ends_requests_that_take_too_long() -> None:
    engine = held()
    with live(engine, drain_s=0.2) as server:
        stream = server.client().completions.create(model="letters", prompt="x", stream=True)
        next(stream)
        server.call(server.stop.set)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        assert server.join() == 0
    assert len(engine.aborted) == 1


def test_engine_dies_while_the_server_stops() -> None:
    engine = held()
    with live(engine) as server:
        stream = server.client().completions.create(model="letters", prompt="x", stream=True)
        next(stream)
        server.call(server.stop.set)
        assert eventually(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        server.call(engine.die)
        with pytest.raises(openai.APIError, match="rank 1 was killed"):
            list(stream)
        assert server.join() == 0, "it was told to stop, and has"


@contextmanager
def process(drain_s: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server process whose outputs never end by themselves, and yield it with its address."""
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from scripted_engine import ScriptedEngine
from shotcast.server.config import ServerConfig
from shotcast.server.main import run
engine = ScriptedEngine()
engine.hold_after = 2
code = run(engine, ServerConfig(port=0, drain_s={drain_s}), lambda port: print(port, flush=True))
print("closed" if engine.closed else "left open", len(engine.aborted), flush=True)
sys.exit(code)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            yield child, f"http://127.0.0.1:{int(child.stdout.readline())}"
        finally:
            child.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_in_order(number: signal.Signals) -> None:
    with process(drain_s=0.1) as (child, url):
        body = {"model": "letters", "prompt": "x", "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=100) as answer:
            lines = answer.iter_lines()
            assert '"text":"a"' in next(lines)
            child.send_signal(number)
            assert "shutting down" in list(lines)[-2]
        assert child.wait(100) == 0
        assert child.stdout is not None
        assert child.stdout.read() == "closed 1\n"


@pytest.mark.full
def test_a_second_signal_does_not_wait() -> None:
    with process(drain_s=1000) as (child, url):
        body = {"model": "letters", "prompt": "x", "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=100) as answer:
            lines = answer.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            assert eventually(lambda: httpx.get(f"{url}/health").status_code == 503)
            started = time.monotonic()
            child.send_signal(signal.SIGTERM)
            list(lines)
        assert child.wait(100) == 0
        assert time.monotonic() - started < 100  # of 1000


def test_a_port_in_use() -> None:
    engine = ScriptedEngine()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1, port {port}"):
            run(engine, ServerConfig(port=port))
    assert engine.closed


def test_a_public_host_without_a_key_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    for host, key, warned in (("0.0.0.0", None, True), ("0.0.0.0", "key", False), ("127.0.0.1", None, False)):
        caplog.clear()
        with live(host=host, api_key=key):
            assert ("no API key" in caplog.text) == warned


class Told:
    """An engine whose updates the test scripts before anybody reads them."""

    dead = None

    def __init__(self) -> None:
        self.listeners: list[OutputCallback] = []
        self.aborted: list[str] = []

    def start(self, prompt: list[int], params: SamplingParams, request_id: str, listen: OutputCallback) -> None:
        self.listeners.append(listen)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def stats(self) -> EngineStats:
        return EngineStats()


@pytest.mark.parametrize(("reason", "status"), [("error", 500), ("abort", 503)])
@pytest.mark.parametrize("choices", [1, 2])
def test_an_output_that_grew_before_it_failed_is_a_failure(reason: FinishReason, status: int, choices: int) -> None:
    """The earlier, unread update is the same object, which by then says how it ended."""

    async def main() -> None:
        engine: Any = Told()
        updates = _Sequences(engine, Metrics(engine)).run([((1,), SamplingParams())] * choices, "r")
        reading = asyncio.create_task(anext(updates))
        await asyncio.sleep(0)
        output = RequestOutput("r-0", (1,), tokens=[2], delta="a")
        engine.listeners[0](output)
        output.finish_reason, output.error = reason, "the logits are not numbers"
        engine.listeners[0](output)
        with pytest.raises(ApiError) as raised:
            await reading
        assert raised.value.status == status
        assert engine.aborted == [f"r-{number}" for number in range(1, choices)]

    asyncio.run(main())
