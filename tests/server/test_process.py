"""The server process: from its address, bound before the engine starts, to the end of the engine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack

import httpx
import pytest
from scripted_engine import ScriptedEngine

from shotcast.errors import ConfigError
from shotcast.server.config import ServerConfig
from shotcast.server.main import bind, refuse_requests, run

pytestmark = pytest.mark.timing


def ending(*ends: Callable[[], None]) -> tuple[Callable[[int], None], list[int]]:
    """Return what to call when the server listens, which ends it in these ways, and the ports that it was given."""
    ports: list[int] = []

    def listening(port: int) -> None:
        ports.append(port)
        for end in ends:
            asyncio.get_running_loop().call_soon(end)

    return listening, ports


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_exit_code_says_whether_the_engine_died() -> None:
    """A supervisor starts the server again by it, so it is not that of a server that was told to stop."""
    for code in (1, 0):
        engine = ScriptedEngine()
        listening, ports = ending(engine.die if code else stop)
        assert run(engine, ServerConfig(port=0), listening) == code
        assert engine.closed
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{ports[0]}/health")


def test_a_signal_is_not_lost_if_the_engine_dies_of_it() -> None:
    engine = ScriptedEngine()
    stop_and_die, _ = ending(engine.die)

    def listening(port: int) -> None:
        stop()
        stop_and_die(port)

    assert run(engine, ServerConfig(port=0), listening) == 0


def test_a_port_in_use_is_known_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen on"):
        bind(ServerConfig(port=taken.getsockname()[1]))


def test_requests_get_503_until_an_engine_is_ready() -> None:
    config = ServerConfig(port=0)
    with bind(config) as address:
        url = f"http://127.0.0.1:{address.getsockname()[1]}"
        with refuse_requests(address, config):
            health = httpx.get(f"{url}/health")
            body = {"model": "letters", "prompt": "x" * 100_000}
            for response in (health, httpx.post(f"{url}/v1/completions", json=body)):
                assert (response.status_code, response.json()["error"]["code"]) == (503, "starting")
                assert (response.headers["retry-after"], response.headers["connection"]) == ("1", "close")
        listening, ports = ending(stop)
        assert run(ScriptedEngine(), config, listening, address.dup()) == 0
        assert url.endswith(f":{ports[0]}")


def test_a_connection_that_waits_at_the_end_of_the_start_is_served() -> None:
    engine, waiting, answers = ScriptedEngine(), ExitStack(), []

    def listening(port: int) -> None:
        asyncio.get_running_loop().call_soon(lambda: asyncio.create_task(read()))

    async def read() -> None:
        connection.setblocking(False)
        answers.append(await asyncio.get_running_loop().sock_recv(connection, 100))
        stop()

    config = ServerConfig(port=0)
    with waiting, bind(config) as address:
        with refuse_requests(address, config):
            pass
        connection = waiting.enter_context(socket.create_connection(address.getsockname()))
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert run(engine, config, listening, address.dup()) == 0
    assert answers[0].startswith(b"HTTP/1.1 200")
