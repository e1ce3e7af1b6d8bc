"""The server process: it listens, watches its engine, and shuts down in order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from shotcast.errors import ConfigError
from shotcast.server.api_error import ApiError
from shotcast.server.app import create_app
from shotcast.server.config import ServerConfig
from shotcast.server.service import Service

if TYPE_CHECKING:
    from shotcast.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

FLUSH_S = 5
"""Seconds to send the last responses to slow clients, after all requests have ended."""
_HEADERS = {"Retry-After": "1", "Connection": "close"}
"""Headers that make a client's next request use a new connection, which the server may take over."""


def run(
    llm: AsyncLLM,
    config: ServerConfig,
    on_listening: Callable[[int], None] | None = None,
    address: socket.socket | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM, or until the engine dies, and then close the engine.

    After the first signal, running requests may finish within ``config.drain_s``, and new ones are rejected. A second
    signal ends them at once.

    Args:
        llm: the engine.
        config: the configuration of the server.
        on_listening: called with the port as soon as clients may connect.
        address: the socket from :func:`bind`, which finds out before model loading whether the port is free.

    Returns:
        The exit code of the process: 0 after a signal, 1 if the engine died without one.

    Raises:
        ConfigError: the server cannot listen on the address.
    """
    return asyncio.run(serve(llm, config, on_listening, address=address))


async def serve(
    llm: AsyncLLM,
    config: ServerConfig,
    on_listening: Callable[[int], None] | None = None,
    stop: asyncio.Event | None = None,
    address: socket.socket | None = None,
) -> int:
    """Serve like :func:`run`, in the running event loop; ``stop`` has the effect of a signal, which only reaches the
    main thread.
    """
    try:
        with bind(config) if address is None else address as listener:
            listen(listener, config)
            if not config.loopback and config.api_key is None:
                logger.warning("other machines can reach %s, and there is no API key", config.host)
            service = Service(llm, config)
            server = _Server(create_app(service), service, on_listening, asyncio.Event() if stop is None else stop)
            supervisor = asyncio.create_task(server.supervise())
            gc.freeze()  # a collection that visits what was loaded would stall all requests
            try:
                await server.serve(sockets=[listener])
                return await supervisor
            finally:
                gc.unfreeze()
                supervisor.cancel()
                service.close()
    finally:
        await llm.close()


def bind(config: ServerConfig) -> socket.socket:
    """Return a socket bound to the address, to which clients cannot connect yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # asyncio sends small writes at once (TCP_NODELAY) only where the socket names its protocol.
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
        return bound
    except OSError as error:
        raise _cannot_listen(config, error) from error


def listen(bound: socket.socket, config: ServerConfig) -> None:
    """Let clients connect to a bound socket. Raises ConfigError if the system refuses."""
    try:
        bound.listen(2048)
    except OSError as error:
        raise _cannot_listen(config, error) from error


def _settings(app: ASGIApp, grace_s: int) -> uvicorn.Config:
    return uvicorn.Config(
        cast(Any, app),  # starlette and uvicorn have different types for applications
        log_config=None,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=grace_s,
    )


def _cannot_listen(config: ServerConfig, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {config.host}, port {config.port}: {error}")


@contextlib.contextmanager
def refuse_requests(address: socket.socket, config: ServerConfig) -> Iterator[None]:
    """Answer 503 to every request at a bound socket, on a thread, until the end of the block.

    The socket keeps listening afterwards, and connections not yet accepted wait for the server.
    """
    listen(address, config)
    server = uvicorn.Server(_settings(_respond, 1))
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


class _Server(uvicorn.Server):
    """A uvicorn server that stops only when :meth:`supervise` tells it to."""

    def __init__(self, app: ASGIApp, service: Service, on_listening: Callable[[int], None] | None, stop: asyncio.Event):
        super().__init__(_settings(app, FLUSH_S))
        self._service = service
        self._on_listening = on_listening
        self._stop_event = stop
        self._loop = asyncio.get_running_loop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._on_listening is not None and sockets:
            self._on_listening(sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own handler would reject clients at once, and raise the signal again at the end. That would kill the
        # process instead of returning an exit code.
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._stop_event.is_set():
            self._service.abort()
        self._stop_event.set()

    async def supervise(self) -> int:
        """Wait for a signal or the engine's death, let requests finish, stop the server, and return the exit code."""
        engine = self._service.engine
        dead = asyncio.create_task(engine.wait_dead())
        stopped = asyncio.create_task(self._stop_event.wait())
        try:
            await asyncio.wait((dead, stopped), return_when=asyncio.FIRST_COMPLETED)
            if dead.done():
                logger.error("the engine died: %s", dead.result())
                # All requests have failed, and only their responses are left to send.
                await self._service.drain(FLUSH_S)
            else:
                logger.info("stopping: running requests have %g s to finish", self._service.config.drain_s)
                await self._service.drain(self._service.config.drain_s)
            return 0 if self._stop_event.is_set() else 1
        finally:
            dead.cancel()
            stopped.cancel()
            self.should_exit = True
