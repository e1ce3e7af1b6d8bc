"""Entering the namespaces of a simulated host; as a script, for a command: ``namespaces.py FD,FD COMMAND...``."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def enter_namespace(descriptor: int) -> None:
    """Enter the namespace behind a descriptor: for this thread alone, except that mounts take a process of one thread.

    The working directory is found again by its path, as another view of the file system begins at its root.
    """
    folder = os.getcwd()
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot enter a namespace: {os.strerror(number)}")
    with contextlib.suppress(OSError):
        os.chdir(folder)


def enter_namespaces(paths: Sequence[str]) -> None:
    """Enter the namespaces behind paths, all of them opened before the first changes what there is to open."""
    descriptors = [os.open(path, os.O_RDONLY) for path in paths]
    for descriptor in descriptors:
        enter_namespace(descriptor)
        os.close(descriptor)


def main(descriptors: str, *command: str) -> None:
    """Become a command in the namespaces behind descriptors, which is killed when the parent ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was asked
        return
    for descriptor in map(int, descriptors.split(",")):
        enter_namespace(descriptor)
        os.close(descriptor)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
