"""Collectives in simulated time: the rounds are those of the descriptions and the kernels, and two ways of following
them agree."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds import messages
from rounds.messages import Service
from rounds.ranks import CollectiveCall, Fabric, end_times, exponential_jitter, follow
from rounds.schedules import SCHEDULES, Reach, Round, partners

from shotcast.cost.collective import NVLINK4, LinkCost, NetworkCost, Work, time_us
from shotcast.errors import ConfigError
from shotcast.hardware import cluster
from shotcast.hardware.nodes import folded
from shotcast.wire import NodeShape

RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "data" / "h200"
ONE_NODE = ("ring", "one_shot", "two_shot")
BETWEEN = ("nvrar", "nvrar_halving", "nvrar_pairs", "nvrar_two_shot")
NETWORK = NetworkCost(5.0, 22.5, 6.0, 20.0)
FABRIC = Fabric(NVLINK4, NETWORK)

# a step takes time: what it brings about is not ready together with what it came with
links = st.builds(LinkCost, st.floats(0, 10), st.floats(0.01, 10), st.floats(1, 500), st.floats(1, 2000))
networks = st.builds(NetworkCost, st.floats(0.01, 50), st.floats(1, 50), st.floats(0.01, 50), st.floats(1, 50))
fabrics = st.builds(
    Fabric,
    links,
    networks,
    st.integers(1, 4),
    st.integers(0, 4),
    st.sampled_from([1.0, 1.5, 2.0, 4.0]),
    st.floats(0, 2),
)
begins = st.lists(st.floats(0, 100) | st.sampled_from([0.0, 50.0]), min_size=36, max_size=36)
sizes = st.integers(0, 1 << 24)


@st.composite
def calls(draw: st.DrawFn) -> CollectiveCall:
    nodes = draw(st.integers(1, 9))
    shape = NodeShape(nodes, draw(st.integers(2 if nodes == 1 else 1, 4)))
    name = draw(st.sampled_from(ONE_NODE if nodes == 1 else ("ring", *BETWEEN)))
    return CollectiveCall.all_reduce(name, draw(sizes), shape, draw(st.sampled_from([2, 4])))


@st.composite
def schedules(draw: st.DrawFn) -> CollectiveCall:
    """Return rounds that belong to no algorithm: any rank may send to any other, and rounds of all kinds mix."""
    shape = NodeShape(draw(st.integers(2, 5)), draw(st.integers(2, 4)))
    ranks = range(shape.world_size)
    rounds = []
    for _ in range(draw(st.integers(1, 6))):
        reach = draw(st.sampled_from([Reach.PAIR, Reach.PAIR, Reach.PAIR, Reach.NODE, Reach.PEERS]))
        nbytes = draw(st.sampled_from([0.0, 1e3, 1e5, 1e6]))
        sources = draw(st.permutations(ranks)) if reach is Reach.PAIR else ()
        silent = draw(st.sets(st.sampled_from(ranks), max_size=3)) if sources else set()
        rounds.append(
            Round(nbytes, reach, tuple(rank if rank in silent else each for rank, each in enumerate(sources)))
        )
    return CollectiveCall(shape, tuple(rounds), Work(0, 0.0, 0.0))


def unqueued(call: CollectiveCall, fabric: Fabric, begin: list[float]) -> list[float]:
    """Return when ranks end a call in which nothing waits for anything on its way, by the first equation alone."""
    now = [each + fabric.link.fixed_us for each in begin]
    local = call.shape.ranks_per_node
    for each in call.rounds:
        inside = each.nbytes / fabric.link.bw_gbps / 1e3
        if each.reach is Reach.PAIR:
            far = [source // local != rank // local for rank, source in enumerate(each.sources)]
            after = list(now)
            for rank, source in enumerate(each.sources):
                if source != rank:
                    passing = each.nbytes / fabric.network.bw_gbps / 1e3 if far[rank] else inside
                    after[source] = max(after[source], now[source] + passing)
                    latency = fabric.network.step_us if far[rank] else fabric.link.step_us
                    after[rank] = max(after[rank], now[source] + passing + latency)
            now = after
            continue
        sent_us = inside if each.reach is Reach.NODE else each.nbytes / fabric.network.to_all[1] / 1e3
        latency = fabric.link.step_us if each.reach is Reach.NODE else fabric.network.to_all[0]
        groups = [
            [other for other in range(len(now)) if (other // local == rank // local) == (each.reach is Reach.NODE)]
            for rank in range(len(now))
        ]
        if each.reach is Reach.PEERS:
            groups = [list(range(rank % local, len(now), local)) for rank in range(len(now))]
        now = [
            max([now[rank] + sent_us, *(now[other] + sent_us + latency for other in group if other != rank)])
            for rank, group in enumerate(groups)
        ]
    return now


@pytest.mark.parametrize("name", [*ONE_NODE, *BETWEEN])
@given(sizes, st.integers(2, 70), st.integers(1, 8), st.sampled_from([2, 4]))
@settings(max_examples=25, deadline=None)
def test_rounds_are_the_work_that_is_described(name: str, nbytes: int, nodes: int, ranks: int, itemsize: int) -> None:
    """Rounds have as many steps and bytes of each kind: what is simulated is what is priced and what kernels send."""
    shape = NodeShape(nodes, ranks) if name in BETWEEN else NodeShape(1, ranks + 1)
    call = CollectiveCall.all_reduce(name, nbytes, shape, itemsize)
    inside = [each for each in call.rounds if each.reach is Reach.NODE or shape.nodes == 1]
    between = [each for each in call.rounds if each.reach is Reach.PAIR and shape.nodes > 1]
    spread = [each for each in call.rounds if each.reach is Reach.PEERS]
    counted = Work(
        len(inside),
        sum(each.nbytes for each in inside),
        call.work.taken,
        len(between),
        sum(each.nbytes for each in between),
        len(spread),
        sum(each.nbytes for each in spread),
    )
    assert counted == pytest.approx(call.work)


@pytest.mark.parametrize("nodes", range(2, 17))
def test_partners_are_those_of_the_kernels(nodes: int) -> None:
    from shotcast.transport.network.exchanges import leaf_of, leaves, node_of

    pairs = folded(nodes)
    distance = 1
    while distance < leaves(nodes):
        found = partners(NodeShape(nodes, 3), distance)
        for node in range(nodes):
            gives = node % 2 == 1 and node < 2 * pairs
            expected = node if gives else node_of(leaf_of(node, pairs) ^ distance, pairs)
            assert [found[3 * node + local] for local in range(3)] == [3 * expected + local for local in range(3)]
        distance *= 2


@pytest.mark.parametrize("nodes", range(2, 17))
def test_every_sum_has_each_node_once(nodes: int) -> None:
    """Recursive doubling adds up each node's part on all nodes, and none twice."""
    counts = np.eye(nodes, dtype=int)
    *before, unfold = CollectiveCall.all_reduce("nvrar", 64, NodeShape(nodes, 1)).rounds
    for each in before if folded(nodes) else [*before, unfold]:
        sources = np.array(each.sources)
        counts = counts + np.where((sources != np.arange(nodes))[:, None], counts[sources], 0)
    if folded(nodes):
        counts = counts[np.array(unfold.sources)]
    assert (counts == 1).all()


@pytest.mark.full
@given(calls() | schedules(), fabrics, st.integers(0, 100), st.floats(0, 20), begins)
@settings(max_examples=150, deadline=None)
def test_recurrence_and_events_agree(
    call: CollectiveCall, fabric: Fabric, seed: int, mean_us: float, begin: list[float]
) -> None:
    begin = begin[: call.shape.world_size]
    jitter = exponential_jitter(mean_us, seed)
    found = follow(call, fabric, begin, jitter)
    by_rounds = messages.end_times(call, fabric, begin, jitter, Service.ROUNDS)
    assert list(found.end_us) == pytest.approx(by_rounds, rel=1e-9, abs=1e-9)
    if not found.overtaken:
        as_ready = messages.end_times(call, fabric, begin, jitter, Service.READY)
        assert list(found.end_us) == pytest.approx(as_ready, rel=1e-9, abs=1e-9)


@given(schedules(), fabrics, begins)
@settings(max_examples=60, deadline=None)
def test_queues_never_make_a_call_faster(call: CollectiveCall, fabric: Fabric, begin: list[float]) -> None:
    begin = begin[: call.shape.world_size]
    alone = unqueued(call, fabric, begin)
    for times in (end_times(call, fabric, begin), messages.end_times(call, fabric, begin)):
        assert all(queued >= free * (1 - 1e-12) for queued, free in zip(times, alone, strict=True))


@given(calls() | schedules(), links, st.floats(0, 50), st.integers(1, 4), st.integers(0, 4), begins)
@settings(max_examples=60, deadline=None)
def test_without_a_limit_of_bandwidth_nothing_waits(
    call: CollectiveCall, link: LinkCost, step_us: float, ranks_per_adapter: int, leaf: int, begin: list[float]
) -> None:
    begin = begin[: call.shape.world_size]
    fabric = Fabric(link, NetworkCost(step_us, math.inf), ranks_per_adapter, leaf, 4.0)
    alone = [each + call.taken_us(link) for each in unqueued(call, fabric, begin)]
    assert messages.end_times(call, fabric, begin) == pytest.approx(alone, rel=1e-9, abs=1e-9)
    found = follow(call, fabric, begin)
    if not found.overtaken:
        assert list(found.end_us) == pytest.approx(alone, rel=1e-9, abs=1e-9)


@given(calls().filter(lambda call: call.shape.nodes == 1 or call.rounds[0].reach is not Reach.PAIR), links, networks)
@settings(max_examples=60, deadline=None)
def test_even_ranks_take_the_time_of_the_cost_model(call: CollectiveCall, link: LinkCost, network: NetworkCost) -> None:
    found, priced = max(end_times(call, Fabric(link, network))), time_us(call.work, link, network)
    # where nodes are folded, those that fold come later, and find what others sent them
    assert found <= priced * (1 + 1e-9) + 1e-9
    if not folded(call.shape.nodes):
        assert found == pytest.approx(priced, rel=1e-9, abs=1e-9)


@given(calls(), st.lists(st.floats(0, 1000), min_size=36, max_size=36))
@settings(max_examples=60, deadline=None)
def test_no_rank_ends_before_every_rank_has_begun(call: CollectiveCall, begin: list[float]) -> None:
    begin = begin[: call.shape.world_size]
    assert min(end_times(call, FABRIC, begin)) >= max(begin)


def test_a_late_rank_delays_everyone_by_less_than_it_is_late() -> None:
    call = CollectiveCall.all_reduce("nvrar", 1 << 20, NodeShape(8, 4))
    on_time = end_times(call, FABRIC)
    late = end_times(call, FABRIC, [100.0 if rank == 5 else 0.0 for rank in range(32)])
    assert (late - on_time).min() > 80
    assert (late - on_time).max() <= 100 * (1 + 1e-12)  # but for rounding


def test_a_ring_waits_for_the_network_once_a_node() -> None:
    """With nothing to send, each of 2N - 2 hops is of a node but one in 8: far less than the cost model's bound."""
    call = CollectiveCall.all_reduce("ring", 0, NodeShape(4, 8))
    hops = 2 * (32 - 1)
    found = max(end_times(call, FABRIC)) - NVLINK4.fixed_us
    # the worst begins just before a hop between nodes
    assert found == pytest.approx(8 * NETWORK.step_us + (hops - 8) * NVLINK4.step_us)
    assert found < time_us(call.work, NVLINK4, NETWORK) / 3


def test_shared_adapters_and_leaves_take_bandwidth() -> None:
    def time(name: str, fabric: Fabric) -> float:
        return max(end_times(CollectiveCall.all_reduce(name, 1 << 26, NodeShape(8, 4)), fabric))

    shared = Fabric(NVLINK4, NETWORK, ranks_per_adapter=4)
    assert time("nvrar_halving", shared) > 3 * time("nvrar_halving", FABRIC)
    # 4 nodes a leaf: the last of three doublings leaves it, at half of the bandwidth
    narrow = Fabric(NVLINK4, NETWORK, nodes_per_leaf=4, oversubscription=2.0)
    bytes_us = (1 << 26) / 4 * 2 / NETWORK.bw_gbps / 1e3
    assert time("nvrar", narrow) - time("nvrar", FABRIC) == pytest.approx(bytes_us)
    # to all: 4 of 7 peers are on another leaf, so it has 16 x 4 / 7 messages for the links of 8 adapters
    spread_us = 7 * (1 << 26) / 4 * 2 / 20.0 / 1e3
    assert time("nvrar_pairs", narrow) - time("nvrar_pairs", FABRIC) == pytest.approx(spread_us / 7)


def test_what_nobody_else_uses_costs_nothing() -> None:
    """A ring has one flow out of each node and one out of each leaf, whoever might share them."""
    call = CollectiveCall.all_reduce("ring", 1 << 26, NodeShape(8, 4))
    alone = end_times(call, FABRIC)
    shared = Fabric(NVLINK4, NETWORK, ranks_per_adapter=4, nodes_per_leaf=4, oversubscription=4.0)
    assert list(end_times(call, shared)) == list(alone)
    # a leaf that is slower than its only flow: 2 nodes of an adapter each, over 4
    slower = Fabric(NVLINK4, NETWORK, ranks_per_adapter=4, nodes_per_leaf=2, oversubscription=4.0)
    assert max(end_times(call, slower)) > max(alone)


PLAIN = LinkCost(0.0, 1.0, 100.0)
WIRE = NetworkCost(2.0, 1.0)
TEN_US = 10e3  # bytes


def pairs(shape: NodeShape, *rounds: tuple[int, ...]) -> CollectiveCall:
    return CollectiveCall(shape, tuple(Round(TEN_US, Reach.PAIR, each) for each in rounds), Work(0, 0.0, 0.0))


def both(call: CollectiveCall, fabric: Fabric, *begin: float) -> list[float]:
    found = follow(call, fabric, begin)
    assert not found.overtaken
    assert messages.end_times(call, fabric, begin) == pytest.approx(list(found.end_us))
    return [float(each) for each in found.end_us]


def test_an_adapter_serves_one_message_after_the_other() -> None:
    # ranks 0 and 1 send to 2 and 3, by one adapter
    call = pairs(NodeShape(2, 2), (0, 1, 0, 1))
    assert both(call, Fabric(PLAIN, WIRE), 0.0, 3.0, 0.0, 0.0) == [10.0, 13.0, 12.0, 15.0]
    shared = Fabric(PLAIN, WIRE, ranks_per_adapter=2)
    assert both(call, shared, 0.0, 3.0, 0.0, 0.0) == [10.0, 20.0, 12.0, 22.0]
    assert both(call, shared, 4.0, 3.0, 0.0, 0.0) == [23.0, 13.0, 25.0, 15.0]


def test_a_message_on_its_way_delays_one_of_the_next_round() -> None:
    # rank 1 still sends the first round when rank 0 sends the second one, by the same adapter
    call = pairs(NodeShape(2, 2), (0, 1, 2, 1), (0, 1, 0, 3))
    assert both(call, Fabric(PLAIN, WIRE, 2), 0.0, 0.0, 0.0, 0.0)[2] == 22.0
    assert both(call, Fabric(PLAIN, WIRE), 0.0, 0.0, 0.0, 0.0)[2] == 12.0
    # also at the adapter of the receiver, which nobody else has: what rank 1 sent rank 2 still arrives
    call = pairs(NodeShape(3, 1), (0, 1, 1), (0, 1, 0))
    assert both(call, Fabric(PLAIN, WIRE), 4.0, 0.0, 0.0)[2] == 22.0


def test_links_between_leaves_are_those_of_the_receivers_adapter() -> None:
    # two leaves of two nodes; node 2 gets by one link and node 3 by the other
    call = pairs(NodeShape(4, 1), (0, 1, 0, 1))
    narrow = Fabric(PLAIN, WIRE, nodes_per_leaf=2, oversubscription=2.0, hop_us=0.5)
    wide = Fabric(PLAIN, WIRE, nodes_per_leaf=2, hop_us=0.5)
    assert (narrow.uplinks(1), wide.uplinks(1)) == ((1, 1.0), (2, 1.0))
    assert both(call, wide, 0.0, 0.0, 0.0, 0.0) == [10.0, 10.0, 13.0, 13.0]
    assert both(call, narrow, 0.0, 0.0, 0.0, 0.0) == [10.0, 10.0, 13.0, 23.0]
    # one and a half links: the one has the bandwidth of both
    assert Fabric(PLAIN, WIRE, nodes_per_leaf=3, oversubscription=2.0).uplinks(1) == (1, 1.5)


def test_what_is_ahead_is_held_back_by_rounds_alone() -> None:
    """Rank 1 is late with the first round, and rank 0 sends the second one by the same adapter meanwhile."""
    call, begin = pairs(NodeShape(2, 2), (0, 1, 2, 1), (0, 1, 0, 3)), [0.0, 50.0, 0.0, 0.0]
    shared = Fabric(PLAIN, WIRE, ranks_per_adapter=2)
    found = follow(call, shared, begin)
    assert found.overtaken == 1
    assert found.end_us[2] == messages.end_times(call, shared, begin, service=Service.ROUNDS)[2] == 72.0
    assert messages.end_times(call, shared, begin)[2] == 12.0
    assert list(messages.exact_end_times(call, shared, begin)) == messages.end_times(call, shared, begin)
    assert list(messages.exact_end_times(call, shared)) == list(end_times(call, shared))


def test_a_fabric_of_a_description() -> None:
    described = cluster.parse(
        "gpu: H200 SXM\nnode: {num_gpus_per_node: 8, num_nics_per_node: 4, inter_node_bw: 25e+9, p2p_latency: 5e-6}\n"
        "switch: {num_nodes_per_leaf: 16, oversubscription: 2, hop_latency: 0.3e-6, source: here}",
        "x.yaml",
    )
    found = Fabric.on(described, NVLINK4)
    assert found.network.bw_gbps == 50  # of an adapter, which two GPUs share
    assert (found.ranks_per_adapter, found.nodes_per_leaf, found.oversubscription) == (2, 16, 2)
    assert found.hop_us == pytest.approx(0.3)
    assert Fabric.on(cluster.parse("gpu: H200 SXM\nnode: {num_gpus_per_node: 8}", "x"), NVLINK4) == Fabric(NVLINK4)


def test_a_thousand_nodes_take_seconds_at_most() -> None:
    call = CollectiveCall.all_reduce("ring", 1 << 20, NodeShape(1024, 1))
    assert len(call.rounds) == 2046
    end_times(call, FABRIC)
    began = time.process_time()
    end_times(call, FABRIC)
    assert time.process_time() - began < 4


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("vendor", NodeShape(1, 4), "no rounds of 'vendor' are described; accepted: .*ring"),
        ("no such", NodeShape(1, 4), "no rounds of 'no such'"),
        ("ring", NodeShape(1, 1), "at least two ranks, not 1"),
        ("nvrar", NodeShape(1, 4), "nvrar exchanges sums of nodes, and 1x4 is one node"),
        ("two_shot", NodeShape(2, 4), "two_shot are described for one node, and 2x4 are several"),
    ],
)
def test_what_cannot_be_simulated(name: str, shape: NodeShape, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CollectiveCall.all_reduce(name, 1024, shape)


def test_bad_input() -> None:
    call = CollectiveCall.all_reduce("ring", 1024, NodeShape(1, 4))
    for ends in (end_times, messages.end_times):
        with pytest.raises(ConfigError, match="4 ranks have 4 beginnings, not 3"):
            ends(call, FABRIC, [0.0] * 3)
        with pytest.raises(ConfigError, match="begin at finite times"):
            ends(call, FABRIC, [0.0, math.nan, 0.0, 0.0])
    for oversubscription in (0.5, math.nan, math.inf):
        with pytest.raises(ConfigError, match="oversubscription is at least 1"):
            Fabric(NVLINK4, oversubscription=oversubscription)
    with pytest.raises(ConfigError, match=r"at least 0, not 1, 0, 1\.0 and nan"):
        Fabric(NVLINK4, hop_us=math.nan)
    for mean_us in (-1.0, math.nan):
        with pytest.raises(ConfigError, match="jitter must be at least 0 microseconds"):
            exponential_jitter(mean_us, 0)
    for nbytes, itemsize in ((-8, 2), (8, 0)):
        with pytest.raises(ConfigError, match=f"not {nbytes} and {itemsize}"):
            CollectiveCall.all_reduce("ring", nbytes, NodeShape(1, 4), itemsize)


def test_every_described_form_is_simulated_here() -> None:
    assert set(SCHEDULES) == {*ONE_NODE, *BETWEEN}
    assert Round(0.0, Reach.NODE).sources == ()
