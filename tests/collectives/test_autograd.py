"""Gradients through the collectives, compared with the transposed maps and with central differences."""

from __future__ import annotations

import autograd_targets as targets
import pytest
import torch

import shared_ranks


@pytest.mark.parametrize("world_size", [2, 3])
def test_against_the_transposed_map(world_size: int) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    assert set(shared_ranks.run(targets.analytic, world_size, dtypes)) == {2 * 14 + 11}


def test_gradients_that_are_conjugated_lazily() -> None:
    shared_ranks.run(targets.conjugated, 2)


def test_against_differences() -> None:
    assert shared_ranks.run(targets.numeric, 3) == [5, 5, 5]


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_differentiable(world_size: int) -> None:
    shared_ranks.run(targets.when_and_when_not, world_size)


def test_columns_of_a_weight() -> None:
    shared_ranks.run(targets.tensor_parallel, 2)
