"""Imports for the server that ranks are forked from, so that every rank starts with the modules it needs.

It is imported last. Everything loaded by then is excluded from garbage collection, which would copy its pages for each
rank.
"""

from __future__ import annotations

import gc
import logging

logger = logging.getLogger(__name__)

try:
    from numba.core.registry import cpu_target

    import shotcast.transport.cpu.executor  # noqa: F401

    cpu_target.target_context.refresh()
except Exception as error:  # ranks that need it report the error; it must not end the server or other ranks
    logger.info("the server of ranks starts without the compiler of CPU ranks: %s", error)

gc.freeze()
gc.enable()
