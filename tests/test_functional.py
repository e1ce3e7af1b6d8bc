"""shotcast.functional does what PyTorch's functional collectives do."""

from __future__ import annotations

import pytest

import functional_targets as targets
import shotcast


@pytest.mark.parametrize("world_size", [2, 3])
def test_results_are_those_of_pytorch(world_size: int) -> None:
    done = shotcast.spawn(targets.like_those_of_pytorch, world_size, timeout_s=500)
    assert done == [3 * 2 * (4 + 12 + 2 + world_size)] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_averages_and_derivatives(world_size: int) -> None:
    shotcast.spawn(targets.averages, world_size, timeout_s=500)


def test_what_is_refused() -> None:
    shotcast.spawn(targets.refused, 2, timeout_s=500)


def test_mixed_with_those_of_pytorch_in_one_graph() -> None:
    assert shotcast.spawn(targets.mixed, 2, "aot_eager", timeout_s=500) == [1, 1]
