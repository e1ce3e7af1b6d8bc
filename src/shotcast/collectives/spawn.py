"""Start the ranks of one job as processes of this machine.

``torchrun`` does this for a command line; :func:`spawn` does it for a function, with the same environment variables.

- Ranks are forked from a server process that has torch and numba imported (multiprocessing's "forkserver"), so eight of
  them start in the time of one. The server starts no thread pool and never touches CUDA.
- The parent hosts the store that the ranks meet at, on a port the kernel picks; ranks join it as torchrun's workers do.
  So no port is guessed, and the store outlives every rank.
- A rank's environment is the caller's at the time of the call, in place before the caller's modules are imported.
- The kernel kills a rank when the parent is gone, even if the rank is stuck in compiled code (Linux only, as is the
  shared memory of CPU ranks).
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, TypeVar, overload

import torch.distributed as dist

from shotcast.collectives import rank_process
from shotcast.collectives.rank_process import RankProcess, main_of_caller, run_rank
from shotcast.errors import CollectiveMismatch, CollectiveTimeout, ConfigError, RankFailed
from shotcast.hardware.detect import available_cores

T = TypeVar("T")

_log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_SETTLE_S = 0.5
"""After a failure, time for the rank that caused it to be heard: its neighbours may notice first."""
_SETTLE_TIMEOUT_S = 2.0
"""The same when the failure heard first is a timeout or mismatch, which another rank caused by definition."""
_EXIT_GRACE_S = 10.0
"""From the last rank's result to the end of all processes (process groups are destroyed meanwhile)."""
_TERM_GRACE_S = 2.0
"""From SIGTERM to SIGKILL."""


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
        timeout_s: seconds for the whole call; None waits for ever.
        env: environment variables to set in the ranks, besides the caller's own.
        return_exceptions: do not end the other ranks when one fails; the list then holds, at the place of a rank that
            failed, its exception (:class:`RankFailed` if it was killed, exited, or was ended by ``timeout_s``).

    OMP_NUM_THREADS, unless set, shares the cores among the ranks; GLOO_SOCKET_IFNAME, unless set, is the loopback.

    Raises:
        RankFailed: a rank raised, exited or was killed, or ``timeout_s`` passed. The other ranks were ended. When
            several failed it names the cause, not those who then missed it. ``__cause__`` is the rank's exception.
        ConfigError: ``fn`` cannot be imported by a new process, or ``world_size`` is not positive.
    """
    deadline = time.monotonic() + timeout_s if timeout_s is not None else None
    job = Ranks.start(fn, world_size, *args, env=env)
    ranks = job.ranks
    try:
        timed_out = _collect(ranks, deadline, stop_at_failure=not return_exceptions)
        if timed_out or not (return_exceptions or all(rank.succeeded for rank in ranks)):
            unfinished = [rank for rank in ranks if not rank.finished]
            _end(unfinished)
            if timed_out:
                for rank in unfinished:
                    rank.failure = _Failure(_timeout_detail(rank, unfinished, timeout_s))
        else:
            _join(ranks)
        if return_exceptions:
            return [rank.value if rank.failure is None else rank.failure.as_exception(rank.rank) for rank in ranks]
        failed = [rank for rank in ranks if rank.failure is not None]
        if failed:
            raise _root_cause(failed)
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
        self.ranks: list[_Rank] = []
        self.pids: list[int] = []
        # multiprocessing waits at exit for processes that nobody has ended
        atexit.register(self.kill)
        try:
            for number, environment in environments.items():
                # known before it runs: an interrupt may come at any moment
                self.ranks.append(_Rank.made(number, environment, payload))
                self.ranks[-1].start()
                self.pids.append(self.ranks[-1].process.pid or 0)
        except BaseException:
            self.end()
            raise

    @classmethod
    def start(cls, fn: Callable[..., Any], world_size: int, *args: Any, env: Mapping[str, str] | None = None) -> Ranks:
        """As :func:`spawn`, but returns at once."""
        if world_size < 1:
            raise ConfigError(f"world_size is a positive number of processes, not {world_size}")
        payload = _pickle_call(fn, args)
        store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        return cls(payload, {rank: _rank_env(rank, world_size, store.port, env) for rank in range(world_size)}, store)

    @classmethod
    def start_in_place(cls, fn: Callable[..., Any], *args: Any) -> Ranks:
        """One process in the place of this one, which torchrun started as a rank: same rank, same store."""
        beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        environment = {"OMP_NUM_THREADS": str(max(1, available_cores() // beside)), **os.environ}
        return cls(_pickle_call(fn, args), {int(os.environ["RANK"]): environment}, None)

    def wait(self) -> RankFailed | None:
        """Return when all ranks have returned, or soon after one failed: then what failed first, the others running.

        The thread that waits is the one that ends them.
        """
        _collect(self.ranks, None, stop_at_failure=True)
        failed = [rank for rank in self.ranks if rank.failure is not None]
        return _root_cause(failed) if failed else None

    def kill(self) -> None:
        """End all processes, from any thread."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """End what still runs, and give back what was held for it."""
        _end(self.ranks)
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
    if getattr(fn, "__module__", None) == "__main__" and not main_of_caller():
        raise ConfigError(f"{name} was typed into an interpreter; ranks import their function from a file")
    try:
        return pickle.dumps((fn, args))
    except Exception as error:
        raise ConfigError(
            f"{name} and its arguments must be picklable, and {name} a function at the top level of a module: {error}"
        ) from error


def _rank_env(rank: int, world_size: int, port: int, env: Mapping[str, str] | None) -> dict[str, str]:
    merged = {**os.environ, **(env or {})}
    merged.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // world_size)))
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


@dataclass(slots=True)
class _Failure:
    detail: str
    exception: BaseException | None = None
    killed: bool = False

    def as_exception(self, rank: int) -> BaseException:
        if self.exception is None:
            return RankFailed(rank, self.detail)
        # Tracebacks do not travel; their text does.
        self.exception.__cause__ = RankFailed(rank, self.detail)
        return self.exception

    @property
    def consequence(self) -> int:
        """How likely another rank is to blame: 0 died without a word, 1 raised, 2 lost a peer, 3 waited in vain, 4 saw
        the end of a connection."""
        if self.killed:
            return 0
        if isinstance(self.exception, ConnectionError):
            return 4
        if isinstance(self.exception, CollectiveTimeout | CollectiveMismatch):
            return 3
        lost_peer = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
        if isinstance(self.exception, dist.DistError) or any(text in self.detail for text in lost_peer):
            return 2
        return 1


@dataclass(slots=True, eq=False)
class _Rank:
    """One process, seen from the parent."""

    rank: int
    process: RankProcess
    results: Connection
    stacks: Connection
    alive: Connection
    ends: tuple[Connection, ...]
    reported: bool = False
    value: Any = None
    failure: _Failure | None = None

    @classmethod
    def made(cls, rank: int, env: dict[str, str], payload: bytes) -> _Rank:
        """Not started yet."""
        context = multiprocessing.get_context("forkserver")
        results, results_w = context.Pipe(duplex=False)
        stacks, stacks_w = context.Pipe(duplex=False)
        alive_r, alive = context.Pipe(duplex=False)
        ends = (results_w, stacks_w, alive_r)
        process = RankProcess(target=run_rank, args=(env, main_of_caller(), payload, *ends))
        process.name = f"shotcast rank {rank}"
        return cls(rank, process, results, stacks, alive, ends)

    def start(self) -> None:
        try:
            self.process.start()
        finally:
            for end in self.ends:
                end.close()

    @property
    def finished(self) -> bool:
        return self.reported or self.failure is not None

    @property
    def succeeded(self) -> bool:
        return self.reported and self.failure is None

    def receive(self) -> None:
        """Take the rank's report, or, if the pipe ends without one, learn how the process died."""
        try:
            report = self.results.recv_bytes()
        except (EOFError, OSError):
            self.note_exit(timeout_s=_EXIT_GRACE_S)
            return
        self.reported = True
        kind, value, text = pickle.loads(report)
        if kind == "error":
            self.failure = _Failure(text, exception=_unpickle(value))
            return
        try:
            self.value = pickle.loads(value)
        except Exception:
            self.failure = _Failure(f"its return value cannot be unpickled here\n{traceback.format_exc()}")

    def note_exit(self, timeout_s: float) -> None:
        """Record an exit that was no clean one; the process has ended or is about to."""
        self.process.join(timeout_s)
        code = self.process.exitcode
        if self.failure is not None or (self.reported and code in (0, None)):
            return
        after = " after it had returned" if self.reported else ""
        if code is not None and code < 0:
            hint = "; the kernel does that when memory runs out" if -code == signal.SIGKILL else ""
            name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
            self.failure = _Failure(f"the process was killed by {name}{after}{hint}", killed=True)
        elif self.reported:
            self.failure = _Failure(f"the process exited with code {code}{after}; its standard error says why")
        else:
            self.failure = _Failure(f"the process exited with code {code} and returned nothing", killed=True)

    def stack(self) -> str:
        """Where the rank stood when SIGTERM reached it."""
        text = io.BytesIO()
        with contextlib.suppress(EOFError, OSError):
            while self.stacks.poll(0):
                chunk = os.read(self.stacks.fileno(), 65536)
                if not chunk:
                    break
                text.write(chunk)
        return text.getvalue().decode(errors="replace").strip()

    def close(self) -> None:
        """Of an ended process, or one whose start was interrupted: it ends as ``alive`` is closed."""
        for connection in (self.results, self.stacks, self.alive, *self.ends):
            connection.close()
        self.process.close()


def _collect(ranks: list[_Rank], deadline: float | None, *, stop_at_failure: bool) -> bool:
    """Wait for reports; True when the deadline passed first. A failure ends the wait after a moment for its cause."""
    while pending := {rank.results: rank for rank in ranks if not rank.finished}:
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            return True
        ready = wait(list(pending), None if deadline is None else deadline - now)
        for connection in ready:
            pending[connection].receive()  # type: ignore[index]
        failures = [rank.failure for rank in ranks if rank.failure is not None]
        if failures and stop_at_failure:
            settle_s = _SETTLE_TIMEOUT_S if all(f.consequence == 3 for f in failures) else _SETTLE_S
            if not failures[0].killed:
                _collect(ranks, time.monotonic() + settle_s, stop_at_failure=False)
            return False
    return False


def _join(ranks: list[_Rank]) -> None:
    """Let processes end by themselves once all have reported; a crash on the way out is a failure too."""
    deadline = time.monotonic() + _EXIT_GRACE_S
    for rank in ranks:
        rank.note_exit(timeout_s=max(0.0, deadline - time.monotonic()))
        if rank.process.exitcode is None:
            _log.warning("rank %d returned but did not exit within %g s; it is ended", rank.rank, _EXIT_GRACE_S)


def _end(ranks: list[_Rank]) -> None:
    """End what still runs: SIGTERM, then SIGKILL."""
    running = [rank for rank in ranks if rank.process.pid is not None and rank.process.exitcode is None]
    for stop, grace_s in (("terminate", _TERM_GRACE_S), ("kill", None)):
        for rank in running:
            getattr(rank.process, stop)()
        deadline = time.monotonic() + grace_s if grace_s is not None else None
        for rank in running:
            rank.process.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        running = [rank for rank in running if rank.process.exitcode is None]


def _timeout_detail(rank: _Rank, unfinished: list[_Rank], timeout_s: float | None) -> str:
    names = ", ".join(str(other.rank) for other in unfinished)
    stack = rank.stack()
    where = f"\nrank {rank.rank} stood here:\n{stack}" if stack else ""
    return f"ranks that had not finished within {timeout_s:g} s: {names}; they were ended{where}"


def _root_cause(failed: list[_Rank]) -> RankFailed:
    """The failure least likely to be another's consequence; among equals the first heard of."""
    rank = min(failed, key=lambda rank: rank.failure.consequence if rank.failure else 0)
    assert rank.failure is not None
    others = [str(other.rank) for other in failed if other is not rank]
    also = f"\n(ranks that failed as well: {', '.join(others)})" if others else ""
    error = RankFailed(rank.rank, rank.failure.detail.rstrip() + also)
    error.__cause__ = rank.failure.exception
    return error


def _unpickle(data: bytes | None) -> BaseException | None:
    """A rank's exception, or None where it does not travel (its text does)."""
    if data is None:
        return None
    try:
        error = pickle.loads(data)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None
