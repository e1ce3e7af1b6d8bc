"""research/nvrar_nodes.py: which ranks exchange sums in the form of separate launches."""

from __future__ import annotations

import nvrar_nodes
import pytest


@pytest.mark.parametrize(("nodes", "local"), [(2, 1), (2, 2), (4, 1), (4, 2), (2, 4), (8, 1)])
def test_every_rank_has_the_sum_of_its_number_in_all_nodes(nodes: int, local: int) -> None:
    held = [{rank} for rank in range(nodes * local)]
    exchanges = [nvrar_nodes.partners(rank, nodes, local) for rank in range(nodes * local)]
    for turn in range(len(exchanges[0])):
        for rank, partners in enumerate(exchanges):
            assert exchanges[partners[turn]][turn] == rank, "both put to each other in the same turn"
        held = [held[rank] | held[partners[turn]] for rank, partners in enumerate(exchanges)]
        assert all(len(ranks) == 2 ** (turn + 1) for ranks in held), "nothing is added twice"
    assert held == [{node * local + rank % local for node in range(nodes)} for rank in range(nodes * local)]
