"""Every reduction of every dtype by own kernels on GPUs, which may be shared by ranks."""

from __future__ import annotations

import communicator_targets as targets
import pytest

import shotcast

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_bits_are_those_of_plain_torch(world_size: int) -> None:
    shotcast.spawn(targets.every_reduction, world_size, 0, 1, "cuda", timeout_s=350)


def test_replayed_graphs() -> None:
    shotcast.spawn(targets.reductions_in_graphs, 2, timeout_s=350)
