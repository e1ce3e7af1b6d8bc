"""shotcast.functional does what PyTorch's functional collectives do."""

from __future__ import annotations

import pytest

import functional_targets as targets
import shared_ranks


@pytest.mark.full
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_results_are_those_of_pytorch(world_size: int) -> None:
    done = shared_ranks.run(targets.like_those_of_pytorch, world_size)
    assert done == [3 * 2 * (4 + 12 + 3 + world_size)] * world_size


@pytest.mark.every(2)
@pytest.mark.parametrize("world_size", [2, 3])
def test_averages_and_derivatives(world_size: int) -> None:
    shared_ranks.run(targets.averages, world_size)


def test_what_is_refused() -> None:
    shared_ranks.run(targets.refused, 2)


@pytest.mark.full
def test_mixed_with_those_of_pytorch_in_one_graph() -> None:
    assert shared_ranks.run(targets.mixed, 2, "aot_eager") == [1, 1]
