"""Gradients through the collectives, compared with the transposed maps and with central differences."""

from __future__ import annotations

import autograd_programs
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


def test_gradients_of_all_reductions_keep_to_the_sms() -> None:
    shared_ranks.run(targets.budgets_of_gradients, 1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_second_derivative(world_size: int) -> None:
    shared_ranks.run(targets.second_derivative, world_size)


@pytest.mark.every(3)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_written_tensors_and_reductions_against_plain_torch(world_size: int) -> None:
    names = [name for name in autograd_programs.PROGRAMS if world_size > 1 or name != "received"]
    shared_ranks.run(autograd_programs.against_plain_torch, world_size, names)


@pytest.mark.every(3)
@pytest.mark.parametrize("world_size", [2, 1, 3])
def test_gradients_of_reduce_in_place_against_plain_torch(world_size: int) -> None:
    shared_ranks.run(targets.reduced_in_place, world_size, timeout_s=300)


@pytest.mark.full
def test_constants_of_a_root_and_messages_leave_no_history() -> None:
    shared_ranks.run(targets.forgotten_histories, 2, timeout_s=300)


@pytest.mark.parametrize("world_size", [1, 2])
def test_writes_raise_versions(world_size: int) -> None:
    shared_ranks.run(targets.raised_versions, world_size)


def test_receiving_raises_versions() -> None:
    shared_ranks.run(targets.received_versions, 2)


def test_writes_refuse_what_pytorch_refuses() -> None:
    assert shared_ranks.run(targets.refused_leaves, 2) == [3 * (len(targets.WRITES) + 1)] * 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_of_fused_calls_against_plain_torch(world_size: int) -> None:
    shared_ranks.run(targets.norm_gradients, world_size)


def test_gradient_of_a_column_parallel_weight() -> None:
    shared_ranks.run(targets.tensor_parallel, 2)
