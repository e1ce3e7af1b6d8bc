"""All-reduce over nodes in three launches, on CPU ranks: the library's part is Gloo's."""

from __future__ import annotations

import pytest
from hierarchical_targets import late, refused, sums

import shared_ranks


@pytest.mark.full
def test_sums_are_those_of_all_ranks() -> None:
    """Each is rounded at most once for the node and once for each step of the library."""
    assert max(shared_ranks.run(sums, 4, 2)) < 4


@pytest.mark.full
@pytest.mark.timing
def test_late_ranks_have_their_own_numbers() -> None:
    """Not those that they have in their node, or among their peers."""
    said = shared_ranks.run(late, 4, 2)
    assert said[2] == [f"2 misses (3,): {said[2][0].partition(': ')[2]}"]
    assert "3 (node" in said[2][0]
    assert said[1][0].startswith("1 misses (3,)")


def test_one_node_is_refused() -> None:
    assert all("takes several nodes of equally many ranks" in text for text in shared_ranks.run(refused, 2))
