"""Build the executor of a communicator, or say why native kernels cannot run between its ranks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from shotcast import env, wire
from shotcast.collectives.algorithm import Algorithms
from shotcast.collectives.interface import Executor
from shotcast.collectives.nodes import Nodes
from shotcast.collectives.rank_device import uuid_of, visible_gpus
from shotcast.cost.collective import INFINIBAND, NO_NETWORK, NVLINK4, SHARED_MEMORY, NetworkCost
from shotcast.errors import ConfigError
from shotcast.hardware import nvml
from shotcast.hardware.nodes import NodeLayout
from shotcast.memory import nvshmem_library
from shotcast.memory.arena import Allocate, arena_of
from shotcast.memory.host_group import StoreGroup
from shotcast.transport.triton.layout import MOST_RANKS

logger = logging.getLogger(__name__)


class BuiltExecutor(NamedTuple):
    """An executor, or None and the reason.

    Attributes:
        executor: runs native kernels; None where the vendor library serves all calls.
        kernels: ``triton``, ``interpreter`` or ``compiled``; empty without an executor.
        obstacle: why there is no executor; empty with one.
        multicast: kernels use multicast addresses, on all ranks.
        network: what joins the nodes, as in :class:`~shotcast.collectives.algorithm.Topology`.
        network_cost: the constants of that network, the same on all ranks.
    """

    executor: Executor | None
    kernels: str
    obstacle: str
    multicast: bool
    network: str = ""
    network_cost: NetworkCost = NO_NETWORK


def build_executor(
    host: StoreGroup,
    nodes: Nodes,
    device: torch.device,
    max_bytes: int,
    timeout_s: float,
    algorithms: Algorithms,
    ended: Callable[[int], None],
    left: Callable[[int], None] = lambda rank: None,
    exclusive: bool = False,
) -> BuiltExecutor:
    """Lease the workspace and build the executor of a communicator. Collective; all ranks get the same kind.

    Args:
        host: the ranks.
        nodes: their nodes.
        device, max_bytes, timeout_s: those of the communicator.
        algorithms: those that plans name.
        exclusive: calls may fill the GPU while they wait for other ranks.
        ended: ``ended(rank)`` is told of ranks of other nodes whose processes have ended, on any thread.
        left: ``left(rank)`` is told of those that have left.

    Raises:
        ConfigError: on all ranks, if one of them has too little memory, or cannot be reached by a peer.
    """
    if why := _too_many_or_uneven(nodes.layout):
        return _by_library(host, why)
    compiled = device.type == "cpu" and env.cpu_kernels() == "compiled"
    puts = device.type == "cuda" and nodes.layout.nodes > 1 and (env.network() == "nvshmem" or not nodes.one_host)
    if not nodes.one_host and not compiled and not puts:
        return _by_library(host, "the ranks are on several hosts, and the interpreter shares memory of one")
    most = MOST_RANKS if puts else wire.MAX_WORLD_SIZE
    if host.world_size > most and (nodes.layout.nodes == 1 or not compiled):
        return _by_library(host, f"own kernels serve up to {most} ranks, not {host.world_size}")
    if compiled and nodes.layout.nodes > 1:
        from shotcast.transport.network.executor import HostsExecutor

        hosts = HostsExecutor(host, nodes.layout, max_bytes, timeout_s, algorithms, ended, left)
        cost = NetworkCost(*hosts.network)
        return BuiltExecutor(hosts, "compiled", "", False, "tcp", cost)
    if compiled:
        from shotcast.transport.cpu.executor import CpuExecutor

        return BuiltExecutor(CpuExecutor(host, max_bytes, timeout_s, algorithms), "compiled", "", False)
    if device.type == "cpu":
        from shotcast.memory.shm import ShmBuffer

        allocate: Allocate = ShmBuffer
        return _triton_executor(
            "interpreter", allocate, host, nodes, device, max_bytes, timeout_s, algorithms, exclusive
        )
    gpus, numbers = zip(*host.all_gather((uuid_of(device), device.index), what="construction"), strict=True)
    _refuse_shared(gpus)
    mates = nodes.layout.members[nodes.layout.node_of(host.rank)] if puts else range(host.world_size)
    obstacle = peer_obstacle(device, {rank: gpus[rank] for rank in mates}) or (_puts_obstacle(nodes) if puts else "")
    for rank, text in enumerate(host.all_gather(obstacle, what="construction")):
        if text:
            return _by_library(host, f"rank {rank}: {text}")
    if puts:
        return _puts_executor(host, nodes, device, max_bytes, timeout_s, algorithms, exclusive, ended)
    from shotcast.memory.cuda import CudaBuffer

    repeated = any(len(set(names)) < len(names) for names in (gpus, numbers))
    allocate = functools.partial(CudaBuffer, device=device, repeated=repeated)
    return _triton_executor("triton", allocate, host, nodes, device, max_bytes, timeout_s, algorithms, exclusive)


def _too_many_or_uneven(layout: NodeLayout) -> str:
    """Return why native kernels serve no ranks with these nodes; empty if they may."""
    if not layout.even:
        sizes = ", ".join(
            f"{len(members)} on {name}" for name, members in zip(layout.names, layout.members, strict=True)
        )
        return f"own kernels serve nodes of equally many ranks, and there are {sizes}"
    if layout.nodes > 1 and layout.ranks_per_node > wire.MAX_WORLD_SIZE:
        return f"own kernels serve up to {wire.MAX_WORLD_SIZE} ranks of a node, not {layout.ranks_per_node}"
    if layout.nodes > wire.MAX_NODES:
        return f"own kernels serve up to {wire.MAX_NODES} nodes, not {layout.nodes}"
    if layout.world_size > wire.MAX_NAMED_RANKS:
        return f"own kernels serve up to {wire.MAX_NAMED_RANKS} ranks, not {layout.world_size}"
    return ""


def _triton_executor(
    kernels: str,
    allocate: Allocate,
    host: StoreGroup,
    nodes: Nodes,
    device: torch.device,
    max_bytes: int,
    timeout_s: float,
    algorithms: Algorithms,
    exclusive: bool,
) -> BuiltExecutor:
    from shotcast.transport.triton.executor import TritonExecutor

    arena, multicast = arena_of(device), env.multicast()
    executor = TritonExecutor(
        lambda nbytes: arena.lease(host, nbytes, allocate, multicast),
        host,
        max_bytes,
        timeout_s,
        device,
        algorithms,
        nodes.layout.nodes if nodes.layout.consecutive else 1,
        exclusive,
    )
    network, cost = "", NO_NETWORK
    if nodes.layout.nodes > 1:
        link = NVLINK4 if kernels == "triton" else SHARED_MEMORY
        network, cost = "peer stores", NetworkCost(link.step_us, link.bw_gbps)
    return BuiltExecutor(executor, kernels, "", executor.multicast, network, cost)


def _puts_obstacle(nodes: Nodes) -> str:
    """Return why GPUs of several hosts cannot put to each other, as far as this rank knows; empty if they can."""
    if not nodes.layout.consecutive:
        return "kernels that put to other hosts take nodes of consecutive ranks"
    try:
        nvshmem_library.folder()
    except ConfigError as error:
        return str(error)
    return ""


def _puts_executor(
    host: StoreGroup,
    nodes: Nodes,
    device: torch.device,
    max_bytes: int,
    timeout_s: float,
    algorithms: Algorithms,
    exclusive: bool,
    ended: Callable[[int], None],
) -> BuiltExecutor:
    """Build the executor of GPUs that put to those of other nodes. NVSHMEM may refuse; then the library serves."""
    from shotcast.memory.nvshmem import HEAP
    from shotcast.transport.triton.hosts import HostsTritonExecutor

    mates = nodes.layout.members[nodes.layout.node_of(host.rank)]
    try:
        executor = HostsTritonExecutor(
            host,
            nodes.layout,
            lambda nbytes: HEAP.lease(host, nbytes, device, mates),
            max_bytes,
            timeout_s,
            device,
            algorithms,
            ended,
            exclusive,
        )
    except ConfigError as error:
        return _by_library(host, str(error))
    cost = INFINIBAND if not nodes.one_host else NetworkCost(NVLINK4.step_us, NVLINK4.bw_gbps)
    return BuiltExecutor(executor, "triton", "", False, "nvshmem", cost)


_said: set[str] = set()


def _by_library(host: StoreGroup, obstacle: str) -> BuiltExecutor:
    """Return that there is no executor; rank 0 says so in the log, once for each reason."""
    if host.rank == 0 and obstacle not in _said:
        _said.add(obstacle)
        logger.warning("the vendor library serves all calls of communicator %s: %s", host.name, obstacle)
    return BuiltExecutor(None, "", obstacle, False)


def _refuse_shared(gpus: Sequence[str]) -> None:
    """Raise ConfigError if several ranks use one GPU, which NCCL would refuse too; ``gpus`` are UUIDs, by rank."""
    if env.share_gpus():
        return
    for gpu in gpus:
        ranks = [str(rank) for rank, other in enumerate(gpus) if other == gpu]
        if len(ranks) > 1:
            raise ConfigError(
                f"ranks {', '.join(ranks)} use one GPU, {gpu}: give each its own, by device or CUDA_VISIBLE_DEVICES; "
                "SHOTCAST_SHARE_GPUS=1 lets them take turns"
            )


def peer_obstacle(device: torch.device, gpus: Mapping[int, str]) -> str:
    """Return why native kernels cannot run between these GPUs of one host; empty if they can.

    Args:
        gpus: the UUID of the GPU of each rank that stores to the others. This process need not see them.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"kernels need compute capability 8.0, as Triton does, and GPU {device.index} has {major}.{minor}"
    visible, own = visible_gpus(), uuid_of(device)
    for rank, gpu in gpus.items():
        index = visible.get(gpu)
        if index is None:  # CUDA_VISIBLE_DEVICES hides it; its memory can be mapped all the same
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
