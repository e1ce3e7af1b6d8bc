"""Detection of this host's hardware. It only queries: it allocates nothing on a GPU and changes no settings."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import math
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shotcast import env
from shotcast.errors import ConfigError

_MULTICAST_SUPPORTED = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED of cuda.h


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One visible GPU."""

    index: int
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    sm_count: int
    # whether the driver reports multicast objects for it (NVSwitch); None if the driver cannot be asked
    multicast: bool | None


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The facts about a host that doctor shows and a benchmark records."""

    cpu_model: str
    cores: int  # processor time that this process may use, in cores (by affinity and cgroup quota)
    cores_installed: int
    memory_bytes: int
    memory_available_bytes: int
    shm_dir: str
    shm_bytes: int  # the size of the tmpfs that CPU ranks share; 0 if it does not exist
    shm_free_bytes: int
    platform: str
    versions: dict[str, str]  # of Python and the libraries; a library that is not installed is absent
    cuda_driver: str
    cuda_runtime: str
    gpus: tuple[GpuFacts, ...]
    # ``peer_access[i][j]`` says whether GPU i may read and write GPU j's memory
    peer_access: tuple[tuple[bool, ...], ...]
    multicast_disabled_by: str  # the environment variable that leaves multicast off, set or not, or ""
    cuda_error: str  # why there is no GPU although this PyTorch is built with CUDA, or ""

    @property
    def all_peers(self) -> bool:
        """True if every GPU can access the memory of every other one."""
        return all(access for i, row in enumerate(self.peer_access) for j, access in enumerate(row) if i != j)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def detect() -> HostFacts:
    """Detect the host. Imports torch and, if it is a CUDA build, initializes CUDA in this process."""
    import torch

    shm_dir = env.shm_dir()
    memory = meminfo()
    shm = shutil.disk_usage(shm_dir) if Path(shm_dir).is_dir() else None
    gpus, peers, error = _gpus(torch)
    driver = _cuda_driver_version()
    return HostFacts(
        cpu_model=cpu_model(),
        cores=available_cores(),
        cores_installed=os.cpu_count() or 1,
        memory_bytes=memory.get("MemTotal", 0),
        memory_available_bytes=memory.get("MemAvailable", 0),
        shm_dir=shm_dir,
        shm_bytes=shm.total if shm else 0,
        shm_free_bytes=shm.free if shm else 0,
        platform=platform.platform(),
        versions=_versions(torch),
        cuda_driver=f"{driver // 1000}.{driver % 1000 // 10}" if driver else "",
        cuda_runtime=torch.version.cuda or "",
        gpus=gpus,
        peer_access=peers,
        multicast_disabled_by=multicast_disabled_by(),
        cuda_error=error,
    )


# --- CPU --------------------------------------------------------------------------------------------------------------


def available_cores() -> int:
    """Return how many cores this process can keep busy: its affinity mask, limited by the cgroup quota; at least 1."""
    affinity = len(os.sched_getaffinity(0))
    quota = cgroup_quota(Path("/"))
    return max(1, min(affinity, math.ceil(quota))) if quota is not None else affinity


def control_groups(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the directories of this process's control group and its ancestors, and whether they are version 2.

    Args:
        root: the directory where the kernel's file systems are mounted.
    """
    for line in read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        # limits hold for all groups below; inside a container the path may be the host's, and only the base exists
        folder = base / path.strip("/")
        yield from ((group, not controllers) for group in (folder, *folder.parents) if group.is_relative_to(base))


def cgroup_quota(root: Path) -> float | None:
    """Return the cores granted by control groups, by the smallest quota; None if there is no limit."""
    quotas = []
    for group, unified in control_groups("cpu", root):
        names = ("cpu.max",) if unified else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        fields = " ".join(line for name in names for line in read_lines(group / name)).split()
        if len(fields) == 2 and fields[0] not in ("max", "-1"):
            quotas.append(int(fields[0]) / int(fields[1]))
    return min(quotas, default=None)


def cpu_model() -> str:
    """Return the processor's name from the kernel, or its architecture if there is none."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:  # only the entry of the first core is read
                key, _, value = line.partition(":")
                if key.strip() in ("model name", "Model"):
                    return value.strip()
    except OSError:
        pass
    return platform.machine()


def meminfo(root: Path = Path("/")) -> dict[str, int]:
    """Read /proc/meminfo into bytes by key."""
    facts = {}
    for line in read_lines(root / "proc/meminfo"):
        key, _, value = line.partition(":")
        if value.endswith(" kB"):
            facts[key] = int(value.split()[0]) * 1024
    return facts


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


# --- libraries --------------------------------------------------------------------------------------------------------


def _versions(torch: Any) -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}  # which also names the build
    for distribution in ("triton", "numba", "nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            name = "nvshmem" if "nvshmem" in distribution else distribution
            versions[name] = importlib.metadata.version(distribution)
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


# --- GPUs -------------------------------------------------------------------------------------------------------------


def visible_gpus() -> tuple[GpuFacts, ...]:
    """Return the GPUs that this process sees. Initializes CUDA; raises ConfigError if that fails."""
    import torch

    try:
        return _facts_of_gpus(torch)
    except RuntimeError as error:
        raise ConfigError(f"the GPUs cannot be asked what they are: {str(error).splitlines()[0]}") from error


def _facts_of_gpus(torch: Any) -> tuple[GpuFacts, ...]:
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            GpuFacts(
                index=index,
                name=properties.name,
                memory_bytes=properties.total_memory,
                compute_capability=(properties.major, properties.minor),
                sm_count=properties.multi_processor_count,
                multicast=_device_attribute(index, _MULTICAST_SUPPORTED),
            )
        )
    return tuple(gpus)


def _gpus(torch: Any) -> tuple[tuple[GpuFacts, ...], tuple[tuple[bool, ...], ...], str]:
    if not torch.backends.cuda.is_built():
        return (), (), ""
    try:
        gpus = _facts_of_gpus(torch)
        count = len(gpus)
        peers = tuple(
            tuple(i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)) for i in range(count)
        )
    except RuntimeError as error:  # a driver that is too old, or a GPU in a bad state
        return (), (), str(error).splitlines()[0]
    return gpus, peers, ""


def multicast_disabled_by() -> str:
    """Return the environment variable that disables multicast, or ""."""
    if not env.multicast():
        return "SHOTCAST_MULTICAST"
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"  # PyTorch's allocator, which allocates our memory, reads it
    return name if os.environ.get(name, "").lower() in ("1", "true", "yes", "on", "y") else ""


def has_cuda_driver() -> bool:
    """Return whether this host has the CUDA driver, without which PyTorch sees no GPU."""
    return _libcuda() is not None


@functools.cache
def _libcuda() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return library if library.cuInit(0) == 0 else None


def _cuda_driver_version() -> int:
    """Return the CUDA version that the driver supports, as 1000 * major + 10 * minor; 0 without a driver."""
    version = ctypes.c_int(0)
    library = _libcuda()
    if library is None or library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return 0
    return version.value


def nvidia_driver() -> str:
    """Return the version of the kernel driver, such as 580.159.04; empty without one."""
    return "".join(read_lines(Path("/sys/module/nvidia/version"))).strip()


def _device_attribute(index: int, attribute: int) -> bool | None:
    library = _libcuda()
    value, device = ctypes.c_int(0), ctypes.c_int(0)
    if library is None or library.cuDeviceGet(ctypes.byref(device), index) != 0:
        return None
    if library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) != 0:
        return None
    return bool(value.value)
