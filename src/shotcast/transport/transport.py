"""Transports as objects: how calls are carried, and with which capabilities. Plain values, without torch.

A transport is a folder next to this file, with its object in the folder's ``__init__``. Other code queries the object's
capabilities instead of comparing the names of transports or networks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from shotcast.cost import collective

if TYPE_CHECKING:
    import torch

    from shotcast.device.fingerprint import Tree
    from shotcast.hardware.nodes import NodeLayout
    from shotcast.memory.block_heap import Peers
    from shotcast.memory.host_group import StoreGroup


class Network(NamedTuple):
    """The network between the nodes of ranks."""

    name: str = ""  # as people read it; empty on one node, and where there are no native kernels
    cost: collective.NetworkCost = collective.NO_NETWORK  # its constants, the same on all ranks
    # memory of other nodes is not mapped: kernels reach it by puts, those of algorithms between nodes alone
    puts: bool = False


NO_NETWORK = Network()


class Ranks(NamedTuple):
    """The ranks of a communicator under construction."""

    host: StoreGroup
    layout: NodeLayout
    one_host: bool  # all ranks could map each other's memory
    device: torch.device  # where the kernels of this rank run
    max_bytes: int  # the longest message of the largest workspace
    timeout_s: float  # deadline of a call, from its first unsuccessful look
    algorithms: Any  # those that plans name
    # `ended(rank)` is told of ranks of other nodes whose processes have ended, on any thread
    ended: Callable[[int], None] = lambda rank: None
    left: Callable[[int], None] = lambda rank: None  # `left(rank)` is told of those that have left
    # calls may fill a GPU while they wait for other ranks; without, a gate waits in front of them
    exclusive: bool = True
    peers: Peers | None = None  # brings files from rank to rank; None where ranks make no tensors that all of them map

    @property
    def place_on_host(self) -> tuple[int, int]:
        """This rank's place among the communicator's ranks of its host, and their number."""
        every, rank = range(self.host.world_size), self.host.rank
        mates = every if self.one_host else self.layout.members[self.layout.node_of(rank)]
        return mates.index(rank), len(mates)

    def beyond(self, most: int) -> str:
        """Return why a transport for up to ``most`` ranks cannot serve; empty if it can."""
        return f"native kernels serve up to {most} ranks, not {self.host.world_size}" * (self.host.world_size > most)


class Built(NamedTuple):
    """An executor (:class:`shotcast.collectives.interface.Executor`), or None with the reason.

    ``multicast`` means that kernels use multicast addresses, on all ranks.
    """

    executor: Any
    unsupported_reason: str = ""
    multicast: bool = False
    network: Network = NO_NETWORK


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """A mechanism that carries calls."""

    name: str  # as people read and write it
    device: str  # `"cuda"` or `"cpu"`: the device of its ranks
    field: str  # the field of a `shotcast.collectives.algorithm.Form` that has its kernels
    missing: str  # why an algorithm (`{name}`) without such a kernel cannot serve
    build: str  # `build(ranks)`, which returns `Built`, by its name. Collective; raises ConfigError on all ranks
    # `fingerprint(tree, reference)` of a kernel; ValueError for what it cannot read
    fingerprint: Callable[[Tree, str], str] = lambda tree, reference: ""
    least_nodes: int = 1  # it serves ranks on this many nodes and more
    # kernels are grids of programs, as GPUs run them, and may be brought by calls; launches give their shape, and the
    # workspace bounds a message. Without, messages pass in chunks, and launches have nothing else
    grids: bool = False
    serial: bool = False  # the programs of a grid run one after the other, each by one thread
    most_words: int = 0  # the most words of a tile
    cells: bool = False  # values that kernels do not add up travel as flag cells, twice their bytes
    consecutive: bool = False  # kernels between nodes take nodes of consecutive ranks
    only_sums: bool = False  # kernels between nodes have only sums of `shotcast.wire.REDUCIBLE`
    writes_everywhere: bool = False  # a reduce writes its output on all ranks


NO_TRANSPORT = Transport(name="vendor", device="", field="", missing="", build="")
"""The transport of ranks without native kernels: the vendor library serves all calls."""
