"""CPU load from other work on the machine, which would distort measured times."""

from __future__ import annotations

import logging
import os
import time

from shotcast.errors import ConfigError

logger = logging.getLogger(__name__)

_ALLOWED_CORES = 0.3
"""Cores that others may use beyond those the measurement leaves free: daemons, and this process."""


def require_quiet(needed: int, force: bool) -> None:
    """Raise ConfigError unless the machine's other work leaves ``needed`` cores free, over half a second.

    ``force`` turns the error into a warning.
    """
    cores = len(os.sched_getaffinity(0))
    busy = min(busy_cores(), cores)
    if busy <= max(0, cores - needed) + _ALLOWED_CORES:
        return
    text = f"other processes use {busy:.1f} of {cores} cores, and this measurement needs {needed}: times measured now "
    text += "would be theirs, too"
    if not force:
        raise ConfigError(f"{text}. Nothing is written. Try again on a quiet machine, or with --force")
    logger.warning("%s", text)


def busy_cores(look_s: float = 0.5) -> float:
    """Return the average number of busy cores, of those this process may use, over the next ``look_s`` seconds."""
    before = _busy_s()
    began = time.monotonic()
    time.sleep(look_s)
    return (_busy_s() - before) / (time.monotonic() - began)


def _busy_s() -> float:
    """Return the CPU seconds used since the machine booted."""
    cores, ticks = {f"cpu{core}" for core in os.sched_getaffinity(0)}, 0
    with open("/proc/stat") as file:
        for name, *numbers in map(str.split, file):
            if name in cores:
                user, nice, system, _, _, irq, soft, steal = map(int, numbers[:8])
                ticks += user + nice + system + irq + soft + steal
    return ticks / os.sysconf("SC_CLK_TCK")
