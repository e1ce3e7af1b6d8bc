"""Build the executor that runs Triton kernels between ranks, or say why they cannot run."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from shotcast import env, extras, wire
from shotcast.cost.collective import INFINIBAND, NVLINK4, SHARED_MEMORY, LinkCost, NetworkCost
from shotcast.errors import ConfigError
from shotcast.hardware import nvml
from shotcast.memory import nvshmem_library
from shotcast.memory.arena import Allocate, arena_of
from shotcast.memory.driver import uuid_of, visible_gpus
from shotcast.transport.transport import NO_NETWORK, Built, Network, Ranks
from shotcast.transport.triton.layout import MOST_RANKS

_NVSHMEM = "nvshmem"


def interpreted(ranks: Ranks) -> Built:
    """Build the executor for CPU ranks, whose kernels are interpreted."""
    extras.require("triton", "SHOTCAST_CPU_KERNELS=interpreter")
    if not ranks.one_host:
        return Built(None, "the ranks are on several hosts, and the interpreter shares memory of one")
    if why := ranks.beyond(wire.MAX_WORLD_SIZE):
        return Built(None, why)
    from shotcast.memory.shm import ShmBuffer

    return _on_mapped_memory(ranks, ShmBuffer, SHARED_MEMORY)


def on_gpus(ranks: Ranks) -> Built:
    """Build the executor for GPUs, which map each other's memory or put to other nodes."""
    host, layout, device = ranks.host, ranks.layout, ranks.device
    puts = layout.nodes > 1 and (env.network() == _NVSHMEM or not ranks.one_host)
    if why := ranks.beyond(MOST_RANKS if puts else wire.MAX_WORLD_SIZE):
        return Built(None, why)
    gpus, numbers = zip(*host.all_gather((uuid_of(device), device.index), what="construction"), strict=True)
    _refuse_shared(gpus)
    mates = layout.members[layout.node_of(host.rank)] if puts else range(host.world_size)
    unsupported_reason = peer_unsupported_reason(device, {rank: gpus[rank] for rank in mates}) or (
        _puts_unsupported_reason(ranks) if puts else ""
    )
    for rank, text in enumerate(host.all_gather(unsupported_reason, what="construction")):
        if text:
            return Built(None, f"rank {rank}: {text}")
    if puts:
        return _on_put_memory(ranks, mates)
    from shotcast.memory.cuda import CudaBuffer

    repeated = any(len(set(names)) < len(names) for names in (gpus, numbers))
    return _on_mapped_memory(ranks, functools.partial(CudaBuffer, device=device, repeated=repeated), NVLINK4)


def _on_mapped_memory(ranks: Ranks, allocate: Allocate, link: LinkCost) -> Built:
    from shotcast.transport.triton.executor import TritonExecutor

    layout, arena, multicast = ranks.layout, arena_of(ranks.device), env.multicast()
    executor = TritonExecutor(
        ranks,
        lambda nbytes: arena.lease(ranks.host, nbytes, allocate, multicast),
        layout.nodes if layout.consecutive else 1,
    )
    joined = Network("peer stores", NetworkCost(link.step_us, link.bw_gbps)) if layout.nodes > 1 else NO_NETWORK
    return Built(executor, "", executor.multicast, joined)


def _puts_unsupported_reason(ranks: Ranks) -> str:
    """Return why GPUs of several hosts cannot put to each other, as far as this rank knows; empty if they can."""
    if not ranks.layout.consecutive:
        return "kernels that put to other hosts take nodes of consecutive ranks"
    try:
        nvshmem_library.folder()
    except ConfigError as error:
        return str(error)
    return ""


def _on_put_memory(ranks: Ranks, mates: Sequence[int]) -> Built:
    """Build the executor for GPUs that put to other nodes. If NVSHMEM refuses, the library serves the calls."""
    from shotcast.memory.nvshmem import HEAP
    from shotcast.transport.triton.hosts import HostsTritonExecutor

    try:
        executor = HostsTritonExecutor(ranks, lambda nbytes: HEAP.lease(ranks.host, nbytes, ranks.device, mates))
    except ConfigError as error:
        return Built(None, str(error))
    cost = INFINIBAND if not ranks.one_host else NetworkCost(NVLINK4.step_us, NVLINK4.bw_gbps)
    return Built(executor, network=Network(_NVSHMEM, cost, puts=True))


def _refuse_shared(gpus: Sequence[str]) -> None:
    """Raise ConfigError if several ranks share one of ``gpus``, UUIDs by rank, which NCCL would refuse too."""
    if env.share_gpus():
        return
    for gpu in gpus:
        ranks = [str(rank) for rank, other in enumerate(gpus) if other == gpu]
        if len(ranks) > 1:
            raise ConfigError(
                f"ranks {', '.join(ranks)} use one GPU, {gpu}: give each its own, by device or CUDA_VISIBLE_DEVICES; "
                "SHOTCAST_SHARE_GPUS=1 lets them take turns"
            )


def peer_unsupported_reason(device: torch.device, gpus: Mapping[int, str]) -> str:
    """Return why native kernels cannot run between these GPUs of one host; empty if they can.

    ``gpus`` maps each rank that stores to the others to the UUID of its GPU, which this process need not see.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"kernels need compute capability 8.0, as Triton does, and GPU {device.index} has {major}.{minor}"
    visible, own = visible_gpus(), uuid_of(device)
    for rank, gpu in gpus.items():
        index = visible.get(gpu)
        if index is None:  # CUDA_VISIBLE_DEVICES hides it; its memory can still be mapped
            access, peer = nvml.peer_access(own, gpu), f"the GPU of rank {rank}, {gpu}"
            if access is None:
                return f"this process does not see {peer}, and NVML knows nothing of it: a container hides it"
        else:
            access = index == device.index or torch.cuda.can_device_access_peer(device.index, index)
            peer = f"GPU {index}"
        if not access:
            return f"GPU {device.index} has no peer access to {peer}"
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton is not installed ({error})"
    return ""
