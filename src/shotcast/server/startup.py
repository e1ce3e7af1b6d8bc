"""Responses while no engine is ready: 503, so that clients and load balancers wait instead of failing to connect."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any, cast

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from shotcast.server.api_error import ApiError
from shotcast.server.config import ServerConfig
from shotcast.server.main import listen

_HEADERS = {"Retry-After": "1", "Connection": "close"}
"""The next request of a client needs a new connection, which the server may take over."""


@contextlib.contextmanager
def refuse_requests(address: socket.socket, config: ServerConfig) -> Iterator[None]:
    """Answer 503 to every request at a bound socket, on a thread, until the end of the block.

    The socket keeps listening afterwards, and connections that are not accepted by then wait for the server.

    Raises:
        ConfigError: the socket cannot listen.
    """
    listen(address, config)
    settings = uvicorn.Config(
        cast(Any, _respond),  # starlette and uvicorn have different types for applications
        log_config=None,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(settings)
    listener = address.dup()  # which uvicorn closes
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[listener])), name="shotcast-startup", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


async def _respond(scope: Scope, receive: Receive, send: Send) -> None:
    error = ApiError(503, "the engine is starting; try again later", code="starting", headers=_HEADERS)
    await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)
