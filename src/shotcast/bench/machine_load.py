"""CPU load from other work on the machine, which would distort measured times."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator

from shotcast.errors import ConfigError

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_ALLOWED_CORES = 0.3
"""Cores that others may use beyond those the measurement leaves free: daemons, and this process."""


@contextlib.contextmanager
def quiet(needed: int, force: bool) -> Iterator[None]:
    """Measure inside the block, on a machine whose other work leaves ``needed`` cores free.

    Load is sampled for half a second before the block, and while it runs. ``force`` turns the error into a warning.

    Raises ConfigError if the machine is or was busy; discard the measurements then.
    """
    cores = len(os.sched_getaffinity(0))
    free = max(0, cores - needed) + _ALLOWED_CORES
    share = f"of {cores} cores, and this measurement needs {needed}"
    busy = min(busy_cores(), cores)
    if busy > free:
        _refuse(f"other processes use {busy:.1f} {share}: times measured now would be theirs, too", force)
    began, before = time.monotonic(), _others_s()
    yield
    seconds = time.monotonic() - began
    used = min((_others_s() - before) / seconds, cores)
    if seconds >= _LOOK_S and used > free:
        _refuse(f"other processes used {used:.1f} {share}: the times are theirs, too", force)


def _refuse(text: str, force: bool) -> None:
    if not force:
        raise ConfigError(f"{text}. Nothing is written. Try again on a quiet machine, or with --force")
    logger.warning("%s", text)


def busy_cores(look_s: float = _LOOK_S) -> float:
    """Return the average number of busy cores, of those this process may use, over the next ``look_s`` seconds."""
    before = _busy_s()
    began = time.monotonic()
    time.sleep(look_s)
    return (_busy_s() - before) / (time.monotonic() - began)


def _others_s() -> float:
    """Return the CPU seconds used on this machine, excluding this process and its descendants."""
    return _busy_s() - _own_s()


def _busy_s() -> float:
    """Return the CPU seconds used since the machine booted."""
    cores, ticks = {f"cpu{core}" for core in os.sched_getaffinity(0)}, 0
    with open("/proc/stat") as file:
        for name, *numbers in map(str.split, file):
            if name in cores:
                user, nice, system, _, _, irq, soft, steal = map(int, numbers[:8])
                ticks += user + nice + system + irq + soft + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Return the CPU seconds used by this process and its descendants, including ones that have ended."""
    children: dict[int, list[int]] = {}
    worked: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended; whoever waited for it counts it
        children.setdefault(int(fields[1]), []).append(int(name))
        worked[int(name)] = sum(map(int, fields[11:15]))  # in user mode and in the kernel, and of ended children
    family = [os.getpid()]
    for process in family:
        family += children.get(process, [])
    return sum(worked[process] for process in family) / os.sysconf("SC_CLK_TCK")
