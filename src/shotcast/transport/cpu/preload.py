"""Imported by the server that ranks are forked from, so that what every rank needs is there when it starts.

numba reads its implementations of functions when it first compiles or loads one: half a second of each rank.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

try:
    from numba.core.registry import cpu_target

    import shotcast.transport.cpu.executor  # noqa: F401

    cpu_target.target_context.refresh()
except Exception as error:  # a rank that needs it says so; of others, and of the server, it would be the end
    logger.info("the server of ranks goes without what CPU ranks compile with: %s", error)
