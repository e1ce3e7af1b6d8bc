"""A server whose engines die one after another."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import ExitStack

import httpx
import pytest
from scripted_engine import ScriptedEngine

from shotcast.errors import ConfigError, EngineDead
from shotcast.server.config import ServerConfig
from shotcast.server.main import MAX_FAILURES, STABLE_S, bind, refuse_requests, run, run_with_restarts

pytestmark = pytest.mark.timing


class Starts:
    """The arguments of ``run_with_restarts``: engines and errors in turn, the last one repeatedly, and what happened.

    Each engine dies ``lives_s`` after the server listens; the ``stopped``-th start gets a signal instead, or, with
    ``both``, just before.
    """

    def __init__(self, *turns: ScriptedEngine | Exception, lives_s: float = 0.0, stopped: int = 0, both: bool = False):
        self.turns, self.lives_s, self.stopped, self.both = list(turns), lives_s, stopped, both
        self.begun = 0
        self.now = 0.0
        self.ports: list[int] = []
        self.pauses: list[float] = []

    def __call__(self) -> ScriptedEngine:
        turn = self.turns[min(self.begun, len(self.turns) - 1)]
        self.begun += 1
        if isinstance(turn, Exception):
            raise turn
        self.engine = ScriptedEngine() if turn.closed else turn
        return self.engine

    def listening(self, port: int) -> None:
        self.ports.append(port)
        if self.begun == self.stopped:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.begun != self.stopped or self.both:
            self.now += self.lives_s
            asyncio.get_running_loop().call_soon(self.engine.die)

    def run(self) -> int:
        return run_with_restarts(self, ServerConfig(port=0), self.listening, self.pauses.append, lambda: self.now)


def test_the_next_engine_serves_at_the_same_port() -> None:
    first, second, third = (ScriptedEngine() for _ in range(3))
    turns = first, ConfigError("too little memory"), EngineDead("rank 0 was killed"), second, third
    starts = Starts(*turns, lives_s=STABLE_S, stopped=5)
    assert starts.run() == 0
    assert starts.begun == 5
    assert len(starts.ports) == 3
    assert len(set(starts.ports)) == 1
    assert starts.pauses == [1, 2, 4, 1]
    assert first.closed
    assert second.closed
    assert third.closed
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{starts.ports[0]}/health")


def test_a_signal_is_not_lost_if_the_engine_dies_of_it() -> None:
    starts = Starts(ScriptedEngine(), stopped=1, both=True)
    assert starts.run() == 0
    assert (starts.begun, starts.pauses) == (1, [])


@pytest.mark.parametrize("error", [ConfigError("too little memory"), EngineDead("rank 0 was killed")])
def test_the_first_engine_has_to_start(error: Exception) -> None:
    starts = Starts(error, ScriptedEngine())
    with pytest.raises(type(error), match=str(error)):
        starts.run()
    assert (starts.begun, starts.pauses) == (1, [])


def test_engines_that_cannot_be_started_are_given_up() -> None:
    starts = Starts(ScriptedEngine(), ConfigError("too little memory"))
    with pytest.raises(ConfigError, match="too little memory"):
        starts.run()
    assert starts.begun == MAX_FAILURES
    assert starts.pauses == [1, 2, 4, 8, 16, 30, 30]


def test_engines_that_die_at_once_are_given_up() -> None:
    starts = Starts(ScriptedEngine(), lives_s=STABLE_S / 2)
    assert starts.run() == 1
    assert starts.begun == MAX_FAILURES
    assert starts.pauses == [1, 2, 4, 8, 16, 30, 30]


def test_nothing_is_loaded_for_a_port_in_use() -> None:
    starts = Starts(ScriptedEngine())
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen on"):
        run_with_restarts(starts, ServerConfig(port=taken.getsockname()[1]))
    assert starts.begun == 0


def test_requests_get_503_until_an_engine_is_ready() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    config = ServerConfig(port=int(url.rpartition(":")[2]))
    starts = Starts(ScriptedEngine(), ConfigError("too little memory"), ScriptedEngine(), lives_s=STABLE_S, stopped=3)
    refused: list[str] = []

    def refuse(when: str) -> None:
        health = httpx.get(f"{url}/health")
        body = {"model": "letters", "prompt": "x" * 100_000}
        for response in (health, httpx.post(f"{url}/v1/completions", json=body)):
            assert (response.status_code, response.json()["error"]["code"]) == (503, "starting")
            assert (response.headers["retry-after"], response.headers["connection"]) == ("1", "close")
        refused.append(when)

    def start() -> ScriptedEngine:
        refuse("start")
        return starts()

    assert run_with_restarts(start, config, starts.listening, lambda _: refuse("pause"), lambda: starts.now) == 0
    assert refused == ["start", "pause", "start", "pause", "start"]


def test_a_connection_that_waits_at_the_end_of_the_start_is_served() -> None:
    engine, waiting, answers = ScriptedEngine(), ExitStack(), []

    def listening(port: int) -> None:
        asyncio.get_running_loop().call_soon(lambda: asyncio.create_task(read()))

    async def read() -> None:
        connection.setblocking(False)
        answers.append(await asyncio.get_running_loop().sock_recv(connection, 100))
        os.kill(os.getpid(), signal.SIGTERM)

    config = ServerConfig(port=0)
    with waiting, bind(config) as address:
        with refuse_requests(address, config):
            pass
        connection = waiting.enter_context(socket.create_connection(address.getsockname()))
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert run(engine, config, listening, address.dup()) == 0
    assert answers[0].startswith(b"HTTP/1.1 200")
