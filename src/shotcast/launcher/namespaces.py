"""Entering the namespaces of a simulated host."""

from __future__ import annotations

import contextlib
import ctypes
import os


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
