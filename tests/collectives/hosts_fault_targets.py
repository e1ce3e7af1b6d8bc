"""Functions that the ranks of tests/collectives/test_hosts_faults.py run."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch

from hosts import arrive
from shotcast import Communicator, ShotcastError
from shotcast.memory.host_group import StoreGroup
from shotcast.transport.network.control import ControlPlane

PATIENCE_S = 300.0


def _until(path: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not os.path.exists(path):
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.01)


def _dtype(algorithm: str) -> torch.dtype:
    """Return a dtype that the algorithm adds up."""
    return torch.bfloat16 if algorithm.endswith("_16bit") else torch.float32


def _message(comm: Communicator, algorithm: str, count: int) -> torch.Tensor:
    return torch.full([count], float(comm.rank + 1), dtype=_dtype(algorithm))


def _failing(comm: Communicator, x: torch.Tensor, algorithm: str) -> dict[str, Any]:
    """Make calls until one fails; return its error and when it began and ended, on the clock of this machine."""
    while True:
        began = time.monotonic()
        try:
            comm.all_reduce(x, algorithm=algorithm)
        except ShotcastError as error:
            return {"error": error, "began": began, "ended": time.monotonic()}


def _closed(comm: Communicator) -> float:
    """Close the communicator; return how long that took."""
    start = time.monotonic()
    comm.close()
    return time.monotonic() - start


def _threads_left(within_s: float = 60.0) -> list[str]:
    """Return the names of our threads that still run after a moment."""
    deadline = time.monotonic() + within_s
    while True:
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("shotcast")]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


def calls_until_a_fault(folder: str, algorithm: str, count: int, timeout_s: float) -> dict[str, Any]:
    comm = Communicator(device="cpu", timeout_s=timeout_s)
    x = _message(comm, algorithm, count)
    assert comm.all_reduce(x, algorithm=algorithm)[0] == sum(range(comm.world_size + 1))
    arrive(folder)
    found = _failing(comm, x, algorithm)
    try:
        comm.all_reduce(x, algorithm=algorithm)
        found["again"] = None
    except ShotcastError as error:
        found["again"] = error
    found["close_s"] = _closed(comm)
    found["threads"] = _threads_left()
    return found


def goes_on_after_a_reset(folder: str, restored: str, algorithm: str, count: int, timeout_s: float) -> dict[str, Any]:
    """Make calls until one fails; reset the communicator when ``restored`` is there, and make another call."""
    comm = Communicator(device="cpu", timeout_s=100)
    x = _message(comm, algorithm, count)
    comm.all_reduce(x, algorithm=algorithm)
    comm.set_timeout(timeout_s)
    arrive(folder)
    found = _failing(comm, x, algorithm)
    Path(folder, f"failed{comm.rank}").touch()
    _until(restored)
    comm.set_timeout(100)
    comm.reset()
    found["sum"] = comm.all_reduce(x, algorithm=algorithm)[0].item()
    found["close_s"] = _closed(comm)
    return found


def resets_without_a_farewell(slow: int) -> float:
    """Reset a communicator: no farewell reaches the rank that is slow once all ranks have come. Return a sum after."""
    comm = Communicator(device="cpu", timeout_s=100)
    x = _message(comm, "nvrar", 1000)
    comm.all_reduce(x, algorithm="nvrar")
    gather, say = StoreGroup.all_gather, ControlPlane._send

    def dawdles(group: StoreGroup, value: Any, timeout_s: float | None = None, what: str = "setup") -> list[Any]:
        values = gather(group, value, timeout_s, what)
        if what == "reset" and value is not None:
            time.sleep(0.5)
        return values

    def loses(plane: ControlPlane, node: int, message: dict[str, Any]) -> bool:
        return "farewell" in message or say(plane, node, message)

    if comm.rank == slow:
        StoreGroup.all_gather = dawdles  # type: ignore[method-assign]
    else:
        ControlPlane._send = loses  # type: ignore[method-assign]
    comm.reset()
    ControlPlane._send = say  # type: ignore[method-assign]
    total = comm.all_reduce(x, algorithm="nvrar")[0].item()
    comm.close()
    return total


def survives_a_pause(folder: str, stop: str, algorithm: str, count: int, timeout_s: float) -> float:
    """Make calls until all ranks know of a file; return the longest time of a call."""
    comm = Communicator(device="cpu", timeout_s=timeout_s)
    x = _message(comm, algorithm, count)
    comm.all_reduce(x, algorithm=algorithm)
    arrive(folder)
    longest, stopped = 0.0, torch.zeros(1)
    while stopped.item() == 0:
        start = time.monotonic()
        assert comm.all_reduce(x, algorithm=algorithm)[-1] == sum(range(comm.world_size + 1))
        stopped = torch.full([1], float(os.path.exists(stop)), dtype=x.dtype)
        stopped = comm.all_reduce(stopped, algorithm=algorithm)
        longest = max(longest, time.monotonic() - start)
    comm.close()
    return longest


def calls_something_else(fault: str, culprits: list[int], algorithm: str, timeout_s: float) -> dict[str, Any]:
    """Make a call that the culprits do not make, or make otherwise."""
    comm = Communicator(device="cpu", timeout_s=timeout_s)
    x = torch.ones(1000, dtype=_dtype(algorithm))
    comm.all_reduce(x, algorithm=algorithm)
    comm.broadcast(x, 0)  # compiled
    comm.barrier()
    guilty = comm.rank in culprits
    if guilty and fault == "absent":
        time.sleep(timeout_s + 2)
        return {"close_s": _closed(comm)}
    began = time.monotonic()
    try:
        if guilty and fault == "other size":
            comm.all_reduce(torch.ones(2000, dtype=x.dtype), algorithm=algorithm)
        elif guilty and fault == "other operation":
            comm.broadcast(x, 0)
        else:
            comm.all_reduce(x, algorithm=algorithm)
        error = None
    except ShotcastError as raised:
        error = raised
    return {"error": error, "began": began, "ended": time.monotonic(), "close_s": _closed(comm)}
