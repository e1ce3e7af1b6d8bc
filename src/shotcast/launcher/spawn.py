"""Start the ranks of one job as processes of this machine.

``torchrun`` does this for a command line; :func:`spawn` does it for a function, with the same environment variables.

- Ranks are forked from a server process (multiprocessing's "forkserver") that has imported torch, the communicator and
  what numba compiles with, so eight of them start in the time of one. The server starts no thread of its own and never
  touches CUDA, nor imports Triton, which reads its environment then.
- The parent hosts the store that the ranks meet at, on a port the kernel picks; ranks join it as torchrun's workers do.
  So no port is guessed, and the store outlives every rank.
- A rank's environment, standard output and error, umask, cores and niceness are the caller's at the time of the call,
  in place before the caller's modules are imported.
- The kernel kills a rank when the parent is gone, even if the rank is stuck in compiled code (Linux only, as is the
  shared memory of CPU ranks).
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, overload

import torch.distributed as dist

from shotcast.errors import ConfigError, RankFailed
from shotcast.hardware.detect import available_cores
from shotcast.launcher import rank_process
from shotcast.launcher.rank_process import main_of_caller
from shotcast.launcher.watched_rank import (
    Failure,
    WatchedRank,
    collect,
    end_all,
    join_all,
    root_cause,
    timeout_detail,
)

T = TypeVar("T")

_HOST = "127.0.0.1"


@overload
def spawn(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    return_exceptions: Literal[False] = False,
) -> list[T]: ...


@overload
def spawn(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    return_exceptions: bool,
) -> list[T | BaseException]: ...


def spawn(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    return_exceptions: bool = False,
) -> list[Any]:
    """Run ``fn(*args)`` in ``world_size`` new processes and return what each returned, by rank.

    Inside, RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set, so ``shotcast.Communicator()`` and
    ``torch.distributed.init_process_group()`` need no arguments::

        def work(scale: float) -> torch.Tensor:
            with shotcast.Communicator() as comm:
                return comm.all_reduce(torch.full([4], scale * comm.rank))

        if __name__ == "__main__":
            print(shotcast.spawn(work, 4, 0.5))

    The script that calls it is imported by every rank, so the call stands under ``if __name__ == "__main__":``.

    Args:
        fn: a function at the top level of a module. It and ``args`` travel by pickle.
        world_size: number of processes, from 1 up.
        timeout_s: seconds for the whole call; None, or infinity, waits for ever.
        env: environment variables to set in the ranks, besides the caller's own.
        return_exceptions: do not end the other ranks when one fails; the list then holds, at the place of a rank that
            failed, its exception (:class:`RankFailed` if it was killed, exited, or was ended by ``timeout_s``).

    OMP_NUM_THREADS, unless set, shares the cores among the ranks; GLOO_SOCKET_IFNAME, unless set, is the loopback. What
    numba makes of this library's own functions (NUMBA_CPU_NAME, NUMBA_DISABLE_JIT and the like) is what the caller's
    environment says at its first call.

    Raises:
        RankFailed: a rank raised, exited or was killed, or ``timeout_s`` passed. The other ranks were ended. When
            several failed it names the cause, not those who then missed it. ``__cause__`` is the rank's exception.
        ConfigError: ``fn`` cannot be imported by a new process, ``world_size`` is not positive, or an argument is not
            what it should be.
    """
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s >= 0):
        raise ConfigError(f"timeout_s is a number of seconds from 0 up, or None, not {timeout_s!r}")
    deadline = time.monotonic() + timeout_s if timeout_s is not None and timeout_s < math.inf else None
    job = Ranks.start(fn, world_size, *args, env=env)
    ranks = job.ranks
    try:
        timed_out = collect(ranks, deadline, stop_at_failure=not return_exceptions)
        if timed_out or not (return_exceptions or all(rank.succeeded for rank in ranks)):
            unfinished = [rank for rank in ranks if not rank.finished]
            end_all(unfinished)
            if timed_out:
                for rank in unfinished:
                    rank.failure = Failure(timeout_detail(rank, unfinished, timeout_s))
        else:
            join_all(ranks)
        if return_exceptions:
            return [rank.value if rank.failure is None else rank.failure.as_exception(rank.rank) for rank in ranks]
        failed = [rank for rank in ranks if rank.failure is not None]
        if failed:
            raise root_cause(failed)
        return [rank.value for rank in ranks]
    finally:
        job.end()


class Ranks:
    """Ranks that run while the caller goes on. They end when it does.

    Attributes:
        ranks: one for each process, in the order of rank.
        pids: their process ids.
    """

    def __init__(self, payload: bytes, environments: Mapping[int, dict[str, str]], store: dist.Store | None):
        self._store = store  # what the ranks meet at lives as long as they
        self.ranks: list[WatchedRank] = []
        self.pids: list[int] = []
        # multiprocessing waits at exit for processes that nobody has ended
        atexit.register(self.kill)
        self._owner = os.getpid()
        try:
            for number, environment in environments.items():
                # known before it runs: an interrupt may come at any moment
                self.ranks.append(WatchedRank.made(number, environment, payload))
                self.ranks[-1].start()
                self.pids.append(self.ranks[-1].process.pid or 0)
        except BaseException:
            self.end()
            raise

    @classmethod
    def start(cls, fn: Callable[..., Any], world_size: int, *args: Any, env: Mapping[str, str] | None = None) -> Ranks:
        """As :func:`spawn`, but returns at once."""
        if not isinstance(world_size, int) or world_size < 1:
            raise ConfigError(f"world_size is a positive number of processes, not {world_size!r}")
        if strange := [name for name, value in (env or {}).items() if not isinstance(value, str)]:
            raise ConfigError(f"environment variables are strings, and {strange[0]} is {(env or {})[strange[0]]!r}")
        payload = _pickle_call(fn, args)
        store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        return cls(payload, {rank: _rank_env(rank, world_size, store.port, env) for rank in range(world_size)}, store)

    @classmethod
    def start_in_place(cls, fn: Callable[..., Any], *args: Any) -> Ranks:
        """One process in the place of this one, which torchrun started as a rank: same rank, same store."""
        beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        environment = _with_threads(dict(os.environ), beside)
        return cls(_pickle_call(fn, args), {int(os.environ["RANK"]): environment}, None)

    def wait(self) -> RankFailed | None:
        """Return when all ranks have returned, or soon after one failed: then what failed first, the others running.

        The thread that waits is the one that ends them.
        """
        collect(self.ranks, None, stop_at_failure=True)
        failed = [rank for rank in self.ranks if rank.failure is not None]
        return root_cause(failed) if failed else None

    def kill(self) -> None:
        """End all processes, from any thread; of the process that started them, not of one forked from it."""
        for pid in self.pids if os.getpid() == self._owner else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """End what still runs, and give back what was held for it."""
        end_all(self.ranks)
        for rank in self.ranks:
            rank.close()
        self.ranks, self.pids = [], []
        atexit.unregister(self.kill)
        self._store = None  # ranks are gone; the port is free again


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    if rank_process.running_main:
        raise ConfigError(
            "ranks were to be started while a rank imported this script, which would start ranks without end. "
            'Put the call under: if __name__ == "__main__":'
        )
    name = getattr(fn, "__qualname__", repr(fn))
    if getattr(fn, "__module__", None) == "__main__":
        main = main_of_caller()
        if not main:
            raise ConfigError(f"{name} was typed into an interpreter; ranks import their function from a file")
        # "package.__main__" run by -m, "__main__" of a folder run as a script, or its file run by its path
        at = main.get("init_main_from_name") or main.get("init_main_from_path", "").removesuffix(".py")
        if at.endswith("__main__"):
            raise ConfigError(f"{name} stands in a __main__.py, which ranks do not import; put it into another module")
    try:
        return pickle.dumps((fn, args))
    except Exception as error:
        raise ConfigError(
            f"{name} and its arguments must be picklable, and {name} a function at the top level of a module: {error}"
        ) from error


def _with_threads(environment: dict[str, str], beside: int) -> dict[str, str]:
    """``environment`` with OMP_NUM_THREADS, as set or for ``beside`` ranks on these cores."""
    threads = environment.get("OMP_NUM_THREADS", "").strip() or str(max(1, available_cores() // beside))
    first = threads.split(",")[0].strip()  # one number for each level of nesting
    if not first.isdecimal() or int(first) < 1:
        raise ConfigError(f"OMP_NUM_THREADS is a positive number of threads, not {threads!r}")
    return environment | {"OMP_NUM_THREADS": threads}


def _rank_env(rank: int, world_size: int, port: int, env: Mapping[str, str] | None) -> dict[str, str]:
    merged = _with_threads({**os.environ, **(env or {})}, world_size)
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        merged.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    return merged | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        # The store exists already: rank 0 joins as a client too, as under torchrun.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
