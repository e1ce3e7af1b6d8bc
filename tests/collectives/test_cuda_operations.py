"""Calls with a root, uneven parts, batches, started and coalesced calls on real GPUs. Run with ``pytest -m gpu``.

With SHOTCAST_SHARE_GPUS=1 one GPU is enough.
"""

from __future__ import annotations

import operation_programs as programs
import operation_targets as targets
import pytest

import shotcast
from shotcast.collectives.rank_device import enough_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
WORLD_SIZES = [n for n in (2, 3, 4, 8) if enough_gpus(n)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_thousand_random_programs_on_two_streams(world_size: int) -> None:
    shotcast.spawn(programs.many_programs, world_size, 7_000_000, 1000, "cuda", timeout_s=380)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_calls_in_a_graph(world_size: int) -> None:
    shotcast.spawn(targets.captured, world_size, timeout_s=200)
