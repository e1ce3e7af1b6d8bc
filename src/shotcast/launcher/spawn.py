"""Launching a job's ranks as processes of this machine, with the environment variables of ``torchrun``.

Ranks are forked from a server (:mod:`shotcast.launcher.rank_server`) that has imported what they need, so eight of them
start in the time of one. They adopt the caller's state at the time of the call
(:class:`~shotcast.launcher.rank_process.CallerContext`) and meet in a store of another process
(:mod:`shotcast.launcher.job_store`). The kernel kills a rank when the parent is gone, even if it is stuck in compiled
code.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from shotcast.errors import ConfigError, RankFailed
from shotcast.hardware.detect import available_cores
from shotcast.launcher import rank_process
from shotcast.launcher.job import JobLeader, RemoteRank, Word
from shotcast.launcher.job_store import HOST, JobStore
from shotcast.launcher.monitor import WatchedRank, join_all, root_cause, terminate_all, timeout_detail, wait_for_reports
from shotcast.launcher.pickling import dumps_call
from shotcast.launcher.rank_handle import Failure, RankHandle
from shotcast.launcher.rank_process import imports_main

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")


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
    """Run ``fn(*args)`` in ``world_size`` new processes and return a list of the results, by rank.

    In them, RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set, so ``shotcast.Communicator()`` and
    ``torch.distributed.init_process_group()`` need no arguments::

        def work(scale: float) -> torch.Tensor:
            with shotcast.Communicator() as comm:
                return comm.all_reduce(torch.full([4], scale * comm.rank))

        if __name__ == "__main__":
            print(shotcast.spawn(work, 4, 0.5))

    Every rank imports the script that calls ``spawn``, so put the call under ``if __name__ == "__main__":``. Notebooks
    and ``python -c`` do not need this line.

    Args:
        fn: a function, which is pickled with ``args``: by name if ranks can import it, otherwise by value with the
            variables that it uses (closures, lambdas, functions defined in notebooks).
        world_size: number of processes, 1 or more.
        timeout_s: seconds for the whole call; None or infinity for no limit.
        env: environment variables to set in the ranks, in addition to the caller's.
        return_exceptions: do not end the other ranks when one fails. The list then holds the exception of a rank that
            failed in place of its result (:class:`RankFailed` if it was killed, exited, or was ended by ``timeout_s``).

    Unless it is set, OMP_NUM_THREADS divides the cores among the ranks, and GLOO_SOCKET_IFNAME is the loopback
    interface. How numba compiles this library's functions (NUMBA_CPU_NAME, NUMBA_DISABLE_JIT and the like) depends on
    the caller's environment at the first call.

    Raises:
        RankFailed: a rank raised, exited or was killed, or ``timeout_s`` passed; the other ranks have been ended. When
            several ranks failed, it names the one that caused it, and ``__cause__`` is that rank's exception.
        ConfigError: ``fn`` or its arguments cannot be pickled, or another argument is wrong.
    """
    if not callable(fn):
        raise ConfigError(f"spawn takes a function, not {fn!r}")
    _check_timeout(timeout_s)
    return RankGroup.start(fn, world_size, *args, env=env).results(timeout_s, return_exceptions=return_exceptions)


class RankGroup:
    """The processes of a job's ranks. They run while the caller continues, and end when it does."""

    def __init__(
        self,
        payload: bytes,
        environments: Mapping[int, dict[str, str]],
        store: JobStore | dist.Store,
        others: Sequence[RemoteRank] = (),
        own_group: bool = False,
    ):
        self._store: JobStore | dist.Store | None = store  # it must live as long as the ranks
        self.ranks: list[RankHandle] = []  # of the processes that are started here, by rank
        self.others = list(others)  # the ranks that something else started, perhaps on other hosts
        self.pids: list[int] = []
        # at exit, multiprocessing waits for processes that still run
        atexit.register(self.kill)
        self._owner = os.getpid()
        try:
            for number, environment in environments.items():
                # recorded before it runs, as an interrupt may come at any moment
                self.ranks.append(RankHandle.create(number, environment, payload, own_group))
                self.ranks[-1].start()
                self.pids.append(self.ranks[-1].process.pid or 0)
        except BaseException:
            self.end()
            raise

    @classmethod
    def start(
        cls, fn: Callable[..., Any], world_size: int, *args: Any, env: Mapping[str, str] | None = None
    ) -> RankGroup:
        """Start the ranks like :func:`spawn`, and return at once."""
        if not isinstance(world_size, int) or world_size < 1:
            raise ConfigError(f"world_size must be a positive number of processes, not {world_size!r}")
        if invalid := [name for name, value in (env or {}).items() if not isinstance(value, str)]:
            raise ConfigError(f"environment variables must be strings; {invalid[0]} is {(env or {})[invalid[0]]!r}")
        payload = _pickle_call(fn, args)
        environments = {rank: _rank_env(rank, world_size, env) for rank in range(world_size)}
        store = JobStore()
        for environment in environments.values():
            environment["MASTER_PORT"] = str(store.port)
        return cls(payload, environments, store)

    @classmethod
    def start_in_place(cls, leader: JobLeader, fn: Callable[..., Any], *args: Any, decision: str = "") -> RankGroup:
        """Start one process in place of this one, rank 0 of a job, and tell the other ranks to begin.

        The process has a separate process group: torchrun passes its signals to the group, and this process decides
        whether running work may finish first.

        Args:
            leader: the other ranks.
            fn, args: the function to call in the process, and its arguments.
            decision: the decisions sent to the other ranks when they begin.
        """
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        environment = _with_threads(dict(os.environ), local_world_size)
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store exists, in this process or in torchrun's
        environments = {int(os.environ["RANK"]): environment}
        group = cls(_pickle_call(fn, args), environments, leader.store, others=leader.members, own_group=True)
        leader.begin(decision)
        return group

    def results(self, timeout_s: float | None = None, *, return_exceptions: bool = False) -> list[Any]:
        """Wait for the ranks, end them, and return their results by rank; :func:`spawn` describes the arguments."""
        _check_timeout(timeout_s)
        deadline = time.monotonic() + timeout_s if timeout_s is not None and timeout_s < math.inf else None
        ranks = self.ranks
        try:
            timed_out = wait_for_reports(ranks, deadline, stop_at_failure=not return_exceptions)
            if timed_out or not (return_exceptions or all(rank.succeeded for rank in ranks)):
                unfinished = [rank for rank in ranks if not rank.finished]
                terminate_all(unfinished)
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
            self.end()

    def wait(self) -> RankFailed | None:
        """Wait until all ranks have returned, or until shortly after one failed; return the failure, or None.

        After a failure the other ranks still run: the thread that waits must end them.
        """
        ranks: list[WatchedRank] = [*self.ranks, *self.others]
        wait_for_reports(ranks, None, stop_at_failure=True)
        failed = [rank for rank in ranks if rank.failure is not None]
        return root_cause(failed) if failed else None

    def kill(self, reason: str = "") -> None:
        """Kill all processes, and tell other ranks to end, from any thread.

        Does nothing in a process forked from the one that started them.

        Args:
            reason: the reason to tell the other ranks; "" if it is not a failure.
        """
        if os.getpid() != self._owner:
            return
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for other in self.others:
            other.tell(Word(reason))
            other.stop_receiving()

    def end(self, reason: str = "") -> None:
        """End the remaining processes, close everything opened for them, and ask the other ranks to end.

        The connections to the other ranks stay open: after a failure, they wait a few seconds for this process to end.

        Args:
            reason: as in :meth:`kill`.
        """
        for other in self.others:
            other.tell(Word(reason))
        terminate_all(self.ranks)
        for rank in self.ranks:
            rank.close()
        self.ranks, self.pids = [], []
        atexit.unregister(self.kill)
        if isinstance(self._store, JobStore):
            self._store.close()
        self._store = None


def _check_timeout(timeout_s: float | None) -> None:
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s >= 0):
        raise ConfigError(f"timeout_s must be a number of seconds (0 or more) or None, not {timeout_s!r}")


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    if rank_process.running_main:
        raise ConfigError(
            "this script starts ranks while a rank imports it, which would start ranks without end. "
            'Put the call under: if __name__ == "__main__":'
        )
    return dumps_call(fn, args, imports_main())


def _with_threads(environment: dict[str, str], local_world_size: int) -> dict[str, str]:
    """Add OMP_NUM_THREADS to ``environment`` unless set: the cores divided by ``local_world_size``."""
    threads = environment.get("OMP_NUM_THREADS", "").strip() or str(max(1, available_cores() // local_world_size))
    first = threads.split(",")[0].strip()  # one number for each level of nesting
    if not first.isdecimal() or int(first) < 1:
        raise ConfigError(f"OMP_NUM_THREADS must be a positive number of threads, not {threads!r}")
    return environment | {"OMP_NUM_THREADS": threads}


def _rank_env(rank: int, world_size: int, env: Mapping[str, str] | None) -> dict[str, str]:
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
        "MASTER_ADDR": HOST,
        # The store already exists, so rank 0 joins it as a client too, as under torchrun.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
