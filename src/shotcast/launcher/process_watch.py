"""Detection of processes that have ended or left a group, so that no rank waits for one that is gone.

A killed rank is not a late one: a late rank is worth waiting for, up to a deadline of many minutes. Linux tells the two
apart without polling: a pidfd of a process becomes readable when the process ends. A process that leaves but keeps
running notifies the others by a datagram.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_SEND_S = 0.1
"""The longest wait for a process that accepts no more datagrams."""
_LONGEST_BYTES = 64
_START_TIME = 19
"""The index after the command in /proc/PID/stat of the start time, in clock ticks since boot."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, as identified by other processes of its machine."""

    space: str  # names the machine, since it began, and the PID namespace
    pid: int  # the number within that space
    started: int  # when it started, which tells it from a later process with the same number

    @classmethod
    def own(cls) -> ProcessId:
        """Return the id of this process."""
        space, boot = "", boot_id()
        with contextlib.suppress(OSError):
            space = f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}" if boot else ""
        return cls(space, os.getpid(), _start_time(os.getpid()))

    def has_ended(self) -> bool:
        """Return whether the process is known to have ended; processes of other machines are not known."""
        if not self.space or self.space != ProcessId.own().space:
            return False
        return _start_time(self.pid) != self.started or _fields(self.pid)[:1] in (["Z"], ["X"])

    @property
    def address(self) -> bytes:
        """The address of the socket on which the process receives messages from others on its machine."""
        return f"\0shotcast/{self.space}/{self.pid}/{self.started}".encode()


def boot_id() -> str:
    """Return the boot id of the running kernel, which distinguishes hosts of the same name but not their containers."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


def tell(process: ProcessId, token: str, number: int, descriptor: int = -1) -> None:
    """Send a process on this machine a number; does nothing if the process does not listen or has ended.

    Args:
        token: the token passed to :meth:`ProcessWatch.hear`.
        descriptor: an open file to send with the number; -1 for none.
    """
    if not process.space or process.space != ProcessId.own().space:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.settimeout(_SEND_S)
        try:
            one.connect(process.address)
            socket.send_fds(one, [f"{token} {number}".encode()], [descriptor] if descriptor >= 0 else [])
        except OSError as error:  # it has closed the communicator too, or is stopped
            logger.debug("process %d was not told what a rank has done: %s", process.pid, error)


def _start_time(pid: int) -> int:
    """Return when a process started; 0 if it is gone or the system does not say."""
    fields = _fields(pid)
    return int(fields[_START_TIME]) if len(fields) > _START_TIME else 0


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; none if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


class ProcessWatch:
    """A thread that waits for any number of local processes to end, and receives their messages.

    The thread runs while something is watched or heard. A forked child starts with an empty watch.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[ProcessId, dict[int, Callable[[], None]]] = {}
        self._descriptors: dict[int, ProcessId] = {}
        self._hearers: dict[str, Callable[[int, int], None]] = {}
        self._at_once: set[str] = set()
        self._late: list[Callable[[], None]] = []
        self._socket: socket.socket | None = None
        self._epoll: select.epoll | None = None
        self._wake = -1

    def add(self, process: ProcessId, ended: Callable[[], None]) -> Callable[[], None] | None:
        """Call ``ended`` once, on the watch's thread, when ``process`` has ended. Returns a function that cancels this;
        None if the process cannot be watched from here: it runs on another machine or in another PID namespace, or the
        kernel has no pidfds.
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
                self._callbacks[process] = {}
                self._descriptors[descriptor] = process
                self._started().register(descriptor, select.EPOLLIN)
            self._callbacks[process][number] = ended
        return lambda: self._remove(process, number)

    def hear(self, token: str, told: Callable[[int, int], None], at_once: bool = False) -> Callable[[], None]:
        """Call ``told(number, descriptor)``, on the watch's thread, for each number sent by :func:`tell`.

        The descriptor is an open file, which the receiver must close; -1 for none. Nothing arrives if the system has no
        such sockets. Returns a function that cancels this.

        Args:
            token: an unguessable token, known to the senders.
            at_once: :meth:`listen` may also call ``told``, which must not take locks or use the watch.
        """
        with self._lock:
            if self._socket is None:
                heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
                try:
                    heard.bind(ProcessId.own().address)
                except OSError as error:
                    heard.close()
                    logger.debug("this process does not hear what other ranks do: %s", error)
                    return lambda: None
                self._socket = heard
                self._started().register(heard, select.EPOLLIN)
            self._hearers[token] = told
            if at_once:
                self._at_once.add(token)
        return lambda: self._unhear(token)

    def _unhear(self, token: str) -> None:
        with self._lock:
            self._hearers.pop(token, None)
            self._at_once.discard(token)
            if self._hearers or self._socket is None:
                return
            assert self._epoll is not None
            self._epoll.unregister(self._socket)
            self._socket.close()
            self._socket = None
            self._end_if_idle()

    def listen(self) -> None:
        """Return once all ``at_once`` receivers have been called for earlier messages, even if the thread is late."""
        with self._lock:
            self._late += self._heard()
            if self._late and self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _heard(self) -> list[Callable[[], None]]:
        """Call ``at_once`` receivers for the datagrams that have arrived, and return the calls to make for the others.

        The caller holds the lock.
        """
        found: list[Callable[[], None]] = []
        with contextlib.suppress(BlockingIOError):
            while self._socket is not None:
                text, files, _, _ = socket.recv_fds(self._socket, _LONGEST_BYTES, 1)
                token, _, number = text.decode(errors="replace").partition(" ")
                descriptor = files[0] if files else -1
                if token in self._at_once and number.isdecimal():
                    self._hearers[token](int(number), descriptor)
                elif token in self._hearers and number.isdecimal():
                    found.append(functools.partial(self._hearers[token], int(number), descriptor))
                elif descriptor >= 0:
                    os.close(descriptor)
        return found

    def _started(self) -> select.epoll:
        """Return the selector that the thread waits in; start both if necessary. The caller holds the lock."""
        if self._epoll is None:
            self._epoll = select.epoll()
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._epoll.register(self._wake, select.EPOLLIN)
            arguments = (self._epoll, self._wake)
            threading.Thread(target=self._run, args=arguments, name="shotcast process watch", daemon=True).start()
        return self._epoll

    def _remove(self, process: ProcessId, number: int) -> None:
        with self._lock:
            callbacks = self._callbacks.get(process)
            if callbacks is None or callbacks.pop(number, None) is None or callbacks:
                return
            descriptor = next(fd for fd, watched in self._descriptors.items() if watched == process)
            self._forget(descriptor)

    def _forget(self, descriptor: int) -> list[Callable[[], None]]:
        """Close a descriptor and return its callbacks. The caller holds the lock."""
        assert self._epoll is not None
        process = self._descriptors.pop(descriptor)
        self._epoll.unregister(descriptor)
        os.close(descriptor)
        self._end_if_idle()
        return list(self._callbacks.pop(process).values())

    def _end_if_idle(self) -> None:
        if not self._descriptors and self._socket is None:
            os.eventfd_write(self._wake, 1)  # its thread closes both
            self._epoll, self._wake = None, -1

    def _run(self, epoll: select.epoll, wake: int) -> None:
        while True:
            ready = [descriptor for descriptor, _ in epoll.poll()]
            with self._lock:
                over = self._epoll is not epoll
                ended, self._late = self._late, []
                if not over:
                    ended += self._heard()  # first: a rank that has left may have ended, too
                    if wake in ready:
                        os.eventfd_read(wake)
                for descriptor in ready:
                    if descriptor in self._descriptors and self._epoll is epoll:
                        ended += self._forget(descriptor)
            for callback in ended:
                callback()
            if over:
                epoll.close()
                os.close(wake)
                return

    def abandon(self) -> None:
        """Drop state inherited by a fork; the parent's watch continues."""
        for descriptor in (*self._descriptors, *([self._wake] if self._wake >= 0 else [])):
            os.close(descriptor)
        if self._epoll is not None:
            self._epoll.close()
        if self._socket is not None:
            self._socket.close()
        self._begin()


WATCH = ProcessWatch()
"""This process's watch."""

os.register_at_fork(after_in_child=WATCH.abandon)
