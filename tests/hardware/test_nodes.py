"""The division of ranks into nodes."""

from __future__ import annotations

import pytest

from shotcast.hardware.nodes import NodeLayout, folded
from shotcast.wire import NodeShape


def test_layout_of_interleaved_ranks() -> None:
    layout = NodeLayout.of_keys(["b", "a", "b", "a", "a"])
    assert layout.members == ((0, 2), (1, 3, 4))
    assert layout.names == ("b", "a")
    assert (layout.nodes, layout.world_size, layout.ranks_per_node, layout.even) == (2, 5, 3, False)
    assert [layout.node_of(rank) for rank in range(5)] == [0, 1, 0, 1, 1]
    assert [layout.local_rank_of(rank) for rank in range(5)] == [0, 0, 1, 1, 2]
    assert layout.describe([4, 2, 1]) == "2 (node b), 1, 4 (node a)"


def test_peers() -> None:
    layout = NodeLayout.of_keys([str(rank // 2) for rank in range(6)])
    assert layout.even
    assert [layout.peers(rank) for rank in range(6)] == [(0, 2, 4), (1, 3, 5)] * 3


def test_shapes() -> None:
    assert NodeLayout.of_keys(["a", "b"] * 3).shape == NodeShape(2, 3)
    assert str(NodeShape(2, 3)) == "2x3"
    assert NodeLayout.of_keys(["a", "a", "b"]).shape == NodeShape(1, 3), "ranks of uneven nodes are served alike"
    assert NodeLayout.one_node(5).shape == NodeShape(1, 5)
    assert NodeLayout.one_node(5).world_size == NodeShape(1, 5).world_size == 5


@pytest.mark.parametrize(("nodes", "pairs"), [(1, 0), (2, 0), (3, 1), (4, 0), (5, 1), (6, 2), (7, 3), (8, 0), (9, 1)])
def test_folded_nodes_leave_a_power_of_two(nodes: int, pairs: int) -> None:
    assert folded(nodes) == pairs
    left = nodes - pairs
    assert left & (left - 1) == 0
