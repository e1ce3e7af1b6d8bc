"""Tensors in memory that the ranks map, by the Communicator: calls, training, several communicators, and without."""

from __future__ import annotations

import mapped_targets as targets
import pytest

import shared_ranks
import shotcast


@pytest.mark.parametrize("world_size", [2, pytest.param(5, marks=pytest.mark.full)])
def test_every_call_takes_them(world_size: int) -> None:
    shared_ranks.run(targets.every_call, world_size)


def test_training_has_the_bits_of_ordinary_tensors() -> None:
    for mapped, ordinary in shared_ranks.run(targets.trained, 2):
        assert mapped == ordinary


def test_a_tensor_is_of_one_communicator_and_ordinary_for_others() -> None:
    shared_ranks.run(targets.of_several_communicators, 4)


def test_calls_go_on_after_a_reset() -> None:
    shotcast.spawn(targets.after_a_reset, 2, timeout_s=60)


def test_ranks_of_several_nodes_map_none() -> None:
    shared_ranks.run(targets.ordinary, 2, env={"SHOTCAST_RANKS_PER_NODE": "1"})


def test_shapes_are_those_of_torch() -> None:
    shared_ranks.run(targets.shapes, 2)
