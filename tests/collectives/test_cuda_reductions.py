"""Every reduction of every dtype by native kernels on GPUs, which may be shared by ranks."""

from __future__ import annotations

import communicator_targets as targets
import pytest

import shotcast

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


PARTS = 8
"""Most of the time is spent on compiling: run the parts in processes of their own."""


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("world_size", [2, 3])
def test_bits_are_those_of_plain_torch(world_size: int, part: int) -> None:
    shotcast.spawn(targets.every_reduction, world_size, part, PARTS, "cuda", timeout_s=350)


@pytest.mark.parametrize("part", range(PARTS))
def test_replayed_graphs(part: int) -> None:
    shotcast.spawn(targets.reductions_in_graphs, 2, part, PARTS, timeout_s=350)
