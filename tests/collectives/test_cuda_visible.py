"""Ranks that see other GPUs than each other, as Ray, Slurm and containers start them. Run with ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import torch
from visible_targets import by_process_group, refused, sums

import shotcast

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]


@pytest.mark.parametrize(
    ("visible", "device"),
    [
        (["0", "1"], "cuda"),
        (["0", "1"], None),
        (["1", "0"], "cuda"),
        (["0", "1,0"], "cuda:0"),
        (["0,1", "1"], "cuda:0"),
    ],
)
def test_own_kernels_between_gpus_of_one_number(visible: list[str], device: str | None) -> None:
    done = shotcast.spawn(sums, 2, visible, device, timeout_s=280)
    assert done[0] == done[1]
    assert done[0][:3] == ("cuda:0", "triton", False)
    assert done[0][3] > 50


@pytest.mark.parametrize("visible", [["0", "1"], ["1", "0"]])
def test_process_groups_of_gpus_of_one_number(visible: list[str]) -> None:
    for total, counts in shotcast.spawn(by_process_group, 2, visible, timeout_s=100):
        assert total == [3.0] * 1000
        assert counts == {"all_reduce": {"own": 1}}


@pytest.mark.parametrize("visible", [["1", "1"], ["0,1", "1,0"]])
def test_ranks_with_the_same_gpu_are_refused(visible: list[str]) -> None:
    """By one number, or by two."""
    for error in shotcast.spawn(refused, 2, visible, timeout_s=100):
        assert "ranks 0, 1 use one GPU" in error
        assert "CUDA_VISIBLE_DEVICES" in error
