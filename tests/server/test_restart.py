"""A server whose engines die, one after the other."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import pytest
from scripted_engine import ScriptedEngine

from shotcast.errors import ConfigError, EngineDead
from shotcast.server.config import ServerConfig
from shotcast.server.engine import Engine
from shotcast.server.restart import TRIES, run_again


class Starts:
    """What ``run_again`` is given: engines and errors in turn, and what it made of them.

    Each engine dies as soon as the server listens; instead of the last one's death, a signal comes.
    """

    def __init__(self, *turns: ScriptedEngine | Exception):
        self.turns = list(turns)
        self.begun = 0
        self.ports: list[int] = []
        self.pauses: list[float] = []

    def __call__(self) -> Engine:
        turn = self.turns[min(self.begun, len(self.turns) - 1)]
        self.begun += 1
        if isinstance(turn, Exception):
            raise turn
        self.engine = turn
        return turn

    def listening(self, port: int) -> None:
        self.ports.append(port)
        if self.begun == len(self.turns):
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            asyncio.get_running_loop().call_soon(self.engine.die)

    def run(self) -> int:
        return run_again(self, ServerConfig(port=0), self.listening, self.pauses.append)


def test_the_next_engine_serves_where_the_dead_one_did() -> None:
    first, second, third = (ScriptedEngine() for _ in range(3))
    starts = Starts(first, ConfigError("too little memory"), EngineDead("rank 0 was killed"), second, third)
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


@pytest.mark.parametrize("error", [ConfigError("too little memory"), EngineDead("rank 0 was killed")])
def test_the_first_engine_has_to_start(error: Exception) -> None:
    starts = Starts(error, ScriptedEngine())
    with pytest.raises(type(error), match=str(error)):
        starts.run()
    assert (starts.begun, starts.pauses) == (1, [])


def test_what_cannot_be_started_is_given_up() -> None:
    starts = Starts(ScriptedEngine(), ConfigError("too little memory"))
    with pytest.raises(ConfigError, match="too little memory"):
        starts.run()
    assert starts.begun == 1 + TRIES
    assert starts.pauses == [1, 2, 4, 8, 16, 30, 30, 30]
