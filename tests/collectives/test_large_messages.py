"""Messages of 4 GiB, and one element less and more, in every operation."""

from __future__ import annotations

import pytest
import torch
from large_targets import copies, norms, sizes_that_differ_above_32_bits, sums

import shotcast

STEPS = (-1, 0, 1)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LIMIT_S = 900


@pytest.mark.full
def test_sizes_that_differ_above_32_bits() -> None:
    first, second = shotcast.spawn(sizes_that_differ_above_32_bits, 2, "cpu", timeout_s=300)
    assert [(name, fields) for name, fields, _ in second] == [
        ("all_reduce", ("nbytes",)),
        ("broadcast", ("nbytes",)),
        ("send", ("nbytes",)),
    ]
    assert [(name, fields) for name, fields, _ in first][:2] == [
        ("all_reduce", ("nbytes",)),
        ("broadcast", ("nbytes",)),
    ]


@pytest.mark.full
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("device", DEVICES)
def test_sums(device: str) -> None:
    algorithms = ["one_shot", "two_shot", "ring"] if device == "cpu" else ["two_shot", "auto"]
    done = shotcast.spawn(sums, 2, device, STEPS, algorithms, timeout_s=LIMIT_S)
    assert done == [len(STEPS) * (5 if device == "cpu" else 3)] * 2


@pytest.mark.full
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_copies(device: str, dtype: torch.dtype) -> None:
    assert shotcast.spawn(copies, 2, device, STEPS, dtype, timeout_s=LIMIT_S) == [5 * len(STEPS)] * 2


@pytest.mark.full
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [(1 << 19) - 2, 1 << 19, (1 << 19) + 2])
def test_norms(device: str, rows: int) -> None:
    shotcast.spawn(norms, 2, device, rows, 4096, timeout_s=LIMIT_S)
