"""Server-sent events, and detection of clients that disconnect."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""

PING = b": ping\n\n"
"""A comment, which clients ignore."""

_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
"""Escapes of characters that JSON leaves unescaped, but at which ``str.splitlines``, and so some clients, break
lines.
"""


def event(data: dict[str, Any]) -> bytes:
    """Format a JSON object as a server-sent event."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).translate(_LINE_ENDS)
    return b"data: " + text.encode() + b"\n\n"


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Do the work, or cancel it and return None if the client disconnects. The request body must have been read."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream(Response):
    """A response of server-sent events that ends as soon as the client disconnects.

    The status is sent with the first event or ping, so an earlier error gets a separate response. A later one is sent
    as an event, and ends the stream.

    Args:
        ping_s: seconds of silence after which a comment is sent, since proxies close idle connections.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], error_event: Callable[[Exception], bytes], ping_s: float = math.inf
    ):
        self.status_code = 200
        self.background = None
        self._events = events
        self._error_event = error_event
        self._ping_s = ping_s
        self._started = False
        self._last_sent = 0.0
        self._sending = asyncio.Lock()
        # Without X-Accel-Buffering, nginx would collect events into larger pieces.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        pings = asyncio.create_task(self._send_pings(send))
        try:
            async with aclosing(self._events) as events:
                async for data in events:
                    await self._send(send, data)
        except Exception as error:
            if not self._started:
                raise
            await self._send(send, self._error_event(error))
        finally:
            pings.cancel()
            await asyncio.gather(pings, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        async with self._sending:
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._last_sent = asyncio.get_running_loop().time()

    async def _send_pings(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._last_sent = loop.time()
        while math.isfinite(self._ping_s):
            quiet_s = loop.time() - self._last_sent
            if quiet_s < self._ping_s:
                await asyncio.sleep(self._ping_s - quiet_s)
            else:
                await self._send(send, PING)
