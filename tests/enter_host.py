"""Run a command in namespaces: ``python enter_host.py FD,FD COMMAND...``, for tests on simulated hosts."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from shotcast.launcher.namespaces import enter_namespace

_PR_SET_PDEATHSIG = 1


def main(namespaces: str, *command: str) -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was asked
        return
    for descriptor in map(int, namespaces.split(",")):
        enter_namespace(descriptor)
        os.close(descriptor)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
