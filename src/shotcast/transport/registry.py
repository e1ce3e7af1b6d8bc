"""The transports: which one serves which ranks, and its executor."""

from __future__ import annotations

import logging
import pkgutil

from shotcast import env, wire
from shotcast.hardware.nodes import NodeLayout
from shotcast.transport.cpu import COMPILED
from shotcast.transport.network import HOSTS
from shotcast.transport.transport import NO_TRANSPORT, Built, Ranks, Transport
from shotcast.transport.triton import GPUS, INTERPRETER

logger = logging.getLogger(__name__)

TRANSPORTS = (HOSTS, COMPILED, INTERPRETER, GPUS)
"""Transports in order of preference: the first that can serve the ranks is the default."""
_added: list[Transport] = []
_said: set[str] = set()


def register(transport: Transport) -> None:
    """Let a transport serve all ranks of its device in new communicators; all ranks must register it."""
    _added.insert(0, transport)


def fields() -> tuple[str, ...]:
    """Return the fields of forms that hold kernels."""
    return tuple(dict.fromkeys(one.field for one in (*TRANSPORTS, *_added)))


def usual(device: str, nodes: int = 1) -> Transport:
    """Return the default transport for ranks on this many nodes, regardless of this process's settings."""
    return _first(TRANSPORTS, device, nodes)


def find(device: str, nodes: int = 1) -> Transport:
    """Return the transport for ranks on this many nodes: a registered one or, for CPUs, SHOTCAST_CPU_KERNELS."""
    asked = env.cpu_kernels()
    return _first((*_added, *(one for one in TRANSPORTS if device != "cpu" or one.name == asked)), device, nodes)


def _first(transports: tuple[Transport, ...], device: str, nodes: int) -> Transport:
    return next(one for one in transports if one.device == device and one.least_nodes <= nodes)


def build_executor(transport: Transport, ranks: Ranks) -> tuple[Transport, Built]:
    """Lease the workspace and build the executor of a communicator. Collective; all ranks get the same kind.

    If native kernels cannot run, the transport is the vendor library, and rank 0 logs each reason once. Raises
    ConfigError on all ranks if one of them has too little memory, or cannot be reached by a peer.
    """
    why = _too_many_or_uneven(ranks.layout)
    built = Built(None, why) if why else pkgutil.resolve_name(transport.build)(ranks)
    if built.executor is not None:
        return transport, built
    if ranks.host.rank == 0 and built.unsupported_reason not in _said:
        _said.add(built.unsupported_reason)
        logger.warning(
            "the vendor library serves all calls of communicator %s: %s", ranks.host.name, built.unsupported_reason
        )
    return NO_TRANSPORT, built


def _too_many_or_uneven(layout: NodeLayout) -> str:
    """Return why native kernels cannot serve ranks on these nodes; empty if they can."""
    if not layout.even:
        sizes = ", ".join(
            f"{len(members)} on {name}" for name, members in zip(layout.names, layout.members, strict=True)
        )
        return f"native kernels serve nodes of equally many ranks, and there are {sizes}"
    if layout.nodes > 1 and layout.ranks_per_node > wire.MAX_WORLD_SIZE:
        return f"native kernels serve up to {wire.MAX_WORLD_SIZE} ranks of a node, not {layout.ranks_per_node}"
    if layout.nodes > wire.MAX_NODES:
        return f"native kernels serve up to {wire.MAX_NODES} nodes, not {layout.nodes}"
    if layout.world_size > wire.MAX_NAMED_RANKS:
        return f"native kernels serve up to {wire.MAX_NAMED_RANKS} ranks, not {layout.world_size}"
    return ""
