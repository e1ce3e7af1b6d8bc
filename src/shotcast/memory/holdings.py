"""The symmetric memory held by processes of this machine, for ``shotcast doctor``.

A process lists its holdings in an anonymous file, which other processes find among its open files. The file ends with
the process, even if it is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import NamedTuple

_NAME = "shotcast holdings"


class HeldMemory(NamedTuple):
    """A process's symmetric memory on a device, and its users."""

    leased: int  # bytes that are in use
    blocks: int  # bytes of all blocks
    shared: int = 0  # communicators of GPUs that are not exclusive
    exclusive: int = 0  # and those that are


class Notice:
    """A list of this process's holdings, readable by the user's other processes."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._said: dict[str, HeldMemory] = {}

    def say(self, device: str, held: HeldMemory) -> None:
        """Publish what this process now holds on a device."""
        if held == self._said.get(device, HeldMemory(0, 0)):
            return
        self._said[device] = held
        if not any(map(any, self._said.values())):
            self.forget()
            return
        with contextlib.suppress(OSError):  # such as too many open files: it is but a notice
            if self._descriptor < 0:
                self._descriptor = os.memfd_create(_NAME)
            os.pwrite(self._descriptor, json.dumps(self._said).encode() + b"\n", 0)

    def forget(self) -> None:
        """Close this process's copy of the notice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.forget()


def of_all_processes() -> dict[int, dict[str, HeldMemory]]:
    """Return the holdings of each process of this machine, by process and device, as far as this user may read them."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (said := _said_by(int(entry))):
            found[int(entry)] = said
    return dict(sorted(found.items()))


def _said_by(process: int) -> dict[str, HeldMemory]:
    folder = f"/proc/{process}/fd"
    with contextlib.suppress(OSError, ValueError):
        for name in os.listdir(folder):
            if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{_NAME}"):
                with open(f"{folder}/{name}") as file:
                    said = json.loads(file.readline())
                return {device: HeldMemory(*numbers) for device, numbers in said.items() if any(numbers)}
    return {}
