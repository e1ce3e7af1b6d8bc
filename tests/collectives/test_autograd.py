"""Gradients through the collectives, compared with the transposed maps and with central differences."""

from __future__ import annotations

import autograd_targets as targets
import pytest
import torch

import shared_ranks


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_against_transposed_maps(world_size: int) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    assert set(shared_ranks.run(targets.analytic, world_size, dtypes)) == {2 * 14 + 11}


def test_gradients_that_are_conjugated_lazily() -> None:
    shared_ranks.run(targets.conjugated, 2)


def test_gradients_against_central_differences() -> None:
    assert shared_ranks.run(targets.numeric, 3) == [5, 5, 5]


@pytest.mark.parametrize("world_size", [1, 2])
def test_only_differentiable_calls_require_grad(world_size: int) -> None:
    shared_ranks.run(targets.require_grad_of_results, world_size)


def test_gradient_of_a_column_parallel_weight() -> None:
    shared_ranks.run(targets.tensor_parallel, 2)
