"""A server whose engines die one after another."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import httpx
import pytest
from scripted_engine import ScriptedEngine

from shotcast.errors import ConfigError, EngineDead
from shotcast.server.config import ServerConfig
from shotcast.server.engine_protocol import Engine
from shotcast.server.restart import MAX_FAILURES, STABLE_S, run_with_restarts

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

    def __call__(self) -> Engine:
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


def test_no_client_connects_before_the_engine_is_ready() -> None:
    starts = Starts(ScriptedEngine(), ScriptedEngine(), lives_s=STABLE_S, stopped=2)
    refused: list[bool] = []

    def start() -> Engine:
        if starts.ports:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", starts.ports[0]), timeout=5)
            refused.append(True)
        return starts()

    assert (
        run_with_restarts(start, ServerConfig(port=0), starts.listening, starts.pauses.append, lambda: starts.now) == 0
    )
    assert refused == [True]
