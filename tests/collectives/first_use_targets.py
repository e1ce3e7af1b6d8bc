"""Functions that the ranks of tests/collectives/test_first_use_cuda.py run."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import torch
from workers import settle

import shotcast
from shotcast import CollectiveTimeout


def cold_start(device: str, late_s: float, compile_s: float, timeout_s: float, kill: bool) -> tuple[Any, float, float]:
    """Have rank r come ``r * late_s`` late to a first call, whose kernels nobody has compiled.

    Rank 1 takes ``compile_s`` more to compile; with ``kill``, it is killed a moment after it has begun. Return the sum
    or the error, its delay after the kill, and the seconds that this rank compiled.
    """
    comm = shotcast.Communicator(device=device, timeout_s=timeout_s)
    compiled = 0.0
    executor = sys.modules[type(comm._executor).__module__]
    bound: Any = vars(executor).get("TritonBoundCall") or vars(executor)["CpuBoundCall"]
    load = bound.load

    def timed_load(self: Any) -> None:
        nonlocal compiled
        if kill and comm.rank == 1:
            comm._host.store("killed").set("at", str(time.time() + 0.1))
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
            time.sleep(0.2)  # should the compilation be quick
        began = time.monotonic()
        time.sleep(compile_s if comm.rank == 1 else 0)
        load(self)
        compiled += time.monotonic() - began

    bound.load = timed_load  # in this process alone
    comm._host.barrier()
    time.sleep(comm.rank * late_s)
    try:
        total = comm.all_reduce(torch.full([777], comm.rank + 1.0, device=comm.device), algorithm="two_shot")
        settle(comm)
    except CollectiveTimeout as error:
        return error, time.time() - float(comm._host.store("killed").get("at")), compiled
    comm.close()
    return float(total[0]), 0.0, compiled
