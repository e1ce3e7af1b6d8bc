"""Build the executor of a communicator, or say why own kernels cannot run between its ranks."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shotcast import env, wire
from shotcast.collectives.algorithm import Algorithms
from shotcast.collectives.interface import Executor
from shotcast.memory.arena import Allocate, arena_of
from shotcast.memory.host_group import StoreGroup

logger = logging.getLogger(__name__)


class BuiltExecutor(NamedTuple):
    """An executor, or None and the reason.

    Attributes:
        executor: runs own kernels; None where the vendor library serves all calls.
        kernels: ``triton``, ``interpreter`` or ``compiled``; empty without an executor.
        obstacle: why there is no executor; empty with one.
        multicast: kernels use multicast addresses, on all ranks.
    """

    executor: Executor | None
    kernels: str
    obstacle: str
    multicast: bool


def build_executor(
    host: StoreGroup, device: torch.device, max_bytes: int, timeout_s: float, algorithms: Algorithms
) -> BuiltExecutor:
    """Lease the workspace and build the executor of a communicator. Collective; all ranks get the same kind.

    Raises ConfigError on all ranks if one of them has too little memory.
    """
    if host.world_size > wire.MAX_WORLD_SIZE:
        return _by_library(host, f"own kernels serve up to {wire.MAX_WORLD_SIZE} ranks, not {host.world_size}")
    machine = (os.uname().nodename, boot_id())
    locations = host.all_gather((machine, device.index), what="construction")
    if any(location[0] != machine for location in locations):
        return _by_library(host, "the ranks are on several hosts, and own kernels share memory of one")
    if device.type == "cpu":
        if env.cpu_kernels() == "compiled":
            from shotcast.transport.cpu.executor import CpuExecutor

            return BuiltExecutor(CpuExecutor(host, max_bytes, timeout_s, algorithms), "compiled", "", False)
        from shotcast.memory.shm import ShmBuffer

        return _triton_executor("interpreter", ShmBuffer, host, device, max_bytes, timeout_s, algorithms)
    indices = [location[1] for location in locations]
    obstacle = peer_obstacle(device, indices)
    for rank, text in enumerate(host.all_gather(obstacle, what="construction")):
        if text:
            return _by_library(host, f"rank {rank}: {text}")
    from shotcast.memory.cuda import CudaBuffer

    overlapping = len(set(indices)) < len(indices)
    allocate = functools.partial(CudaBuffer, device=device, shared=overlapping)
    return _triton_executor("triton", allocate, host, device, max_bytes, timeout_s, algorithms)


def _triton_executor(
    kernels: str,
    allocate: Allocate,
    host: StoreGroup,
    device: torch.device,
    max_bytes: int,
    timeout_s: float,
    algorithms: Algorithms,
) -> BuiltExecutor:
    from shotcast.transport.triton.executor import TritonExecutor

    arena, multicast = arena_of(device), env.multicast()
    executor = TritonExecutor(
        lambda nbytes: arena.lease(host, nbytes, allocate, multicast), host, max_bytes, timeout_s, device, algorithms
    )
    return BuiltExecutor(executor, kernels, "", executor.multicast)


_said: set[str] = set()


def _by_library(host: StoreGroup, obstacle: str) -> BuiltExecutor:
    """Return that there is no executor; rank 0 says so in the log, once for each reason."""
    if host.rank == 0 and obstacle not in _said:
        _said.add(obstacle)
        logger.warning("the vendor library serves all calls of communicator %s: %s", host.name, obstacle)
    return BuiltExecutor(None, "", obstacle, False)


def boot_id() -> str:
    """Return the id of the running kernel, which differs between hosts of one name but not between their containers."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def peer_obstacle(device: torch.device, indices: Sequence[int]) -> str:
    """Return why own kernels cannot run between these GPUs of one host; empty if they can."""
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
