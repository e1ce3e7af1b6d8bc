"""The server as a process: it listens, watches its engine, and stops in order."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from shotcast.errors import ConfigError
from shotcast.server.app import create_app
from shotcast.server.config import ServerConfig
from shotcast.server.engine_protocol import Engine
from shotcast.server.service import Service

logger = logging.getLogger(__name__)

LAST_WORDS_S = 5
"""For answers on their way to slow clients, once nothing runs any more."""


def run(
    llm: Engine,
    config: ServerConfig,
    listening: Callable[[int], None] | None = None,
    address: socket.socket | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM, or until the engine dies; then close it.

    The first signal lets running requests end, for up to ``config.drain_s``, and refuses others; the second ends them
    at once.

    Args:
        listening: told the port as soon as clients may connect.
        address: what :func:`reserve` gave, to know before a model is loaded whether its port can be had.

    Returns:
        the exit code of the process: 0 after a signal, 1 when the engine died without one.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    return asyncio.run(serve(llm, config, listening, address=address))


async def serve(
    llm: Engine,
    config: ServerConfig,
    listening: Callable[[int], None] | None = None,
    stop: asyncio.Event | None = None,
    address: socket.socket | None = None,
) -> int:
    """:func:`run` in an event loop that runs already.

    Args:
        stop: setting it does what a signal does; outside the main thread, where none arrives, it is the way to stop.
    """
    try:
        with reserve(config) if address is None else address as listener:
            _listen(listener, config)
            if not config.loopback and config.api_key is None:
                logger.warning("%s can be reached from other machines, and there is no API key", config.host)
            service = Service(llm, config)
            server = _Server(create_app(service), service, listening, asyncio.Event() if stop is None else stop)
            supervisor = asyncio.create_task(server.supervise())
            try:
                await server.serve(sockets=[listener])
                return await supervisor
            finally:
                supervisor.cancel()
                service.close()
    finally:
        await llm.close()


def reserve(config: ServerConfig) -> socket.socket:
    """A socket that has the address, to which nobody can connect yet.

    Raises:
        ConfigError: it cannot be had.
    """
    try:
        family, kind, *_, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        reserved = socket.socket(family, kind)
        try:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            reserved.bind(address)
        except BaseException:
            reserved.close()
            raise
        return reserved
    except OSError as error:
        raise _cannot_listen(config, error) from error


def _listen(reserved: socket.socket, config: ServerConfig) -> None:
    try:
        reserved.listen(2048)
    except OSError as error:
        raise _cannot_listen(config, error) from error


def _cannot_listen(config: ServerConfig, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {config.host}, port {config.port}: {error}")


class _Server(uvicorn.Server):
    """uvicorn, told to stop by :meth:`supervise` alone."""

    def __init__(self, app: ASGIApp, service: Service, listening: Callable[[int], None] | None, stop: asyncio.Event):
        super().__init__(
            uvicorn.Config(
                cast(Any, app),  # starlette and uvicorn each have types of their own for the same
                log_config=None,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_graceful_shutdown=LAST_WORDS_S,
            )
        )
        self._service = service
        self._listening = listening
        self._told_to_stop = stop
        self._loop = asyncio.get_running_loop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._listening is not None and sockets:
            self._listening(sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own would close the door at once, and raise the signal again when all is done, which then ends the
        # process as if nothing had been in order.
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._told_to_stop.is_set():
            self._service.abort()
        self._told_to_stop.set()

    async def supervise(self) -> int:
        """Wait for a signal or for the engine's death, see that requests come to an end, and stop.

        Returns:
            the exit code.
        """
        engine = self._service.engine
        dead = asyncio.create_task(engine.wait_dead())
        stopped = asyncio.create_task(self._told_to_stop.wait())
        try:
            await asyncio.wait((dead, stopped), return_when=asyncio.FIRST_COMPLETED)
            if dead.done():
                logger.error("the engine died: %s", dead.result())
                await self._service.drain(LAST_WORDS_S)  # they have all failed, and only have to say so
            else:
                logger.info("stopping: requests that run have %g s to end", self._service.config.drain_s)
                await self._service.drain(self._service.config.drain_s)
            return 0 if self._told_to_stop.is_set() else 1
        finally:
            dead.cancel()
            stopped.cancel()
            self.should_exit = True
