"""A server that starts a new engine when one dies."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shotcast.errors import ConfigError, EngineDead
from shotcast.server.config import ServerConfig
from shotcast.server.main import bind, run
from shotcast.server.startup import refuse_requests

if TYPE_CHECKING:
    from shotcast.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

MAX_FAILURES = 8
"""The server gives up after this many deaths and failed starts in a row."""
STABLE_S = 60.0
"""An engine that has served for this many seconds ends a row of failures."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 30.0


def run_with_restarts(
    start: Callable[[], AsyncLLM],
    config: ServerConfig,
    on_listening: Callable[[int], None] | None = None,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Serve as :func:`run` does, but when an engine dies, start another one that serves at the same port.

    Clients can connect from the start; until an engine is ready, they get 503.

    If that one cannot be started, for example because the memory of the dead one is not free yet, or dies soon, the
    pause before the next one is twice as long. The first engine has to start: its problem is unlikely to pass.

    Args:
        start: creates an engine that is ready.
        config: the configuration of the server.
        on_listening: called with the port each time that an engine serves.
        pause: waits for this many seconds.
        clock: returns the time in seconds.

    Returns:
        The exit code of the process: 0 after a signal, 1 after MAX_FAILURES failures in a row, the last one a death.

    Raises:
        ConfigError, EngineDead: the first engine, or the last of MAX_FAILURES in a row, could not start or listen.
    """
    failures = 0
    since = math.inf  # when the engine began to serve
    served = False

    def listening(port: int) -> None:
        nonlocal since, served
        since, served = clock(), True
        if on_listening is not None:
            on_listening(port)

    with bind(config) as address:
        while True:
            since = math.inf
            try:
                with refuse_requests(address, config):
                    if failures:
                        pause_s = min(_FIRST_PAUSE_S * 2 ** (failures - 1), _MAX_PAUSE_S)
                        logger.info("starting the engine again in %g s", pause_s)
                        pause(pause_s)
                    engine = start()
                if run(engine, config, listening, address.dup()) == 0:
                    return 0
            except (ConfigError, EngineDead) as error:
                if not served or failures + 1 == MAX_FAILURES:
                    raise
                logger.error("the engine could not be started again: %s", error)
            failures = 1 if clock() - since >= STABLE_S else failures + 1
            if failures == MAX_FAILURES:
                logger.error("%d engines in a row died or could not be started: giving up", MAX_FAILURES)
                return 1
