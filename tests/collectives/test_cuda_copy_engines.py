"""Calls by copy engines, on GPUs. Run with ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import torch
from copy_engine_targets import absent, cases, graphs

import shotcast
from shotcast.collectives.rank_device import enough_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
WORLD_SIZES = [n for n in (2, 3, 4, 8) if enough_gpus(n)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_calls_have_the_bits_of_the_contract(world_size: int) -> None:
    """A part of 36 MB passes in several chunks of the default size."""
    counts, dtypes = [0, 1, 4099, 1_000_003, 9_000_000], [torch.float32, torch.bfloat16, torch.int64]
    shotcast.spawn(cases, world_size, "cuda", counts, [0, 1 << 20], dtypes, timeout_s=380)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_graphs_replay_on_changed_inputs(world_size: int) -> None:
    assert shotcast.spawn(graphs, world_size, 300_000, 1 << 16, timeout_s=200) == [20] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("killed", [False, True])
def test_rank_that_stops_between_steps_is_named(world_size: int, killed: bool) -> None:
    timeout_s = 600.0 if killed else 4.0
    by = {"return_exceptions": True, "timeout_s": 200}
    for rank, outcome in enumerate(shotcast.spawn(absent, world_size, "cuda", 1, timeout_s, 2, killed, **by)):
        if rank != 1:
            assert isinstance(outcome["error"], shotcast.CollectiveTimeout), outcome
            assert (outcome["error"].missing, outcome["nan"]) == ((1,), True)
