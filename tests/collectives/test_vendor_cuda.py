"""Calls that NCCL serves on GPUs: results, deadlines in eager calls and in graphs, connections made anew."""

from __future__ import annotations

import pytest
import torch
import vendor_cuda_targets as targets

import shotcast
from shotcast.errors import RankFailed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
WORLD_SIZES = [n for n in (2, 4) if torch.cuda.device_count() >= n]
"""NCCL serves no ranks that share a GPU."""
BY_NCCL = {"SHOTCAST_ALGORITHM": "vendor"}
"""The environment of ranks whose calls go to NCCL though native kernels could serve them."""


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_dtype_and_reduction(world_size: int) -> None:
    assert shotcast.spawn(targets.every_dtype_and_reduction, world_size, [1, 7, 4096], timeout_s=280)[0] > 200


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_bool_of_any_bytes(world_size: int) -> None:
    assert shotcast.spawn(targets.reductions_of_any_byte, world_size, timeout_s=200) == [36] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_operation_eager_and_replayed(world_size: int) -> None:
    assert shotcast.spawn(targets.every_operation, world_size, [1, 7, 4096], env=BY_NCCL, timeout_s=280)[0] > 50


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_an_absent_rank_is_named_and_streams_go_on(world_size: int) -> None:
    for rank, seen in enumerate(shotcast.spawn(targets.absent, world_size, 1, 2.0, env=BY_NCCL, timeout_s=200)):
        for outcome in seen:
            assert rank != 1
            assert outcome["missing"] == (1,)
            assert outcome["drained"] < 3.0
            assert outcome["raised"] < 3.0


def test_calls_of_one_rank() -> None:
    (seen,) = shotcast.spawn(targets.one_rank, 1, timeout_s=200)
    assert seen["stopped"] < 0.5, "to abort calls is not to wait for them"
    assert seen["counted"] == 8, "replays of an aborted communicator are counted"
    assert seen["left"] == [], "the communicator ends with the graphs that use it"
    assert seen["closed"] < 4


@pytest.mark.skipif(len(WORLD_SIZES) < 1, reason="two GPUs")
def test_graphs_are_to_be_captured_again_after_a_fault() -> None:
    for text in shotcast.spawn(targets.replayed_after_a_reset, 2, 1, env=BY_NCCL, timeout_s=200):
        assert "captured before reset()" in text


@pytest.mark.skipif(len(WORLD_SIZES) < 1, reason="two GPUs")
def test_a_rank_killed_inside_nccl_is_named_within_a_second() -> None:
    results = shotcast.spawn(targets.killed_inside, 2, 1, env=BY_NCCL, timeout_s=200, return_exceptions=True)
    assert isinstance(results.pop(1), RankFailed)
    assert results[0]["missing"] == (1,)
    assert results[0]["reason"] == "dead"
    assert results[0]["took"] < 1.0
