"""Sets of ranks that several tests share: each runs its function in ranks that have kernels, or a compiler, loaded.

To start a rank takes little, but a rank that compiles or interprets kernels first reads them, which takes seconds. A
set serves one number of ranks in one environment, and ends with the first call that fails in it: the next call starts
another. Tests that kill, stop or starve ranks start their own, by ``shotcast.spawn``.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

import torch

from shotcast.errors import RankFailed
from shotcast.launcher.spawn import RankGroup

KEPT = 3
"""Sets that wait for more calls at once: each rank takes a few hundred MB."""

_START_S = 120.0
_sets: OrderedDict[tuple[Any, ...], SharedRanks] = OrderedDict()
_numbers = itertools.count()


def run(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 500.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Return what ``fn(*args)`` returns on each rank, as ``shotcast.spawn`` does, in ranks that others use too.

    ``fn`` may replace attributes of the package's modules, and environment variables: they are put back afterwards.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    environment = inherited | dict(env or {})
    key = (world_size, tuple(sorted(environment.items())), os.getpid(), tuple(sys.path))
    ranks = _sets.pop(key, None) or SharedRanks(world_size, env or {})
    while len(_sets) >= KEPT:
        _sets.popitem(last=False)[1].end()
    try:
        results = ranks.run(fn, args, timeout_s)
    except BaseException:
        ranks.end()
        raise
    _sets[key] = ranks
    return results


class SharedRanks:
    """Ranks of one job, which run one function after the other."""

    def __init__(self, world_size: int, env: Mapping[str, str]):
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        with Listener(os.path.join(self._folder.name, "socket"), "AF_UNIX", backlog=world_size) as listener:
            self._job = RankGroup.start(_serve, world_size, listener.address, env=env)
            atexit.register(self.end)
            listener._listener._socket.settimeout(_START_S)  # type: ignore[attr-defined]
            connections = {}
            for _ in range(world_size):
                connection = listener.accept()
                connections[connection.recv()] = connection
        self._connections: list[Connection] = [connections[rank] for rank in range(world_size)]

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        payload = pickle.dumps((fn, args))
        for connection in self._connections:
            connection.send_bytes(payload)
        waiting = dict(zip(self._connections, itertools.count(), strict=False))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailed(
                    min(waiting.values()), f"ranks {sorted(waiting.values())} took more than {timeout_s} s"
                )
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    succeeded, value, detail = pickle.loads(connection.recv_bytes())
                except EOFError:
                    raise RankFailed(rank, "it ended without a word") from None
                if not succeeded:
                    raise RankFailed(rank, detail) from value
                results[rank] = value
        return [results[rank] for rank in range(len(results))]

    def end(self) -> None:
        atexit.unregister(self.end)
        self._job.end()
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()


def _serve(address: str) -> None:
    """Run what the test process sends, until it is gone."""
    seed = torch.initial_seed()
    with Client(address, "AF_UNIX") as connection:
        connection.send(int(os.environ["RANK"]))
        while True:
            try:
                payload = connection.recv_bytes()
            except EOFError:
                return
            torch.manual_seed(seed)
            fn, args = pickle.loads(payload)
            attributes, environment = _attributes(), dict(os.environ)
            try:
                answer = pickle.dumps((True, fn(*args), ""))
            except Exception as error:
                detail = traceback.format_exc()
                try:
                    answer = pickle.dumps((False, error, detail))
                except Exception:
                    answer = pickle.dumps((False, None, detail))
            _put_back(attributes)
            os.environ.clear()
            os.environ.update(environment)
            del fn, args, payload
            gc.collect()
            connection.send_bytes(answer)


def _attributes() -> dict[str, dict[str, Any]]:
    """Return what stands in the package's modules."""
    return {
        name: dict(vars(module))
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "shotcast" and module is not None
    }


def _put_back(attributes: dict[str, dict[str, Any]]) -> None:
    for name, values in attributes.items():
        namespace = vars(sys.modules[name])
        for attribute, value in values.items():
            if namespace.get(attribute) is not value:
                namespace[attribute] = value
