"""The load of a machine by the work of others, which measured times would show."""

from __future__ import annotations

import logging
import os
import time

from shotcast.errors import ConfigError

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_ALLOWED_CORES = 0.3
"""Cores that others may use beyond those that the ranks leave free: daemons, and this process."""


def require_quiet(ranks: int, force: bool) -> None:
    """Refuse to measure on a machine whose other work would share cores with ``ranks`` ranks.

    With ``force`` it only warns. It looks at the machine for half a second.

    Raises:
        ConfigError: the machine is busy.
    """
    cores = len(os.sched_getaffinity(0))
    busy = min(busy_cores(), cores)
    if busy <= max(0, cores - ranks) + _ALLOWED_CORES:
        return
    text = f"other processes use {busy:.1f} of {cores} cores, and {ranks} ranks need {ranks}"
    if not force:
        raise ConfigError(f"{text}: times measured now would be theirs, too. Try again later, or measure with --force")
    logger.warning("%s: the times will be theirs, too", text)


def busy_cores(look_s: float = _LOOK_S) -> float:
    """Return how many cores of the machine are busy on average, for the next ``look_s`` seconds."""
    before = _busy_s()
    began = time.monotonic()
    time.sleep(look_s)
    return (_busy_s() - before) / (time.monotonic() - began)


def _busy_s() -> float:
    """Return the seconds that all cores have worked since the machine began."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, soft, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
