"""A server that outlives its engines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from shotcast.errors import ConfigError, EngineDead
from shotcast.server.config import ServerConfig
from shotcast.server.engine import Engine
from shotcast.server.main import run

logger = logging.getLogger(__name__)

TRIES = 8
"""To start an engine again, one after the other, before it is given up."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


def run_again(
    start: Callable[[], Engine],
    config: ServerConfig,
    listening: Callable[[int], None] | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """As :func:`run`, but where an engine dies the next one is started, and serves at the same port.

    One that cannot be started, as memory may not be free yet that the dead one held, is tried again after twice the
    pause. The first has to start at once: what keeps it from that is hardly going to pass.

    Args:
        start: gives an engine that is ready.
        listening: told the port each time that clients may connect.
        pause: waits for so many seconds.

    Returns:
        0, after a signal.

    Raises:
        ConfigError, EngineDead: the first engine, or TRIES in a row, could not be started or could not listen.
    """
    served = failed = 0

    def told(port: int) -> None:
        nonlocal config, served, failed
        config = replace(config, port=port)
        served, failed = served + 1, 0
        if listening is not None:
            listening(port)

    while True:
        try:
            if run(start(), config, told) == 0:
                return 0
        except (ConfigError, EngineDead) as error:
            failed += 1
            if not served or failed == TRIES:
                raise
            logger.error("the engine could not be started: %s", error)
        pause_s = min(_FIRST_PAUSE_S * 2**failed, _LONGEST_PAUSE_S)
        logger.info("starting the engine again in %g s", pause_s)
        pause(pause_s)
