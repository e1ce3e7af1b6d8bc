r"""Collectives as recurrences over their rounds, for all ranks at once: with late ranks, jitter and uneven networks.

With :math:`t_r` the time at which rank r begins a round in which it sends S bytes,

.. math:: t'_r = \max\left(t_r + S / b_r,\; \max_{q \in Q_r} (t_q + S / b_q) + a_{qr} + j_r\right)

where :math:`Q_r` are the ranks that it waits for, :math:`a_{qr}` the latency and :math:`b_q` the bandwidth on the way,
inside a node or between nodes, and :math:`j_r` the jitter of what arrives at r. A call begins with its fixed cost and
ends with what a rank takes in, as in :mod:`shotcast.cost.collective`. Maximum and plus are all there is, so a round of
all ranks is a few array operations.

That is where nothing is shared. Between nodes a message passes queues: the network adapter of its sender, which ranks
of a node may share, a link from the leaf of switches to the spine and one from there to the other leaf, if it is
another one, and the adapter of its receiver. Each queue i serves one message after the other and takes :math:`S / b_i`
for it. A message does not wait until it has wholly arrived: with :math:`s_0 = t_q` and :math:`e_0 = 0`,

.. math:: s_i = \max(s_{i-1}, f_i), \quad e_i = \max(s_i + S / b_i,\, e_{i-1}), \quad f_i \leftarrow s_i + S / b_i

is when it begins and ends to pass queue i, which is free from :math:`f_i` on. Its sender continues at :math:`e_1`, and
it has arrived at :math:`e_n + a_{qr} + j_r`. So what is still on its way delays the next message, also one of another
round; switches store what waits for them, and hold nobody back.

A queue serves messages by their rounds, those of one round as they become ready, and ranks that are ready together by
the number of the receiver. Every :math:`f_i` is then known when a round is computed. A real queue serves what is ready
first, whatever its round: that is the same unless a message of a later round is ready before one of an earlier round,
which :attr:`Followed.overtaken` counts. Where it counts none, the times are exact; elsewhere a rank that is ahead is
held back here and would not be there (:mod:`rounds.messages` does either). A leaf has as many links to the
spine as its nodes have adapters, over the oversubscription, and a message takes the one by the number of its receiver's
adapter, in the manner of static routes in a fat tree. Messages to all peers at once interleave: those of one round
share evenly what they pass, and wait for earlier rounds at the adapter alone.

The consequence: a rank that is late by d delays everyone by d, less the time that they would have waited for others
anyway, where messages do not meet; and a ring over nodes takes the latency of the network once a node, not once a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rounds.schedules import SCHEDULES, Reach, Round
from shotcast.collectives.registry import registered
from shotcast.cost.collective import NO_NETWORK, LinkCost, NetworkCost, Work, time_us
from shotcast.errors import ConfigError
from shotcast.hardware.cluster import Cluster
from shotcast.wire import NodeShape, Op

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Fabric:
    """The links that join ranks.

    Attributes:
        link: constants within a node.
        network: constants between nodes of a leaf, of a rank that shares its adapter with no other.
        ranks_per_adapter: ranks of a node that share a network adapter.
        nodes_per_leaf: nodes that a switch joins; 0 for all of them.
        oversubscription: the bandwidth of all nodes of a leaf, over that of the leaf to other leaves.
        hop_us: microseconds of a switch; between leaves there are two more than within one.
    """

    link: LinkCost
    network: NetworkCost = NO_NETWORK
    ranks_per_adapter: int = 1
    nodes_per_leaf: int = 0
    oversubscription: float = 1.0
    hop_us: float = 0.0

    def __post_init__(self) -> None:
        fitting = self.ranks_per_adapter >= 1 and self.nodes_per_leaf >= 0
        if not fitting or not 1 <= self.oversubscription < math.inf or not 0 <= self.hop_us < math.inf:
            raise ConfigError(
                "an adapter has at least one rank, a leaf at least no node, an oversubscription is at least 1 and the "
                f"time of a switch at least 0, not {self.ranks_per_adapter}, {self.nodes_per_leaf}, "
                f"{self.oversubscription} and {self.hop_us}"
            )

    @classmethod
    def on(cls, cluster: Cluster, link: LinkCost) -> Fabric:
        """Return the fabric of a cluster whose link was calibrated: ``link`` has the constants within a node."""
        network = cluster.network
        if network is None:
            return cls(link)
        wires = NetworkCost(network.latency_us, network.bw_gbps * network.gpus_per_nic)
        if network.switch is None:
            return cls(link, wires, network.gpus_per_nic)
        switch = network.switch
        return cls(link, wires, network.gpus_per_nic, switch.nodes_per_leaf, switch.oversubscription, switch.hop_us)

    def adapters(self, ranks_per_node: int) -> int:
        """Return the adapters of a node."""
        return -(-ranks_per_node // self.ranks_per_adapter)

    def uplinks(self, ranks_per_node: int) -> tuple[int, float]:
        """Return the links of a leaf to the spine, and their bandwidth: that of an adapter, or more by what is over."""
        capacity = self.nodes_per_leaf * self.adapters(ranks_per_node) / self.oversubscription
        links = max(1, int(capacity + 1e-9))
        return links, self.network.bw_gbps * capacity / links

    def routes(self, sources: Array, targets: Array, ranks_per_node: int) -> tuple[Array, Array]:
        """Return the queues that messages between nodes pass, and the latencies of their ways.

        Returns:
            A row for each message with the numbers of its four queues, -1 for one that it does not pass: the sender's
            adapter, the link up, the link down, and the receiver's adapter. No queue has two places in these.
            Microseconds for each message.
        """
        adapters = self.adapters(ranks_per_node)
        nodes, sides = [], []
        for ends in (sources, targets):
            node, local = np.divmod(ends, ranks_per_node)
            nodes.append(node)
            sides.append(node * adapters + local // self.ranks_per_adapter)
        latency_us = np.full(len(sources), self.network.step_us)
        unused = np.full(len(sources), -1)
        places = [4 * sides[0], unused, unused, 4 * sides[1] + 3]
        if self.nodes_per_leaf:
            links, _ = self.uplinks(ranks_per_node)
            leaves = [node // self.nodes_per_leaf for node in nodes]
            far = leaves[0] != leaves[1]
            link = sides[1] % links
            places[1] = np.where(far, 4 * (leaves[0] * links + link) + 1, -1)
            places[2] = np.where(far, 4 * (leaves[1] * links + link) + 2, -1)
            latency_us = latency_us + np.where(far, 2 * self.hop_us, 0.0)
        return np.stack(places, axis=1), latency_us

    def queue_gbps(self, ranks_per_node: int) -> tuple[float, float, float, float]:
        """Return the bandwidth of each of the four queues of a way."""
        wire = self.network.bw_gbps
        between = self.uplinks(ranks_per_node)[1] if self.nodes_per_leaf else wire
        return wire, between, between, wire

    def spread_us(self, nbytes: float, shape: NodeShape) -> Array:
        """Return by rank the microseconds in which it sends ``nbytes``, a part to its peer on each other node.

        All ranks do so at once. Each sends to all leaves, so all wait for the leaf that takes longest.
        """
        local = np.arange(shape.ranks_per_node)
        bw_gbps = self.network.to_all[1]
        adapter_us = nbytes * _equal(local // self.ranks_per_adapter) / (bw_gbps * 1e3)
        leaf_us = 0.0
        if self.nodes_per_leaf and shape.nodes > self.nodes_per_leaf:
            inside = np.bincount(np.arange(shape.nodes) // self.nodes_per_leaf)
            pairs = inside * (shape.nodes - inside)
            leaf_bytes = nbytes / (shape.nodes - 1) * shape.ranks_per_node * pairs.max()
            leaf_gbps = self.nodes_per_leaf * self.adapters(shape.ranks_per_node) * bw_gbps / self.oversubscription
            leaf_us = leaf_bytes / (leaf_gbps * 1e3)
        return np.tile(np.maximum(adapter_us, leaf_us), shape.nodes)

    def spread_latency_us(self, nodes: int) -> float:
        """Return the latency of messages to all peers, of which some are on another leaf if there are several."""
        far = self.nodes_per_leaf and nodes > self.nodes_per_leaf
        return self.network.to_all[0] + (2 * self.hop_us if far else 0.0)


def _equal(keys: Array) -> Array:
    """Return for each key how many are equal to it."""
    return np.bincount(keys)[keys] if keys.size else np.ones(0)


Jitter = Callable[[int, int], Array]
"""``jitter(number, ranks)``: microseconds by which what arrives at each rank in a round is late."""


def exponential_jitter(mean_us: float, seed: int) -> Jitter:
    """Return jitter that is drawn for each rank and round from an exponential distribution.

    Raises:
        ConfigError: the mean is below 0, or not finite.
    """
    if not 0 <= mean_us < math.inf:
        raise ConfigError(f"the mean of jitter must be at least 0 microseconds, not {mean_us}")

    def draw(number: int, ranks: int) -> Array:
        return np.random.default_rng((seed, number)).exponential(mean_us, ranks)

    return draw


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """An all-reduce of an algorithm, ready to be followed.

    Attributes:
        shape: its nodes and ranks.
        rounds: what ranks send, and whom they wait for.
        work: its description, of which the bytes that are taken in come at the end.
    """

    shape: NodeShape
    rounds: tuple[Round, ...]
    work: Work

    @classmethod
    def all_reduce(cls, algorithm: str, nbytes: int, shape: NodeShape, itemsize: int = 2) -> CollectiveCall:
        """Return the all-reduce of a registered algorithm.

        Raises:
            ConfigError: it has none whose rounds are described, or not for such nodes; or a size makes no sense.
        """
        if nbytes < 0 or itemsize < 1:
            raise ConfigError(f"a message has at least 0 bytes, in items of at least 1, not {nbytes} and {itemsize}")
        if algorithm not in SCHEDULES:
            raise ConfigError(f"no rounds of {algorithm!r} are described; accepted: {', '.join(SCHEDULES)}")
        form = registered()[algorithm].forms[Op.ALL_REDUCE]
        if shape.world_size < 2 or shape.nodes < 1:
            raise ConfigError(f"a collective has at least two ranks, not {shape.world_size}")
        if shape.nodes == 1 and form.between_nodes:
            raise ConfigError(f"{algorithm} exchanges sums of nodes, and {shape} is one node")
        rounds = SCHEDULES[algorithm](nbytes, shape, itemsize)
        if shape.nodes > 1 and all(each.reach is Reach.NODE for each in rounds):
            raise ConfigError(f"the rounds of {algorithm} are described for one node, and {shape} are several")
        return cls(shape, rounds, form.work(nbytes, shape, itemsize))

    def taken_us(self, link: LinkCost) -> float:
        """Return the microseconds in which a rank takes in what has arrived."""
        only = Work(0, 0.0, self.work.taken)
        return time_us(only, link) - link.fixed_us


def beginnings(call: CollectiveCall, begin_us: Sequence[float] | None) -> Array:
    """Return when each rank begins a call, in microseconds: ``begin_us``, or 0 for all.

    Raises:
        ConfigError: there is not one beginning for each rank, or one is not finite.
    """
    ranks = call.shape.world_size
    begin = np.zeros(ranks) if begin_us is None else np.asarray(begin_us, dtype=float)
    if begin.shape != (ranks,):
        raise ConfigError(f"{ranks} ranks have {ranks} beginnings, not {begin.size}")
    if not np.isfinite(begin).all():
        raise ConfigError("ranks begin at finite times")
    return begin


class Followed(NamedTuple):
    """The end of a call on each rank, in microseconds.

    ``overtaken`` counts messages that were ready at a queue before one of an earlier round, and waited for it.
    """

    end_us: Array
    overtaken: int


def end_times(
    call: CollectiveCall, fabric: Fabric, begin_us: Sequence[float] | None = None, jitter: Jitter | None = None
) -> Array:
    """Return when each rank ends a call, in microseconds; the arguments are those of :func:`follow`."""
    return follow(call, fabric, begin_us, jitter).end_us


def follow(
    call: CollectiveCall, fabric: Fabric, begin_us: Sequence[float] | None = None, jitter: Jitter | None = None
) -> Followed:
    """Follow all ranks through a call.

    Args:
        call: what is called.
        fabric: what joins the ranks.
        begin_us: when each rank begins; None for all at 0.
        jitter: of what arrives; None for none.

    Raises:
        ConfigError: there is not one beginning for each rank, or one is not finite.
    """
    shape, ranks = call.shape, call.shape.world_size
    now = beginnings(call, begin_us) + fabric.link.fixed_us
    queues = _Queues.of(fabric, shape)
    ways: dict[int, _Pairs] = {}  # by identity: rounds of a ring have one tuple, which takes long to hash
    for number, each in enumerate(call.rounds):
        late = 0.0 if jitter is None else jitter(number, ranks)
        if each.reach is Reach.PAIR:
            way = ways.get(id(each.sources))
            if way is None:
                way = ways[id(each.sources)] = _Pairs.of(each.sources, fabric, shape.ranks_per_node)
            now = way.step(now, each.nbytes, late, queues)
        elif each.reach is Reach.NODE:
            by_node = now.reshape(shape.nodes, shape.ranks_per_node)
            sent = by_node + each.nbytes / (fabric.link.bw_gbps * 1e3)
            now = _after_others(sent, 1, fabric.link.step_us, late)
        else:
            sent = queues.interleave(now, fabric.spread_us(each.nbytes, shape))
            latency_us = fabric.spread_latency_us(shape.nodes)
            now = _after_others(sent.reshape(shape.nodes, shape.ranks_per_node), 0, latency_us, late)
    return Followed(now + call.taken_us(fabric.link), queues.overtaken)


class _Queues:
    """The queues between nodes: when each is free, and the latest that anything was ready there."""

    def __init__(self, number: int, adapter_of: Array):
        self.free_us = np.full(number, -math.inf)
        self._latest_us = np.full(number, -math.inf)
        self._adapter_of = adapter_of  # by rank the queue of its adapter, outwards
        self.overtaken = 0

    @classmethod
    def of(cls, fabric: Fabric, shape: NodeShape) -> _Queues:
        ranks = np.arange(shape.world_size)
        adapter_of, _ = fabric.routes(ranks, ranks, shape.ranks_per_node)
        number = shape.nodes * fabric.adapters(shape.ranks_per_node)
        if fabric.nodes_per_leaf:
            leaves = -(-shape.nodes // fabric.nodes_per_leaf)
            number = max(number, leaves * fabric.uplinks(shape.ranks_per_node)[0])
        return cls(4 * number, adapter_of[:, 0])

    def serve(self, queue: _Order, ready_us: Array, service_us: float) -> Array:
        """Return when messages begin to pass their queues, which serve them one after the other as they are ready."""
        if queue.alone:
            places = queue.places
            self._count(places, ready_us)
            self._latest_us[places] = np.maximum(self._latest_us[places], ready_us)
            begun = np.maximum(ready_us, self.free_us[places])
            self.free_us[places] = begun + service_us
            return begun
        self._count(queue.places, ready_us)
        order = np.lexsort((ready_us, queue.places))  # stable: messages that are ready together keep their order
        ready, begun, free = ready_us[order], np.empty(len(order)), self.free_us[queue.distinct]
        for members, at in queue.positions:
            begun[at] = np.maximum(ready[at], free[members])
            free[members] = begun[at] + service_us
        self.free_us[queue.distinct] = free
        self._latest_us[queue.distinct] = np.maximum(self._latest_us[queue.distinct], ready[queue.last])
        found = np.empty(len(order))
        found[order] = begun
        return found

    def interleave(self, ready_us: Array, service_us: Array) -> Array:
        """Return when messages of all ranks have passed their adapters; those of this round interleave."""
        places = self._adapter_of
        self._count(places, ready_us)
        np.maximum.at(self._latest_us, places, ready_us)
        ended = np.maximum(ready_us, self.free_us[places]) + service_us
        np.maximum.at(self.free_us, places, ended)
        return ended

    def _count(self, places: Array, ready_us: Array) -> None:
        self.overtaken += int(np.count_nonzero(ready_us < self._latest_us[places]))


@dataclass(frozen=True, slots=True)
class _Order:
    """The messages of a round at one of the four queues of their ways.

    Attributes:
        members: which messages pass one there.
        places: the queue of each.
        alone: that each has its queue for itself.
        distinct: the queues, each once, in order.
        positions: for the first message of a queue, the second and so on, the queues that have as many, as indices of
            ``distinct``, and where these messages are once they are sorted by queue.
        last: where the last message of each queue is then.
    """

    members: Array
    places: Array
    alone: bool
    distinct: Array
    positions: tuple[tuple[Array, Array], ...]
    last: Array

    @classmethod
    def of(cls, queues: Array) -> _Order:
        (members,) = np.nonzero(queues >= 0)
        places = queues[members]
        distinct, counts = np.unique(places, return_counts=True)
        first = np.cumsum(counts) - counts
        most = int(counts.max()) if counts.size else 0
        positions = tuple(
            (np.nonzero(counts > position)[0], first[counts > position] + position) for position in range(most)
        )
        return cls(members, places, most <= 1, distinct, positions, first + counts - 1)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """One rank that each waits for: messages within nodes, and those between nodes with their queues."""

    inside: tuple[Array, Array]  # senders and receivers
    between: tuple[Array, Array]
    latency_us: Array
    orders: tuple[_Order, ...]
    queue_gbps: tuple[float, ...]
    link: LinkCost
    own_adapters: bool  # nobody waits for its own adapter: a rank goes on when it has sent

    @classmethod
    def of(cls, sources: tuple[int, ...], fabric: Fabric, ranks_per_node: int) -> _Pairs:
        senders, receivers = np.array(sources), np.arange(len(sources))
        same = senders // ranks_per_node == receivers // ranks_per_node
        (inside,), (between,) = np.nonzero(same & (senders != receivers)), np.nonzero(~same)
        queues, latency_us = fabric.routes(senders[between], receivers[between], ranks_per_node)
        return cls(
            (senders[inside], inside),
            (senders[between], between),
            latency_us,
            tuple(_Order.of(column) for column in queues.T),
            fabric.queue_gbps(ranks_per_node),
            fabric.link,
            fabric.ranks_per_adapter == 1,
        )

    def step(self, now: Array, nbytes: float, late: Array | float, queues: _Queues) -> Array:
        after = now.copy()
        arrived = np.full(len(now), -math.inf)
        senders, receivers = self.inside
        if senders.size:
            ended = now[senders] + nbytes / (self.link.bw_gbps * 1e3)
            after[senders] = ended
            arrived[receivers] = ended + self.link.step_us
        senders, receivers = self.between
        if senders.size:
            begun = now[senders]
            ended = np.full(len(begun), -math.inf)
            for stage, (order, gbps) in enumerate(zip(self.orders, self.queue_gbps, strict=True)):
                if not order.members.size:
                    continue
                service_us = nbytes / (gbps * 1e3)
                if stage or not self.own_adapters:
                    begun[order.members] = queues.serve(order, begun[order.members], service_us)
                ended[order.members] = np.maximum(begun[order.members] + service_us, ended[order.members])
                if not stage:
                    after[senders] = ended
            arrived[receivers] = ended + self.latency_us
        return np.maximum(after, arrived + late)


def _after_others(sent: Array, axis: int, latency_us: float, late: Array | float) -> Array:
    """Return the times after a round in which all along an axis wait for each other, by when each has sent."""
    two = np.partition(sent, -2, axis=axis).take([-1, -2], axis=axis)
    first, second = two.take([0], axis=axis), two.take([1], axis=axis)
    # the last of the others: where a rank is the last itself, the one before it
    others = np.where(sent == first, np.where((sent == first).sum(axis=axis, keepdims=True) > 1, first, second), first)
    arrived = others.reshape(-1) + latency_us + late
    return np.maximum(sent.reshape(-1), arrived)
