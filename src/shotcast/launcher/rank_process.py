"""The process of a rank: its start, and the steps before and after the caller's function."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import io
import multiprocessing.forkserver
import multiprocessing.popen_forkserver
import multiprocessing.spawn
import multiprocessing.util
import os
import pickle
import re
import select
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess, reduction, set_spawning_popen  # type: ignore[attr-defined]
from typing import Any

from shotcast.errors import ConfigError
from shotcast.launcher import rank_server
from shotcast.launcher.pickling import dumps

running_main = False
"""True in a rank while it imports the caller's script."""


class _Popen(multiprocessing.popen_forkserver.Popen):
    """The launch of a forkserver process, except that the environment is set before the caller's script is imported.

    multiprocessing imports ``__main__`` in the child before anything else. That script may import modules that read
    environment variables (triton.jit does so when a kernel is defined), so :func:`run_rank` imports it later.
    """

    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        preparation = multiprocessing.spawn.get_preparation_data(process_obj.name)
        for key in _MAIN_KEYS:
            preparation.pop(key, None)
        buffer = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(preparation, buffer)
            reduction.dump(process_obj, buffer)
        finally:
            set_spawning_popen(None)
        rank_server.start()
        self.sentinel, write_fd = rank_server.server.connect_to_new_process(self._fds)
        # multiprocessing.parent_process() in the child watches this end.
        parent_fd = os.dup(write_fd)
        self.finalizer = multiprocessing.util.Finalize(self, _close_fds, (parent_fd, self.sentinel))
        with open(write_fd, "wb", closefd=True) as file:
            file.write(buffer.getbuffer())
        self.pid = multiprocessing.forkserver.read_signed(self.sentinel)


class RankProcess(ForkServerProcess):
    """A rank's process, started by our own forkserver."""

    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:  # noqa: N802 (multiprocessing's name)
        return _Popen(process_obj)


def _close_fds(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


_ABOVE = 'Ranks import the script without what is under `if __name__ == "__main__":`; define it above that line'
_MAIN_KEYS = ("init_main_from_name", "init_main_from_path")


def main_of_caller() -> dict[str, Any]:
    """Return how a rank imports the caller's script; empty if there is none (an interpreter, a notebook, a pipe)."""
    preparation = multiprocessing.spawn.get_preparation_data("")
    if not os.path.isfile(preparation.get("init_main_from_path", __file__)):
        return {}
    return {key: preparation[key] for key in _MAIN_KEYS if key in preparation}


def imports_main() -> bool:
    """Return whether ranks import the caller's script, which multiprocessing does not do for ``__main__.py``."""
    main = main_of_caller()
    name = main.get("init_main_from_name") or main.get("init_main_from_path", "").removesuffix(".py")
    return bool(main) and not name.endswith("__main__")


class Descriptor:
    """An open file of the caller passed to the rank; ``number`` is its descriptor in the current process."""

    def __init__(self, number: int):
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return Descriptor._receive, (reduction.DupFd(self.number),)

    @staticmethod
    def _receive(duplicate: Any) -> Descriptor:
        return Descriptor(duplicate.detach())


@dataclass(frozen=True, slots=True)
class CallerContext:
    """The caller's process state at a call, which a rank adopts although the server started earlier."""

    env: dict[str, str]  # all environment variables of the rank
    main: dict[str, Any]  # how the rank imports the caller's script
    streams: dict[int, Descriptor]  # standard output and error, by descriptor, if open
    umask: int | None
    cores: set[int]
    niceness: int
    own_group: bool = False  # the rank leaves the caller's process group, so that signals to the group do not reach it

    @classmethod
    def current(cls, env: dict[str, str], own_group: bool = False) -> CallerContext:
        streams = {}
        for number in (1, 2):
            with contextlib.suppress(OSError):
                os.fstat(number)
                streams[number] = Descriptor(number)
        return cls(env, main_of_caller(), streams, _umask(), os.sched_getaffinity(0), os.nice(0), own_group)

    def apply(self) -> None:
        for number, stream in self.streams.items():
            os.dup2(stream.number, number)
            if stream.number != number:  # the server may have started without this descriptor
                os.close(stream.number)
        if self.umask is not None:
            os.umask(self.umask)
        with contextlib.suppress(OSError):  # the cores may have been taken away meanwhile
            os.sched_setaffinity(0, self.cores)
        os.nice(max(0, self.niceness - os.nice(0)))
        os.environ.clear()
        os.environ.update(self.env)


def _umask() -> int | None:
    """Read the umask without changing it, unlike ``os.umask``."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        if found := re.search(r"^Umask:\s*([0-7]+)$", status.read(), re.MULTILINE):
            return int(found[1], 8)
    return None


def run_rank(caller: CallerContext, payload: bytes, results: Connection, stacks: Connection, alive: Connection) -> None:
    global running_main
    die_with(alive.fileno())
    for pipe in (results, stacks, alive):
        os.set_inheritable(pipe.fileno(), False)
    if caller.own_group:
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives Ctrl-C too and ends the ranks
    faulthandler.register(signal.SIGTERM, file=stacks.fileno(), all_threads=False, chain=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, rank_server.BLOCKED)
    gc.enable()
    try:
        caller.apply()
        _apply_env()
        running_main = True
        try:
            multiprocessing.spawn.prepare(caller.main)
        finally:
            running_main = False
        try:
            fn, args = pickle.loads(payload)
        except AttributeError as error:
            if "__mp_main__" not in str(error):
                raise
            raise ConfigError(f"{error}. {_ABOVE}") from error
        value = fn(*args)
    except BaseException as error:
        results.send_bytes(error_report(error))
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads of a broken job may block an orderly exit, and none is needed.
        os._exit(1)
    import torch.distributed as dist

    results.send_bytes(value_report(value))
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def die_with(pipe: int) -> None:
    """Ask the kernel to kill this process when the other end of ``pipe``, which carries no data, is closed.

    A thread that watches the pipe would not work: it needs the GIL, which a rank stuck in compiled code may hold.
    """
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # it closed before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def _apply_env() -> None:
    """Apply the rank's environment to libraries that the server imported under its own."""
    import numpy as np
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))
    np.random.seed()  # otherwise all forked ranks would draw the same numbers
    if "numba" in sys.modules:
        sys.modules["numba"].config.reload_config()


def value_report(value: Any) -> bytes:
    """Return the report of a rank whose function returned ``value``."""
    try:
        return pickle.dumps(("value", dumps(value, f"returned {type(value).__name__}, which"), ""))
    except ConfigError as error:
        return pickle.dumps(("error", None, str(error)))


def error_report(error: BaseException) -> bytes:
    """Return the report of a rank whose function raised ``error``."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, SystemExit):
        text = f"called sys.exit({error.code!r})\n{text}"
    try:
        data = dumps(error, type(error).__name__)
        pickle.loads(data)  # an exception whose __init__ takes other arguments only fails here
    except Exception:
        data = None
    return pickle.dumps(("error", data, text))
