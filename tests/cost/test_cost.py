"""The cost model agrees with the equations of its docstring, written here as sums over steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predicted import predicted_us
from shotcast.collectives.registry import registered
from shotcast.cost.collective import NVLINK4, SHARED_MEMORY, LinkCost, NetworkCost, Work, time_us
from shotcast.wire import NodeShape, Op, in_one_step

links = st.builds(
    LinkCost,
    fixed_us=st.floats(0, 100),
    step_us=st.floats(0, 100),
    bw_gbps=st.floats(0.1, 1000),
    local_gbps=st.floats(0.1, 1000) | st.just(float("inf")),
)
sizes = st.integers(0, 1 << 32)
worlds = st.integers(1, 16)


def by_steps(link: LinkCost, steps: list[float], taken: float) -> float:
    """Return a fixed cost, a latency and the sent bytes for each step, and the bytes that a rank takes in."""
    sent = sum(link.step_us + nbytes / link.bw_gbps / 1e3 for nbytes in steps)
    return link.fixed_us + sent + taken / link.local_gbps / 1e3


@given(links, sizes, worlds)
def test_equations(link: LinkCost, nbytes: int, world_size: int) -> None:
    others, share = world_size - 1, nbytes / world_size
    expected = {
        ("all_reduce", "one_shot"): [others * nbytes],
        ("all_reduce", "two_shot"): [others * share, others * share],
        ("all_reduce", "ring"): [share] * (2 * world_size - 2),
        ("all_reduce", "multimem"): [0, nbytes, share],
        ("reduce_scatter", "one_shot"): [others * share],
        ("reduce_scatter", "ring"): [share] * others,
        ("all_gather", "one_shot"): [others * share],
        ("all_gather", "ring"): [share] * others,
        ("all_to_all", "one_shot"): [others * share],
        ("broadcast", "one_shot"): [others * nbytes],
    }
    for (op, algorithm), steps in expected.items():
        predicted = predicted_us(op, algorithm, nbytes, world_size, link)
        taken = nbytes * (world_size if (op, algorithm) == ("all_reduce", "one_shot") else 1)
        taken += nbytes if algorithm == "multimem" else 0  # staging, before the flag
        taken += nbytes / 2 if (op, algorithm) == ("all_reduce", "ring") else 0  # half of the second pass
        assert predicted == pytest.approx(by_steps(link, steps, taken), rel=1e-9), (op, algorithm)


@given(links, sizes, worlds, st.sampled_from([2, 4]))
def test_fp8_sends_a_byte_an_element_and_a_scale_a_block(
    link: LinkCost, nbytes: int, world_size: int, itemsize: int
) -> None:
    elements = nbytes / world_size / itemsize
    sent = (world_size - 1) * (elements + elements / 128 * 4)
    predicted = predicted_us("all_reduce", "two_shot_fp8", nbytes, world_size, link, itemsize)
    assert predicted == pytest.approx(by_steps(link, [sent, sent], nbytes), rel=1e-9)


@given(links, sizes, worlds)
def test_an_all_reduce_is_a_scatter_and_a_gather(link: LinkCost, nbytes: int, world_size: int) -> None:
    # of the two passes over what has arrived one is hidden, in the ring half of one
    for whole, halves, hidden in (("two_shot", "one_shot", 1.0), ("ring", "ring", 0.5)):
        parts = [predicted_us(op, halves, nbytes, world_size, link) for op in ("reduce_scatter", "all_gather")]
        total = predicted_us("all_reduce", whole, nbytes, world_size, link)
        once = hidden * nbytes / link.local_gbps / 1e3
        assert total == pytest.approx(sum(parts) - link.fixed_us - once, rel=1e-9, abs=1e-6)


@given(sizes, sizes, st.integers(2, 8))
def test_larger_takes_longer(a: int, b: int, world_size: int) -> None:
    small, large = sorted((a, b))
    for algorithm in ("one_shot", "two_shot", "ring", "multimem"):
        for link in (NVLINK4, SHARED_MEMORY):
            first, second = (predicted_us("all_reduce", algorithm, n, world_size, link) for n in (small, large))
            assert first <= second


@pytest.mark.parametrize("link", [NVLINK4, SHARED_MEMORY])
@pytest.mark.parametrize("world_size", [4, 8])
def test_who_wins_where(link: LinkCost, world_size: int) -> None:
    def best(nbytes: int) -> str:
        names = ("one_shot", "two_shot", "ring")
        return min(names, key=lambda name: predicted_us("all_reduce", name, nbytes, world_size, link))

    assert best(1) == "one_shot"
    assert best(1 << 20) == "two_shot"
    assert best(1 << 30) == "two_shot", "two steps send as many bytes as 2N-2 do"


def test_sums_in_the_switch_send_less_from_four_ranks_on() -> None:
    wire = LinkCost(fixed_us=0, step_us=0, bw_gbps=1e-3)  # 1 byte takes 1 us

    def sent(algorithm: str, world_size: int) -> float:
        return predicted_us("all_reduce", algorithm, 24, world_size, wire)

    assert [sent("multimem", n) for n in (2, 3, 4, 8)] == pytest.approx([36, 32, 30, 27])
    assert [sent("two_shot", n) for n in (2, 3, 4, 8)] == pytest.approx([24, 32, 36, 42])


shapes = st.builds(NodeShape, st.integers(1, 8), st.integers(1, 8)).filter(lambda shape: shape.world_size > 1)


networks = st.builds(
    NetworkCost,
    st.floats(0, 1e4),
    st.floats(0.01, 100),
    st.none() | st.floats(0, 1e4),
    st.none() | st.floats(0.01, 100),
)


@given(links, sizes, shapes, networks)
def test_what_leaves_a_node_goes_over_the_network(
    link: LinkCost, nbytes: int, shape: NodeShape, network: NetworkCost
) -> None:
    """Two-shot treats all ranks alike: its two steps wait for the network, if there is one."""
    work = registered()["two_shot"].forms[Op.ALL_REDUCE].work(nbytes, shape, 2)
    spread_us = network.step_us if network.spread_us is None else network.spread_us
    spread_gbps = network.bw_gbps if network.spread_gbps is None else network.spread_gbps
    far = 2 * (shape.world_size - shape.ranks_per_node) * nbytes / shape.world_size
    near = 2 * (shape.ranks_per_node - 1) * nbytes / shape.world_size
    steps_us = 2 * (link.step_us if shape.nodes == 1 else spread_us)
    sent_us = near / link.bw_gbps / 1e3 + far / spread_gbps / 1e3
    expected = link.fixed_us + steps_us + sent_us + nbytes / link.local_gbps / 1e3
    assert time_us(work, link, network) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.integers(0, 1 << 30), shapes.filter(lambda shape: shape.nodes > 1), st.sampled_from([2, 4]), networks)
def test_sums_between_nodes_step_by_step(nbytes: int, shape: NodeShape, itemsize: int, network: NetworkCost) -> None:
    """The sums of a slice travel as float32, and its result in the dtype."""
    nodes, result = shape.nodes, nbytes / shape.ranks_per_node
    sums = result / itemsize * 4
    power = 1 << nodes.bit_length() - 1
    doublings = power.bit_length() - 1
    folding = [sums, result] if power < nodes else []
    halves = [2.0 ** -(step + 1) for step in range(doublings)]
    pairwise = {
        "nvrar": [sums] * doublings + folding,
        "nvrar_halving": [part * sums for part in halves] + [part * result for part in halves] + folding,
    }
    to_all = {"nvrar_pairs": [(nodes - 1) * sums], "nvrar_two_shot": [(nodes - 1) / nodes * n for n in (sums, result)]}
    link = LinkCost(0.0, 0.0, 1e12)
    for name, steps in (pairwise | to_all).items():
        step_us, bw_gbps = network.to_all if name in to_all else (network.step_us, network.bw_gbps)
        expected = sum(step_us + sent / bw_gbps / 1e3 for sent in steps)
        work = registered()[name].forms[Op.ALL_REDUCE].work(nbytes, shape, itemsize)
        assert time_us(work, link, network) == pytest.approx(expected, rel=1e-6, abs=1e-6), name


@given(st.integers(0, 1 << 30), shapes.filter(lambda shape: shape.nodes > 1), networks)
def test_sums_of_nodes_in_16_bits_step_by_step(nbytes: int, shape: NodeShape, network: NetworkCost) -> None:
    """Two bytes an element: of a slice to all others, or of parts of it and then of the result."""
    nodes, part = shape.nodes, nbytes / shape.ranks_per_node
    whole = in_one_step(nodes, int(part))
    steps = [(nodes - 1) * part] if whole else [(nodes - 1) / nodes * part] * 2
    step_us, bw_gbps = network.to_all
    expected = sum(step_us + sent / bw_gbps / 1e3 for sent in steps)
    work = registered()["nvrar_16bit"].forms[Op.ALL_REDUCE].work(nbytes, shape, 2)
    assert time_us(work, LinkCost(0.0, 0.0, 1e12), network) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert sum(steps) <= 2 * (nodes - 1) / nodes * part + (64 << 10)


def test_two_nodes_never_send_their_sums_in_two_steps() -> None:
    assert in_one_step(2, 1 << 40)
    assert not in_one_step(3, 1 << 20)
    assert in_one_step(8, 4096)
    assert not in_one_step(8, 1 << 16)


def test_a_ring_waits_for_its_slowest_hop() -> None:
    work = registered()["ring"].forms[Op.ALL_REDUCE].work(800, NodeShape(2, 4), 2)
    assert work == Work(0, 0.0, 1200.0, 14, 1400.0)
    assert registered()["ring"].forms[Op.ALL_REDUCE].work(800, NodeShape(1, 8), 2) == Work(14, 1400.0, 1200.0)


def test_a_transfer_in_microseconds() -> None:
    assert LinkCost(0, 0, bw_gbps=2.0).transfer_us(6_000) == 3.0
