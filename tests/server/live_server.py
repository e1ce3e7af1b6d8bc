"""A real server in a thread of the test process, on a free port."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import httpx
import openai
from scripted_engine import ScriptedEngine

from shotcast.server.config import ServerConfig
from shotcast.server.main import serve

PARSED = "[" + ",".join(['{"role": "user", "content": 1}'] * 33_000) + "]"
"""A megabyte, as much as a body may have."""


@functools.cache
def max_lag_s() -> float:
    """Return the longest time for which a request may hold the event loop; a slow machine has more of it."""
    times = []
    for _ in range(5):
        used = time.process_time()
        json.loads(PARSED)
        times.append(time.process_time() - used)
    return max(0.05, 4 * min(times))


@dataclass
class Live:
    engine: ScriptedEngine
    thread: threading.Thread | None = None
    port: int = 0
    exit_code: int | None = None
    loop: asyncio.AbstractEventLoop | None = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=100)

    def post(self, path: str, body: object, **options: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=100, **options)

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the server's event loop."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(function)

    def join(self) -> int | None:
        assert self.thread is not None
        self.thread.join(100)
        assert not self.thread.is_alive()
        return self.exit_code


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


@contextmanager
def live(engine: ScriptedEngine | None = None, **config: object) -> Iterator[Live]:
    server = Live(engine or ScriptedEngine())
    ready = threading.Event()

    def listening(port: int) -> None:
        server.port = port
        ready.set()

    async def main() -> int:
        server.loop = asyncio.get_running_loop()
        return await serve(server.engine, ServerConfig(port=0, **config), listening, server.stop)

    def work() -> None:
        server.exit_code = asyncio.run(main())

    server.thread = threading.Thread(target=work)
    server.thread.start()
    assert ready.wait(100)
    try:
        yield server
    finally:
        with suppress(RuntimeError):  # its loop is closed, since it has stopped by itself
            server.call(server.engine.let_go)
            server.call(server.stop.set)
        server.join()
        assert server.engine.closed


class LoopLag:
    """The longest time for which this process held the event loop of a server.

    Time in which other processes had the processors does not count: it is the wall time of a turn, but at most the
    processor time that all threads of this process took in it. So a call that waits without a processor is not seen.
    (Linux counts how long threads were ready to run, but on a busy machine not all of it.)
    """

    def __init__(self) -> None:
        self.max_s = 0.0

    async def watch(self) -> None:
        while True:
            started, used = time.perf_counter(), time.process_time()
            try:
                await asyncio.sleep(0.001)
            finally:  # the turn in which the watch ends counts too
                took = time.perf_counter() - started - 0.001
                self.max_s = max(self.max_s, min(took, time.process_time() - used))


@contextmanager
def loop_lag(server: Live) -> Iterator[LoopLag]:
    lag = LoopLag()
    assert server.loop is not None
    watch: Future[None] = asyncio.run_coroutine_threadsafe(lag.watch(), server.loop)
    try:
        yield lag
    finally:
        watch.cancel()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), server.loop).result(100)  # after the end of the watch
