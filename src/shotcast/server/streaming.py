"""Server-sent events, and detection of clients that disconnect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""

_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
"""Escapes of the characters that JSON leaves as they are, but at which ``str.splitlines``, and so some clients, end a
line."""


def event(data: dict[str, Any]) -> bytes:
    """Format a JSON object as a server-sent event."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).translate(_LINE_ENDS)
    return b"data: " + text.encode() + b"\n\n"


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Do the work, or cancel it and return None when the client disconnects. The request's body was read before."""

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
    """A response of server-sent events, which ends as soon as the client disconnects.

    The status is sent with the first event, so an error before that has a response of its own.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]):
        self.status_code = 200
        self.background = None
        self._events = events
        # Without X-Accel-Buffering, nginx would collect events into larger pieces.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        started = False
        async with aclosing(self._events) as events:
            async for data in events:
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
