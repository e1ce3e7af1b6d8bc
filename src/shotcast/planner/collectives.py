"""The cost of collectives between the ranks of a stage on a cluster, from the work described by their algorithms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from shotcast.collectives.algorithm import Algorithm
from shotcast.collectives.registry import registered
from shotcast.cost.collective import NO_NETWORK, LinkCost, NetworkCost, time_us
from shotcast.errors import ConfigError
from shotcast.hardware.cluster import Cluster, NetworkSpec
from shotcast.wire import NodeShape, Op


class CollectiveTime(NamedTuple):
    """The time of a call."""

    time_us: float  # in microseconds
    algorithm: str  # the one that takes it


@dataclass(frozen=True, slots=True)
class CollectiveCosts:
    """The link of a node and the network between nodes."""

    link: LinkCost  # constants within a node
    network: NetworkCost  # constants between nodes
    gpus_per_node: int  # ranks beyond this number are on several nodes
    # the description of the network; where ranks fill several leaves of switches, all their messages between nodes are
    # priced as those of another leaf. None for one network of all nodes
    wires: NetworkSpec | None = field(default=None, kw_only=True)

    @classmethod
    def on(cls, cluster: Cluster, link: LinkCost) -> CollectiveCosts:
        """Return the constants of a cluster with a calibrated link."""
        wires = cluster.network
        network = NO_NETWORK if wires is None else NetworkCost(wires.latency_us, wires.bw_gbps)
        return cls(link, network, cluster.gpus_per_node, wires=wires)

    def network_over(self, nodes: int) -> NetworkCost:
        """Return the network constants between this many consecutive nodes."""
        if self.wires is None or self.wires.switch is None or nodes <= self.wires.switch.nodes_per_leaf:
            return self.network
        step_us, bw_gbps = self.wires.over(nodes)
        return NetworkCost(step_us, bw_gbps * self.network.bw_gbps / self.wires.bw_gbps)

    def shape(self, ranks: int) -> NodeShape:
        """Return the nodes of consecutive ranks. Raises ConfigError if they do not fill whole nodes."""
        if ranks <= self.gpus_per_node:
            return NodeShape(1, ranks)
        if ranks % self.gpus_per_node:
            raise ConfigError(f"{ranks} ranks are no whole number of nodes of {self.gpus_per_node} GPUs")
        return NodeShape(ranks // self.gpus_per_node, self.gpus_per_node)

    def all_reduce(self, nbytes: int, ranks: int, itemsize: int, algorithm: str = "auto") -> CollectiveTime:
        """Return the time of a sum with the fastest algorithm that ``auto`` may select, or with a named one.

        Raises ConfigError if the named algorithm does not serve such ranks.
        """
        shape = self.shape(ranks)
        serving = [one for one in registered().values() if one.name == algorithm or may_be_chosen(one, shape)]
        if algorithm != "auto":
            serving = [one for one in serving if one.name == algorithm and Op.ALL_REDUCE in one.forms]
            if not serving or serving[0].between_nodes != (shape.nodes > 1):
                raise ConfigError(f"there is no model of {algorithm} for {shape} ranks")
        times = {one.name: self._time_us(one, nbytes, shape, itemsize) for one in serving}
        best = min(times, key=times.__getitem__)
        return CollectiveTime(times[best], best)

    def send(self, nbytes: int, between_nodes: bool) -> float:
        """Return the microseconds until a message arrives at a rank on the same node or the next one."""
        if between_nodes:
            return self.link.fixed_us + self.network.step_us + nbytes / (self.network.bw_gbps * 1e3)
        return self.link.fixed_us + self.link.step_us + self.link.transfer_us(nbytes)

    def all_gather(self, nbytes: int, ranks: int) -> float:
        """Return the microseconds of gathering ``nbytes`` bytes, spread over the ranks."""
        shape = self.shape(ranks)
        work = registered()["one_shot"].forms[Op.ALL_GATHER].work(nbytes, shape, 1)
        return time_us(work, self.link, self.network_over(shape.nodes))

    def _time_us(self, algorithm: Algorithm, nbytes: int, shape: NodeShape, itemsize: int) -> float:
        work = algorithm.forms[Op.ALL_REDUCE].work(nbytes, shape, itemsize)
        return time_us(work, self.link, self.network_over(shape.nodes))


def modelled_algorithms() -> tuple[str, ...]:
    """Return the algorithm names for which sums can be priced: ``auto`` and our GPU algorithms."""
    own = (one for one in registered().values() if Op.ALL_REDUCE in one.forms and not one.library)
    forms = {one.name: one.forms[Op.ALL_REDUCE] for one in own if not (one.lossy or one.multicast)}
    named = (name for name, form in forms.items() if form.triton and not (form.keeps_to_sms or form.shared_from))
    return ("auto", *named)


def may_be_chosen(algorithm: Algorithm, shape: NodeShape) -> bool:
    """Return whether ``auto`` may select an algorithm for sums, without multicast or an SM limit."""
    form = algorithm.forms.get(Op.ALL_REDUCE)
    if (
        form is None
        or not form.triton
        or algorithm.library
        or algorithm.lossy
        or algorithm.by_name
        or algorithm.multicast
    ):
        return False
    if form.keeps_to_sms or form.between_nodes != (shape.nodes > 1):
        return False
    return algorithm.in_contract(shape)
