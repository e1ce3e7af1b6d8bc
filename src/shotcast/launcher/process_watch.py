"""Notice at once that a process has ended, so that no rank waits for one that is gone.

A killed rank is not a late one: a late rank is worth waiting for, up to a deadline of many minutes. Linux tells the two
apart without polling: a pidfd of a process becomes readable when the process ends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass

_START_TIME = 19
"""The field of /proc/PID/stat behind the command that holds the start time, in clock ticks since the machine began."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, as other processes of its machine find it.

    Attributes:
        space: names the machine, since it began, and the PID namespace.
        pid: the number within that space.
        started: when it started, which tells it from a later process with the same number.
    """

    space: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> ProcessId:
        """Return the id of this process."""
        space = ""
        with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
            space = f"{file.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
        return cls(space, os.getpid(), _start_time(os.getpid()))

    def has_ended(self) -> bool:
        """Return whether the process is known to have ended; those of other machines are not known."""
        if not self.space or self.space != ProcessId.own().space:
            return False
        return _start_time(self.pid) != self.started or _state(self.pid) in ("Z", "X")


def _start_time(pid: int) -> int:
    """Return when a process started; 0 if it is gone, or the system does not say."""
    fields = _fields(pid)
    return int(fields[_START_TIME]) if len(fields) > _START_TIME else 0


def _state(pid: int) -> str:
    """Return the state of a process, such as ``R`` or ``Z``; empty if it is gone, or the system does not say."""
    return "".join(_fields(pid)[:1])


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the command; none if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


class ProcessWatch:
    """One thread that waits for the end of any number of processes of this machine.

    The thread runs while something is watched. A forked child has an empty watch of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._callbacks: dict[ProcessId, dict[int, Callable[[], None]]] = {}
        self._descriptors: dict[int, ProcessId] = {}
        self._epoll: select.epoll | None = None
        self._wake = -1

    def add(self, process: ProcessId, ended: Callable[[], None]) -> Callable[[], None] | None:
        """Call ``ended`` once, on the thread of the watch, when ``process`` has ended.

        Returns:
            A function that ends this watch; None where the process cannot be watched from here: it runs on another
            machine or in another PID namespace, or the kernel has no pidfds.
        """
        if not process.space or process.space != ProcessId.own().space or not hasattr(os, "pidfd_open"):
            return None
        with self._lock:
            number = next(self._numbers)
            if process not in self._callbacks:
                try:
                    descriptor = os.pidfd_open(process.pid)
                except ProcessLookupError:
                    descriptor = -1
                except OSError:
                    return None
                if descriptor < 0 or _start_time(process.pid) != process.started:
                    if descriptor >= 0:
                        os.close(descriptor)
                    threading.Thread(target=ended, name="shotcast process watch", daemon=True).start()
                    return lambda: None
                self._register(descriptor, process)
            self._callbacks[process][number] = ended
        return lambda: self._remove(process, number)

    def _register(self, descriptor: int, process: ProcessId) -> None:
        if self._epoll is None:
            self._epoll = select.epoll()
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._epoll.register(self._wake, select.EPOLLIN)
            arguments = (self._epoll, self._wake)
            threading.Thread(target=self._run, args=arguments, name="shotcast process watch", daemon=True).start()
        self._callbacks[process] = {}
        self._descriptors[descriptor] = process
        self._epoll.register(descriptor, select.EPOLLIN)

    def _remove(self, process: ProcessId, number: int) -> None:
        with self._lock:
            callbacks = self._callbacks.get(process)
            if callbacks is None or callbacks.pop(number, None) is None or callbacks:
                return
            descriptor = next(fd for fd, watched in self._descriptors.items() if watched == process)
            self._forget(descriptor)

    def _forget(self, descriptor: int) -> list[Callable[[], None]]:
        """Close a descriptor and return its callbacks; end the thread with the last one. The caller holds the lock."""
        assert self._epoll is not None
        process = self._descriptors.pop(descriptor)
        self._epoll.unregister(descriptor)
        os.close(descriptor)
        if not self._descriptors:
            os.eventfd_write(self._wake, 1)  # its thread closes both
            self._epoll, self._wake = None, -1
        return list(self._callbacks.pop(process).values())

    def _run(self, epoll: select.epoll, wake: int) -> None:
        while True:
            ready = [descriptor for descriptor, _ in epoll.poll()]
            ended: list[Callable[[], None]] = []
            with self._lock:
                for descriptor in ready:
                    if descriptor in self._descriptors and self._epoll is epoll:
                        ended += self._forget(descriptor)
            for callback in ended:
                callback()
            if wake in ready:
                epoll.close()
                os.close(wake)
                return

    def abandon(self) -> None:
        """Let go of what was inherited by a fork; the parent's watch goes on."""
        self._lock = threading.Lock()
        for descriptor in (*self._descriptors, *([self._wake] if self._wake >= 0 else [])):
            os.close(descriptor)
        if self._epoll is not None:
            self._epoll.close()
        self._callbacks, self._descriptors = {}, {}
        self._epoll, self._wake = None, -1


WATCH = ProcessWatch()
"""The watch of this process."""

os.register_at_fork(after_in_child=WATCH.abandon)
