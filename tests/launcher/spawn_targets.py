"""Functions that the ranks of tests/launcher/test_spawn.py run, in a module that ranks can import by name."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shotcast.errors import CollectiveTimeout


def call_arithmetic(scale: float) -> tuple[int, torch.Tensor]:
    dist.init_process_group("gloo")
    total = torch.full([4], scale * dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), total


def environment(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def threads() -> int:
    return torch.get_num_threads()


def says(text: str) -> None:
    """Write to the streams from Python, and from a process that the rank starts."""
    print(text, flush=True)
    os.write(2, f"{text}, too".encode())


def umask_and_cores() -> tuple[int, set[int]]:
    umask = os.umask(0)
    return umask, os.sched_getaffinity(0)


def leaves_a_child(marker: str) -> None:
    """Rank 0 dies at once, but a process that it forked lives until ``marker`` is gone."""
    if os.environ["RANK"] == "0":
        if os.fork() == 0:
            end = time.monotonic() + 600
            while os.path.exists(marker) and time.monotonic() < end:
                time.sleep(0.02)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def waits_for(marker: str) -> str:
    while not os.path.exists(marker):
        time.sleep(0.02)
    return "done"


def numpy_draw() -> int:
    import numpy as np

    return int(np.random.randint(1 << 62))


def what_a_call_loads() -> tuple[list[str], list[str]]:
    """Return the modules that a rank starts with, and those that an all-reduce adds."""
    before = set(sys.modules)
    from shotcast import Communicator

    with Communicator() as comm:
        comm.all_reduce(torch.ones(3))
    return sorted(before), sorted(set(sys.modules) - before)


def numba_setting() -> bool:
    import numba

    return bool(numba.config.DISABLE_JIT)


def big_tensor(count: int) -> torch.Tensor:
    return torch.full([count], float(os.environ["RANK"]))


def one_raises(culprit: int) -> None:
    """One rank raises; the others wait for it, and fail because it is gone."""
    dist.init_process_group("gloo")
    dist.barrier()  # Gloo may still be connecting to a rank that has ended
    if dist.get_rank() == culprit:
        raise ValueError("the culprit's own words")
    dist.barrier()


def victim_reports_first() -> None:
    """Rank 0 misses rank 1 in a call, and reports that before rank 1 reaches its own error."""
    if os.environ["RANK"] == "0":
        raise CollectiveTimeout(0, [1], "all_reduce", 7, 0.1)
    time.sleep(0.7)
    raise ValueError("the culprit's own words")


def a_late_rank_ends_another() -> None:
    """Rank 1 gives up on rank 0, which then comes and finds that rank 1 has ended."""
    if os.environ["RANK"] == "0":
        raise CollectiveTimeout(0, [1], "all_reduce", 7, 3.0, "dead")
    time.sleep(0.2)
    raise CollectiveTimeout(1, [0], "all_reduce", 7, 3.0)


def gloo_victim_reports_first() -> None:
    if os.environ["RANK"] == "0":
        raise RuntimeError("Connection closed by peer [127.0.0.1]")
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


def all_time_out() -> None:
    raise CollectiveTimeout(int(os.environ["RANK"]), [], "all_reduce", 7, 0.1)


def one_is_killed(culprit: int, signum: int) -> str:
    if int(os.environ["RANK"]) == culprit:
        os.kill(os.getpid(), signum)
        time.sleep(60)
    time.sleep(0.2)
    return "survived"


def one_exits(culprit: int, how: str) -> str:
    if int(os.environ["RANK"]) == culprit:
        if how == "sys.exit":
            sys.exit(3)
        os._exit(3)
    time.sleep(600)
    return "unreachable"


def one_hangs(culprit: int, in_compiled_code: bool, pid_file: str = "") -> str:
    if int(os.environ["RANK"]) == culprit:
        if pid_file:
            with open(pid_file, "w") as file:
                file.write(str(os.getpid()))
        if in_compiled_code:
            hold_the_interpreter_lock()
        time.sleep(600)
    return "done"


def hold_the_interpreter_lock() -> NoReturn:
    import ctypes

    ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the lock during the call
    raise AssertionError("woke up")


def one_ignores_sigterm(culprit: int) -> str:
    if int(os.environ["RANK"]) == culprit:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    return "done"


def returns_unpicklable() -> Any:
    return threading.Lock()


class TwoArguments(Exception):  # noqa: N818
    """An exception that pickles but cannot be unpickled, as its args hold only the message."""

    def __init__(self, first: int, second: int):
        super().__init__(f"{first} and {second}")


def raises_unpicklable() -> None:
    raise TwoArguments(1, 2)


def crashes_after_return() -> int:
    """Report a result, then die while the process ends."""
    import multiprocessing.util

    multiprocessing.util.Finalize(None, os.kill, (os.getpid(), signal.SIGSEGV), exitpriority=10)
    return 1


def interrupted() -> str:
    """Return what Ctrl-C does to a rank; the parent decides whether the rank ends."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
    return "went on"
