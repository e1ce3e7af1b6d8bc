"""Simulated hosts for tests: ranks in network namespaces, with faults of hosts and of their network.

A test takes the mark :data:`needs_hosts` and makes a network by :class:`SimulatedHosts`::

    with SimulatedHosts(2, delay_us=1000) as network:
        group = network.start(target, ranks_per_host, ...)
        network.cut(1)  # restore(1), kill(1, group), kill_ranks(1, group)
        results = group.results(timeout_s=200, return_exceptions=True)

Targets stand at the top level of a module that ranks can import. Everything ends with the test.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from simulated_hosts import linux, namespaces, network

from shotcast.launcher.spawn import RankGroup

__all__ = ["SimulatedHosts", "all_arrived", "arrive", "needs_hosts"]

_LACK = linux.missing()
needs_hosts = pytest.mark.skipif(bool(_LACK), reason=f"hosts cannot be simulated: {_LACK}")


class SimulatedHosts(network.SimulatedHosts):
    """Simulated hosts with commands and faults."""

    _disturbed = False

    def popen(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a host, with the options of :class:`subprocess.Popen`; it is killed when we end."""
        descriptors = self._hosts[host].namespaces
        enter = [sys.executable, namespaces.__file__, ",".join(map(str, descriptors)), *command]
        environment = {**os.environ, **self._interfaces, **(options.pop("env", None) or {})}
        return subprocess.Popen(enter, pass_fds=descriptors, env=environment, **options)

    def cut(self, host: int, *, interface: bool = True) -> None:
        """Cut a host off: take its interface down, or let the network lose its packets while its interface stays up."""
        self._disturbed = True
        if interface:
            self._switch(host, False)
        else:
            self.relay.set_cut(host, True)

    def restore(self, host: int) -> None:
        """Undo :meth:`cut`."""
        self._switch(host, True)
        self.relay.set_cut(host, False)

    def _switch(self, host: int, up: bool) -> None:
        """Take the TUN device of a host down, or up again."""

        def switch() -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
                linux.raise_interface(control, linux.INTERFACE, up)

        self._hosts[host].run(switch)

    def kill(self, host: int, group: RankGroup) -> None:
        """Take the power of a host away: its packets are lost first, so its connections end without a word."""
        self.cut(host, interface=False)
        self.kill_ranks(host, group)

    def kill_ranks(self, host: int, group: RankGroup) -> None:
        """Kill the ranks of a host; its kernel closes their connections."""
        each = len(group.pids) // self.hosts
        for pid in group.pids[host * each : (host + 1) * each]:
            os.kill(pid, signal.SIGKILL)

    def check(self) -> None:
        """Raise ShotcastError if a packet was lost though no host was cut off."""
        if not self._disturbed:
            super().check()


def arrive(folder: str) -> None:
    """Say from a rank that it has come to where the test waits for all ranks."""
    Path(folder, os.environ["RANK"]).touch()


def all_arrived(folder: Path, world_size: int, within_s: float = 200.0) -> None:
    """Wait until all ranks have called :func:`arrive`."""
    deadline = time.monotonic() + within_s
    while len(os.listdir(folder)) < world_size:
        assert time.monotonic() < deadline, f"only ranks {sorted(os.listdir(folder))} arrived"
        time.sleep(0.01)
