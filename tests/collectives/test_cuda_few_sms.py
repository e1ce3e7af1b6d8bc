"""Calls that keep to a number of SMs, on GPUs. Run with ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import torch
from few_sms_targets import OTHERS, absent, across_epochs, cases, graphs, many_chunks, mismatched

import shotcast
from shotcast.collectives.rank_device import enough_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
WORLD_SIZES = [n for n in (2, 3, 4, 8) if enough_gpus(n)]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_calls_have_the_bits_of_the_contract(world_size: int) -> None:
    counts = [0, 1, 5, 4099, 65536, 1_000_003, 4_000_000]
    shotcast.spawn(cases, world_size, "cuda", counts, [1, 4, 16, 40], 64 << 20, [*FLOATS, *OTHERS[:2]], timeout_s=380)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_places_of_the_window_are_used_again(world_size: int) -> None:
    """A call takes hundreds of steps, each of which waits for the peers. The chunks of 8 ranks go into the window."""
    shotcast.spawn(many_chunks, world_size, "cuda", 50_000, (2, 512, 4, 64), 3, timeout_s=200)
    shotcast.spawn(many_chunks, world_size, "cuda", 1_000_001, (8, 2048, 16, 128), 20, timeout_s=200)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_graphs_replay_on_changed_inputs(world_size: int) -> None:
    assert shotcast.spawn(graphs, world_size, 300_000, 8, timeout_s=200) == [20] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_progress_goes_on_where_its_numbers_change_sign(world_size: int) -> None:
    assert min(shotcast.spawn(across_epochs, world_size, "cuda", timeout_s=100)) > 1 << 44


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_that_give_other_numbers_of_sms_differ(world_size: int) -> None:
    for outcome in shotcast.spawn(mismatched, world_size, "cuda", timeout_s=100):
        assert outcome == ("CollectiveMismatch", (world_size - 1,), ("launch",))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("killed", [False, True])
def test_absent_rank_is_named(world_size: int, killed: bool) -> None:
    victim, timeout_s = world_size - 1, 30.0 if killed else 2.0
    outcomes = shotcast.spawn(
        absent, world_size, "cuda", victim, timeout_s, killed, timeout_s=60, return_exceptions=True
    )
    for outcome in outcomes[:victim]:
        assert isinstance(outcome["error"], shotcast.CollectiveTimeout), outcome
        assert (outcome["error"].missing, outcome["error"].reason) == ((victim,), "dead" if killed else "late")
        assert outcome["nan"]
        assert outcome["took"] < 5
