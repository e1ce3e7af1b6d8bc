"""Every environment variable that shotcast reads, with its type."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
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


def algorithm(names: Sequence[str]) -> str:
    """SHOTCAST_ALGORITHM: the algorithm of every call that does not name one, from ``names``."""
    return _read("SHOTCAST_ALGORITHM", _choice(*names), "auto", ", ".join(names))


def algorithm_modules() -> tuple[str, ...]:
    """SHOTCAST_ALGORITHMS: modules, or paths of Python files, that register algorithms; separated by commas."""
    names = os.environ.get("SHOTCAST_ALGORITHMS", "").split(",")
    return tuple(name.strip() for name in names if name.strip())


def table_paths() -> tuple[str, ...]:
    """SHOTCAST_TABLE: tuned tables (JSON) that take precedence over the packaged ones; separated as in PATH."""
    return tuple(path for path in os.environ.get("SHOTCAST_TABLE", "").split(os.pathsep) if path)


def calibration() -> str:
    """SHOTCAST_CALIBRATION: a calibration (JSON) of this machine, which plans use instead of the packaged ones."""
    return os.environ.get("SHOTCAST_CALIBRATION", "")


def cpu_kernels() -> str:
    """SHOTCAST_CPU_KERNELS: ``compiled`` host code, or the GPU kernels in Triton's ``interpreter`` (slow)."""
    return _read("SHOTCAST_CPU_KERNELS", _choice("compiled", "interpreter"), "compiled", "compiled or interpreter")


def multicast() -> bool:
    """SHOTCAST_MULTICAST: 1 lets kernels use multicast addresses that the allocator offers.

    No kernel has used one on hardware so far.
    """
    return _read("SHOTCAST_MULTICAST", lambda text: _FLAG[text.lower()], False, "0 or 1")


def allow_fp8() -> bool:
    """SHOTCAST_ALLOW_FP8: 1 lets ``auto`` choose two_shot_fp8, which loses precision.

    Applies to communicators constructed without ``allow_fp8``.
    """
    return _read("SHOTCAST_ALLOW_FP8", lambda text: _FLAG[text.lower()], False, "0 or 1")


def batch_invariant() -> bool:
    """SHOTCAST_BATCH_INVARIANT: 1 restricts reductions to algorithms whose bits do not depend on the message size.

    Applies to communicators constructed without ``batch_invariant``.
    """
    return _read("SHOTCAST_BATCH_INVARIANT", lambda text: _FLAG[text.lower()], False, "0 or 1")


def vllm() -> bool:
    """SHOTCAST_VLLM: 1 enables the vLLM plug-in."""
    return _read("SHOTCAST_VLLM", lambda text: _FLAG[text.lower()], False, "0 or 1")


def sglang() -> bool:
    """SHOTCAST_SGLANG: 1 enables the SGLang plug-in."""
    return _read("SHOTCAST_SGLANG", lambda text: _FLAG[text.lower()], False, "0 or 1")


def nvtx() -> bool:
    """SHOTCAST_NVTX: 1 puts an NVTX range around each CUDA call, for profilers; this costs a microsecond or two."""
    return _read("SHOTCAST_NVTX", lambda text: _FLAG[text.lower()], False, "0 or 1")


def check_vendor() -> bool:
    """SHOTCAST_CHECK_VENDOR: 0 skips comparing a call across ranks before the vendor library serves it.

    Mismatched calls then end at the deadline or give wrong results. Use it to measure that library.
    """
    return _read("SHOTCAST_CHECK_VENDOR", lambda text: _FLAG[text.lower()], True, "0 or 1")


def share_gpus() -> bool:
    """SHOTCAST_SHARE_GPUS: 1 lets several ranks take turns on one GPU.

    Kernels, memory and results match separate GPUs, but speed does not: a call that waits for a rank waits for its
    turn. So measurements do not use it. With many ranks per GPU, an engine may need a lower ``gpu_memory_utilization``.
    """
    return _read("SHOTCAST_SHARE_GPUS", lambda text: _FLAG[text.lower()], False, "0 or 1")


def ranks_per_node() -> int:
    """SHOTCAST_RANKS_PER_NODE: the ranks of a logical node; 0 makes each host one node.

    This many consecutive ranks of a host count as one node and reach other nodes over the network, to study several
    nodes on one machine.
    """
    return _read("SHOTCAST_RANKS_PER_NODE", _from_one, 0, "a whole number from 1 up")


def shm_dir() -> str:
    """SHOTCAST_SHM_DIR: the tmpfs in which CPU ranks create their shared memory."""
    return os.environ.get("SHOTCAST_SHM_DIR", "/dev/shm")


def hub_cache() -> str:
    """HF_HUB_CACHE: the cache of the Hugging Face Hub; by default ``hub`` in HF_HOME, as in ``huggingface_hub``."""
    home = os.environ.get("HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
    return os.path.expandvars(os.path.expanduser(os.environ.get("HF_HUB_CACHE", os.path.join(home, "hub"))))


def hub_offline() -> bool:
    """HF_HUB_OFFLINE, or TRANSFORMERS_OFFLINE: 1 forbids downloads from the Hugging Face Hub."""
    text = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE", "")
    return text.upper() in ("1", "ON", "YES", "TRUE")


def socket_dir() -> str:
    """TMPDIR: the folder in which Unix sockets are created, each in a separate folder.

    Linux allows paths of at most 107 bytes; the longest ones come from multiprocessing in a process that it starts.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > _SOCKET_DIR_BYTES:
        raise ConfigError(
            f"temporary files are in {folder}, a path that is too long for sockets; set TMPDIR to a path of at "
            f"most {_SOCKET_DIR_BYTES} bytes"
        )
    return folder


def network() -> str:
    """SHOTCAST_NETWORK: ``nvshmem`` connects logical GPU nodes of one host by puts, like hosts; ``auto`` by stores."""
    return _read("SHOTCAST_NETWORK", _choice("auto", "nvshmem"), "auto", "auto or nvshmem")


def nvshmem_lib_dir() -> str:
    """NVSHMEM_LIB_DIR: the folder of NVSHMEM's libraries; "" for the package nvidia.nvshmem."""
    return os.environ.get("NVSHMEM_LIB_DIR", "")


def socket_ifname() -> str:
    """SHOTCAST_SOCKET_IFNAME: the network interface for connections to other hosts; "" follows the route.

    Defaults to the first interface in GLOO_SOCKET_IFNAME.
    """
    own = os.environ.get("SHOTCAST_SOCKET_IFNAME", "")
    return own or os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()


def port_range() -> tuple[int, int]:
    """SHOTCAST_PORT_RANGE: the first and the last port that ranks listen on for each other; (0, 0) for any port."""
    return _read("SHOTCAST_PORT_RANGE", _ports, (0, 0), "FIRST-LAST, from 1 to 65535")


def secret() -> str:
    """SHOTCAST_SECRET: a secret that ranks on several hosts prove to know, in addition to their job's keys."""
    return os.environ.get("SHOTCAST_SECRET", "")


def _from_one(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _ports(text: str) -> tuple[int, int]:
    first, last = (int(port) for port in text.split("-"))
    if not 1 <= first <= last <= 65535:
        raise ValueError(text)
    return first, last


@dataclass(frozen=True, slots=True)
class JobEnv:
    """This process's place among the job's ranks, as set by torchrun and :func:`shotcast.spawn`."""

    rank: int
    world_size: int
    local_rank: int


_JOB = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SIZES_OF_OTHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def job() -> JobEnv | None:
    """Return the job from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    Return None if neither RANK nor WORLD_SIZE is set.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    absent = [name for name in _JOB if not os.environ.get(name)]
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
        raise ConfigError(f"RANK={rank} is not in 0..WORLD_SIZE-1 with WORLD_SIZE={world_size}")
    return JobEnv(rank, world_size, local_rank)


def size_by_other_launcher() -> tuple[str, int]:
    """Return the variable in which mpirun or srun gives its number of processes, and the number; or ("", 1)."""
    sizes = ((name, _read(name, int, 1, "a whole number")) for name in _SIZES_OF_OTHERS)
    return next((found for found in sizes if found[1] > 1), ("", 1))


def whole_job() -> JobEnv | None:
    """Return the job in the environment, or None if there is none or only a part of one.

    A program that initializes torch.distributed from a file or a store may use some of these variables for other
    purposes.
    """
    return job() if all(os.environ.get(name) for name in _JOB) else None


def local_world_size() -> int:
    """Return how many ranks of the job run on this machine."""
    of_job = whole_job()
    return int(os.environ.get("LOCAL_WORLD_SIZE", of_job.world_size if of_job else 1))
