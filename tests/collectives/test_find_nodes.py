"""Discovery of nodes: from what ranks tell of their hosts, and in jobs of real processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import node_targets as targets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shotcast
from shotcast.collectives import fingerprints
from shotcast.collectives.nodes import RankLocation, find_nodes, layout_of
from shotcast.wire import NodeShape

HERE = RankLocation("a", "boot", 5, "0", 0, 0)


def locations(*texts: str, declared: int = 0) -> list[RankLocation]:
    """Return the locations of ranks on hosts of these names, each with its number there."""
    return [
        HERE._replace(host=host, local_rank=texts[:rank].count(host), ranks_per_node=declared)
        for rank, host in enumerate(texts)
    ]


def test_hosts_are_nodes() -> None:
    layout = layout_of(locations("a", "a", "b", "b"))
    assert (layout.members, layout.names) == (((0, 1), (2, 3)), ("a", "b"))
    mixed = layout_of(locations("b", "a", "b", "a"))
    assert (mixed.members, mixed.names, mixed.consecutive) == (((0, 2), (1, 3)), ("b", "a"), False)


def test_hosts_of_one_name_differ_by_their_kernels() -> None:
    layout = layout_of([HERE, HERE._replace(boot="other")])
    assert (layout.members, layout.names) == (((0,), (1,)), ("a/0", "a/1"))


def test_containers_without_common_memory_are_nodes() -> None:
    assert layout_of([HERE, HERE._replace(shm=6)]).nodes == 2
    assert layout_of([HERE, HERE._replace(shm=-1)]).nodes == 1, "which fails with a message about the folder"


def test_logical_nodes() -> None:
    layout = layout_of(locations("a", "a", "a", "a", declared=2))
    assert (layout.members, layout.names) == (((0, 1), (2, 3)), ("a/0", "a/1"))
    two_hosts = layout_of(locations("a", "a", "b", "b", declared=1))
    assert two_hosts.names == ("a/0", "a/1", "b/0", "b/1")
    # a part of the ranks keeps the nodes of all
    assert layout_of(locations("a", "a", "a", "a", declared=2)[1:3]).shape == NodeShape(2, 1)
    # two launchers on one host each begin with local rank 0
    launched = [HERE._replace(launcher=str(rank // 2), local_rank=rank % 2, ranks_per_node=2) for rank in range(4)]
    assert layout_of(launched).members == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("gpus", "own"), [(["A", "B", "C"], True), (["A", "B", "A"], False), (["A", "", "C"], False), (["", "", ""], False)]
)
def test_undecided_ranks_take_gpus_if_each_has_its_own(monkeypatch: Any, gpus: list[str], own: bool) -> None:
    """Launchers may show each rank one GPU, or all ranks the same; ranks without a GPU keep the others from theirs."""
    found = []
    for rank, gpu in enumerate(gpus):
        monkeypatch.setattr("shotcast.collectives.nodes.visible_gpus", lambda gpu=gpu: {gpu: 0})
        told: list[RankLocation] = []

        def all_gather(location: RankLocation, what: str, told: list[RankLocation] = told) -> list[RankLocation]:
            told.append(location)
            return [location._replace(gpu=other) for other in gpus]

        host: Any = SimpleNamespace(rank=rank, all_gather=all_gather)
        nodes = find_nodes(host, torch.device("cpu"), undecided=gpu != "")
        found.append(nodes.own_gpus)
        assert (told[0].gpu, nodes.layout.nodes) == (gpu, 1)
    assert found == [own] * 3


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.integers(0, 4))
def test_every_rank_has_one_node_and_every_node_a_name(hosts: list[str], declared: int) -> None:
    found = locations(*hosts, declared=declared)
    layout = layout_of(found)
    assert sorted(rank for members in layout.members for rank in members) == list(range(len(hosts)))
    assert len(set(layout.names)) == layout.nodes
    for members in layout.members:
        assert list(members) == sorted(members)
        assert len({hosts[rank] for rank in members}) == 1
        assert not declared or len(members) <= declared
    firsts = [members[0] for members in layout.members]
    assert firsts == sorted(firsts), "nodes are in the order of their first ranks"


def test_a_number_that_does_not_divide_the_ranks_of_a_host() -> None:
    for message in shotcast.spawn(
        targets.error_of_construction, 3, env={"SHOTCAST_RANKS_PER_NODE": "2"}, timeout_s=300
    ):
        assert "SHOTCAST_RANKS_PER_NODE=2 does not divide the 3 ranks of this host" in message


def test_ranks_that_declare_other_nodes() -> None:
    messages = shotcast.spawn(targets.error_of_construction, 4, {0: "2", 1: "2"}, timeout_s=300)
    assert len(set(messages)) == 1
    assert "the ranks do not agree on SHOTCAST_RANKS_PER_NODE: 2 on ranks 0, 1 (node " in messages[0]
    assert "; unset on ranks 2, 3 (node " in messages[0]


def test_hosts_that_differ_are_refused() -> None:
    cases = {
        "__version__": ("9.9", "the version of shotcast", shotcast.__version__),
        "torch": ("2.99", "the version of PyTorch", ".".join(torch.__version__.split(".")[:2])),
        "sources": ("other", "the sources of shotcast", fingerprints.of_package()),
        "max_bytes": ("4096", "max_bytes", "16777216"),
    }
    values = {name: value for name, (value, _, _) in cases.items()}
    for messages in shotcast.spawn(targets.errors_of_hosts, 3, values, timeout_s=300):
        for message, (value, what, usual) in zip(messages, cases.values(), strict=True):
            where = f"{usual} on ranks 0, 1 (node one); {value} on ranks 2 (node two)"
            assert message == f"the ranks do not agree on {what}: {where}"


@pytest.mark.timing
def test_uneven_nodes_are_served_by_the_library() -> None:
    for total, explanation, late in shotcast.spawn(targets.uneven, 3, timeout_s=300):
        assert total == [6.0] * 3
        assert "native kernels serve nodes of equally many ranks, and there are 2 on one, 1 on two" in explanation
        assert late == "late: 2 (node two)", "the deadline is the same, and errors name the node"
