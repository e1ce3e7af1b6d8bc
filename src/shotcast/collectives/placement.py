"""What a communicator stands on: its device, its process group, and who runs its own kernels."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from shotcast import env, wire
from shotcast.errors import ConfigError
from shotcast.memory.host_group import StoreGroup
from shotcast.memory.operands import NormTensors
from shotcast.wire import CallPlan, Fault

logger = logging.getLogger(__name__)

SETUP_TIMEOUT_S = 120.0


class Executor(Protocol):
    """Runs call plans: ``kernels.executor.TritonExecutor`` or ``cpu.executor.CpuExecutor``."""

    def run(
        self, plan: CallPlan, x: torch.Tensor | None, out: torch.Tensor | None, norm: NormTensors | None = None
    ) -> None: ...
    def whole(self, plan: CallPlan, aligned: bool) -> Callable[[int, Sequence[Any]], None] | None: ...
    def prepare(self, plan: CallPlan) -> bool: ...
    def form(self, plan: CallPlan) -> str: ...
    def waiting(self, nbytes: int) -> int: ...
    def fault(self) -> Fault | None: ...
    def headers(self, epoch: int) -> list[int | None]: ...
    @property
    def epoch(self) -> int: ...
    def set_epoch(self, epoch: int, /) -> None: ...
    def set_timeout(self, timeout_s: float, /) -> None: ...
    def drain(self) -> None: ...
    def clear(self, epoch: int) -> None: ...
    def close(self) -> None: ...


class Placement(NamedTuple):
    """``executor`` runs own kernels of kind ``kernels``; or there is none, because of ``obstacle``."""

    executor: Executor | None
    kernels: str
    obstacle: str
    multicast: bool


def executor_for(
    group: dist.ProcessGroup, host: StoreGroup, device: torch.device, max_bytes: int, timeout_s: float
) -> Placement:
    """Allocate the workspace and the executor of a communicator. Collective; all ranks get the same kind."""
    if host.world_size > wire.MAX_WORLD_SIZE:
        too_many = f"own kernels serve up to {wire.MAX_WORLD_SIZE} ranks, not {host.world_size}"
        return Placement(None, "", too_many, False)
    here = (os.uname().nodename, boot_id())
    places = host.all_gather((here, device.index), what="construction")
    if any(place[0] != here for place in places):
        return Placement(None, "", "the ranks are on several hosts, and own kernels share memory of one", False)
    if device.type == "cpu":
        if env.cpu_kernels() == "compiled":
            from shotcast.transport.cpu.executor import CpuExecutor

            return Placement(CpuExecutor(host, max_bytes, timeout_s), "compiled", "", False)
        from shotcast.memory.shm import ShmBuffer
        from shotcast.transport.triton.executor import TritonExecutor
        from shotcast.transport.triton.layout import Layout

        shared = ShmBuffer(host, Layout.of(max_bytes).nbytes)
        return Placement(
            TritonExecutor(shared, host, max_bytes, timeout_s, device),
            "interpreter",
            "",
            bool(shared.multicast_address),
        )
    indices = [place[1] for place in places]
    obstacle = peer_obstacle(device, indices)
    for rank, text in enumerate(host.all_gather(obstacle, what="construction")):
        if text:
            logger.warning("rank %d: %s; the vendor library serves all calls", rank, text)
            return Placement(None, "", f"rank {rank}: {text}", False)
    from shotcast.memory.cuda import CudaBuffer
    from shotcast.transport.triton.executor import TritonExecutor
    from shotcast.transport.triton.layout import Layout

    overlapping = len(set(indices)) < len(indices)
    buffer = CudaBuffer(group, Layout.of(max_bytes).nbytes, device, host.order, overlapping)
    # a choice depends on it, and SHOTCAST_MULTICAST may differ between ranks
    multicast = all(host.all_gather(bool(buffer.multicast_address), what="construction"))
    return Placement(TritonExecutor(buffer, host, max_bytes, timeout_s, device), "triton", "", multicast)


def boot_id() -> str:
    """Tells hosts of equal name apart, and containers of one host not."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def device_of(device: str | torch.device | None) -> torch.device:
    """The device asked for; for None a GPU if every rank of the host can have one. Raises ConfigError."""
    job = env.job()
    if device is None:
        device = "cuda" if gpus_serve(ranks_here()) else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device is cpu or cuda, not {device!r}") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is cpu or cuda, not {chosen}")
    if chosen.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"device {chosen} was asked for, and PyTorch {torch.__version__} sees no GPU")
    index: int | None = chosen.index
    if index is None:
        index = gpu_of(job.local_rank) if job and "LOCAL_RANK" in os.environ else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device cuda:{index} was asked for; there are {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def gpus_serve(ranks: int) -> bool:
    """Whether so many ranks of this machine can have a GPU, each its own unless they may share."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return there >= (1 if env.share_gpus() else ranks)


def gpu_of(local_rank: int) -> int:
    """Which GPU a rank of this machine has, if it does not say."""
    return local_rank % torch.cuda.device_count() if env.share_gpus() else local_rank


def ranks_here() -> int:
    """Ranks of the job on this machine."""
    job = env.job()
    return int(os.environ.get("LOCAL_WORLD_SIZE", job.world_size if job else 1))


def process_group_of(group: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup:
    """The group given, or all ranks, initialising torch.distributed from the environment. Raises ConfigError."""
    if not dist.is_initialized():
        if group is not None:
            raise ConfigError("a process group was given, and torch.distributed is not initialised")
        if env.job() is None:
            raise ConfigError(
                "RANK and WORLD_SIZE are not set; start with torchrun, or with shotcast.spawn(fn, world_size)"
            )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        shared = env.share_gpus() and torch.cuda.device_count() < ranks_here()  # which NCCL refuses
        backend = "gloo" if device.type == "cpu" or shared else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(seconds=SETUP_TIMEOUT_S))
    group = group or dist.group.WORLD
    if group is None or dist.get_rank(group) < 0:
        raise ConfigError("this rank is not a member of the process group")
    return group


def peer_obstacle(device: torch.device, indices: Sequence[int]) -> str:
    """Why own kernels cannot run between these GPUs of this host; empty if they can."""
    if len(set(indices)) != len(indices) and not env.share_gpus():
        return f"several ranks use one GPU (indices {list(indices)}), which SHOTCAST_SHARE_GPUS=1 would allow"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"kernels need compute capability 8.0, as Triton does, and GPU {device.index} has {major}.{minor}"
    for index in indices:
        if index != device.index and not torch.cuda.can_device_access_peer(device.index, index):
            return f"GPU {device.index} has no peer access to GPU {index}"
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton is not installed ({error})"
    return ""
