"""A server that outlives its engines."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from shotcast.errors import ConfigError, EngineDead
from shotcast.server.config import ServerConfig
from shotcast.server.engine_protocol import Engine
from shotcast.server.main import reserve, run

logger = logging.getLogger(__name__)

TRIES = 8
"""Deaths and failed starts in a row, after which there is no other start."""
STEADY_S = 60.0
"""An engine that has served for so long ends a row."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


def run_again(
    start: Callable[[], Engine],
    config: ServerConfig,
    listening: Callable[[int], None] | None = None,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """As :func:`run`, but where an engine dies the next one is started, and serves at the same port.

    One that cannot be started, as memory may not be free yet that the dead one held, or that dies soon is followed by
    another after twice the pause. The first has to start: what keeps it from that is hardly going to pass.

    Args:
        start: gives an engine that is ready.
        listening: told the port each time that clients may connect.
        pause: waits for so many seconds.
        clock: the time in seconds.

    Returns:
        the exit code of the process: 0 after a signal, 1 when TRIES in a row came to nothing, the last of which died.

    Raises:
        ConfigError, EngineDead: the first, or the last of TRIES in a row, could not be started or could not listen.
    """
    failed = 0
    since = math.inf  # when it began to listen
    served = False

    def told(port: int) -> None:
        nonlocal config, since, served
        config = replace(config, port=port)
        since, served = clock(), True
        if listening is not None:
            listening(port)

    while True:
        since = math.inf
        try:
            with reserve(config) as address:
                if run(start(), config, told, address) == 0:
                    return 0
        except (ConfigError, EngineDead) as error:
            if not served or failed + 1 == TRIES:
                raise
            logger.error("the server could not be started again: %s", error)
        failed = 1 if clock() - since >= STEADY_S else failed + 1
        if failed == TRIES:
            logger.error("%d engines in a row died or could not be started: giving up", TRIES)
            return 1
        pause_s = min(_FIRST_PAUSE_S * 2 ** (failed - 1), _LONGEST_PAUSE_S)
        logger.info("starting the engine again in %g s", pause_s)
        pause(pause_s)
