"""Tensors in memory that the GPUs of all ranks map. Run with ``pytest -m gpu``."""

from __future__ import annotations

import mapped_targets as targets
import pytest
import torch

import shotcast
from shotcast.collectives.rank_device import enough_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
WORLD_SIZES = [n for n in (2, 3, 4, 8) if enough_gpus(n)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_few_sms_work_where_they_lie(world_size: int) -> None:
    counts = [0, 1, 333, 65536, 1_000_003]
    dtypes = [torch.bfloat16, torch.float32, torch.int64]
    shotcast.spawn(targets.few_sms_in_place, world_size, "cuda", counts, dtypes, 64 << 20, timeout_s=380)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_graphs_replay_in_place(world_size: int) -> None:
    assert shotcast.spawn(targets.replayed_in_place, world_size, timeout_s=200) == [20] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_late_rank(world_size: int) -> None:
    first, *others = shotcast.spawn(targets.late_in_place, world_size, "cuda", timeout_s=100)
    assert first == ("late", (1,), True)
    assert set(others) == {("", (), True)}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_blocks_are_made_beside_calls_that_wait(world_size: int) -> None:
    """Neither making nor mapping memory waits for a kernel that runs, on this rank or another."""
    for took, mapped in shotcast.spawn(targets.made_beside_a_wait, world_size, timeout_s=100):
        assert mapped
        assert took < 1.0


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_memory_is_used_again_and_given_back(world_size: int) -> None:
    for grown, kept in shotcast.spawn(targets.many_tensors, world_size, timeout_s=200):
        # blocks of 64, 64, 128, 256 and 512 MiB; the next has 1 GiB, and other processes may take a little too
        assert grown <= 5 << 28, "tensors of many sizes"
        assert kept <= 32 << 20
