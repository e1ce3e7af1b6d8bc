"""Every environment variable that shotcast reads, typed, in one place."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from shotcast.errors import ConfigError

T = TypeVar("T")

_SOCKET_DIR_BYTES = 107 - len("/pymp-12345678/listener-12345678")


def _read(name: str, convert: Callable[[str], T], default: T, accepted: str) -> T:
    text = os.environ.get(name)
    if text is None or text == "":
        return default
    try:
        return convert(text)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"environment variable {name}={text!r} is not accepted; it takes {accepted}") from error


def _choice(*names: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in names:
            raise ValueError(text)
        return text

    return convert


_FLAG = {"0": False, "1": True, "false": False, "true": True}


def algorithm() -> str:
    """SHOTCAST_ALGORITHM: overrides the choice of every call that does not name its algorithm."""
    names = ("auto", "ring", "one_shot", "two_shot", "two_shot_fp8", "multimem", "vendor")
    return _read("SHOTCAST_ALGORITHM", _choice(*names), "auto", ", ".join(names))


def table_path() -> str:
    """SHOTCAST_TABLE: a tuned table (JSON) that goes before the packaged ones; empty for none."""
    return os.environ.get("SHOTCAST_TABLE", "")


def cpu_kernels() -> str:
    """SHOTCAST_CPU_KERNELS: ``compiled`` host code, or Triton's ``interpreter`` running the GPU kernels (slow)."""
    return _read("SHOTCAST_CPU_KERNELS", _choice("compiled", "interpreter"), "compiled", "compiled or interpreter")


def multicast() -> bool:
    """SHOTCAST_MULTICAST: 0 keeps kernels from using multicast addresses where the allocator offers them."""
    return _read("SHOTCAST_MULTICAST", lambda text: _FLAG[text.lower()], True, "0 or 1")


def allow_fp8() -> bool:
    """SHOTCAST_ALLOW_FP8: 1 lets ``auto`` take two_shot_fp8, which loses precision, in every communicator that does not
    say by ``allow_fp8``."""
    return _read("SHOTCAST_ALLOW_FP8", lambda text: _FLAG[text.lower()], False, "0 or 1")


def nvtx() -> bool:
    """SHOTCAST_NVTX: 1 puts an NVTX range around each CUDA call, for profilers; that takes a microsecond or two."""
    return _read("SHOTCAST_NVTX", lambda text: _FLAG[text.lower()], False, "0 or 1")


def check_vendor() -> bool:
    """SHOTCAST_CHECK_VENDOR: 0 leaves out the step in which ranks compare a call that the vendor library serves. Then
    one that ranks make differently hangs, as it does there: for measuring that library."""
    return _read("SHOTCAST_CHECK_VENDOR", lambda text: _FLAG[text.lower()], True, "0 or 1")


def share_gpus() -> bool:
    """SHOTCAST_SHARE_GPUS: 1 lets several ranks run on one GPU, by turns. Kernels and memory are those of as many GPUs,
    and so is what they compute; their speed is not: a call that waits for a rank waits for its turn. So what measures
    does without. An engine of many ranks a GPU wants a lower ``memory_fraction``."""
    return _read("SHOTCAST_SHARE_GPUS", lambda text: _FLAG[text.lower()], False, "0 or 1")


def shm_dir() -> str:
    """SHOTCAST_SHM_DIR: where CPU ranks keep their shared memory while they map it; a tmpfs."""
    return os.environ.get("SHOTCAST_SHM_DIR", "/dev/shm")


def socket_dir() -> str:
    """TMPDIR: where Unix sockets are made, in folders of their own.

    Linux takes paths of at most 107 bytes, and multiprocessing's, of a process that is started, are the longest.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > _SOCKET_DIR_BYTES:
        raise ConfigError(
            f"temporary files are in {folder}, too long a path for sockets; set TMPDIR to one of at most "
            f"{_SOCKET_DIR_BYTES} bytes"
        )
    return folder


@dataclass(frozen=True, slots=True)
class JobEnv:
    """Where this process stands in its job, as torchrun and :func:`shotcast.spawn` tell it."""

    rank: int
    world_size: int
    local_rank: int


def job() -> JobEnv | None:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; None when none of the first two is set."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    absent = [name for name in needed if not os.environ.get(name)]
    if absent:
        raise ConfigError(
            f"the environment is incomplete: {', '.join(absent)} not set. "
            "Start with torchrun, or with shotcast.spawn(fn, world_size)"
        )
    number = "a whole number"
    rank = _read("RANK", int, 0, number)
    world_size = _read("WORLD_SIZE", int, 1, number)
    local_rank = _read("LOCAL_RANK", int, rank, number)
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK={rank} does not lie in 0..WORLD_SIZE-1 with WORLD_SIZE={world_size}")
    return JobEnv(rank, world_size, local_rank)
