"""Simulated hosts for tests: ranks in network namespaces, with faults of hosts and of their network.

A test takes the mark :data:`needs_hosts` and makes a network by :class:`SimulatedHosts`::

    with SimulatedHosts(2, delay_us=1000) as network:
        group = network.start(target, ranks_per_host, ...)
        network.cut(1)  # restore(1), kill(1, group), kill_ranks(1, group)
        results = group.results(timeout_s=20, return_exceptions=True)

Targets stand at the top level of a module that ranks can import. Everything ends with the test.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from shotcast.bench.hosts import linux
from shotcast.bench.hosts.network import SimulatedHosts

__all__ = ["SimulatedHosts", "all_arrived", "arrive", "needs_hosts"]

_LACK = linux.missing()
needs_hosts = pytest.mark.skipif(bool(_LACK), reason=f"hosts cannot be simulated: {_LACK}")


def arrive(folder: str) -> None:
    """Say from a rank that it has come to where the test waits for all ranks."""
    Path(folder, os.environ["RANK"]).touch()


def all_arrived(folder: Path, world_size: int, within_s: float = 30.0) -> None:
    """Wait until all ranks have called :func:`arrive`."""
    deadline = time.monotonic() + within_s
    while len(os.listdir(folder)) < world_size:
        assert time.monotonic() < deadline, f"only ranks {sorted(os.listdir(folder))} arrived"
        time.sleep(0.01)
