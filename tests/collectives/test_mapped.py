"""Tensors in memory that the ranks map, by the Communicator: calls, training, several communicators, and without."""

from __future__ import annotations

import mapped_targets as targets
import pytest
import torch

import shared_ranks
import shotcast
from quick_interpreter import GPU_COLLECTIVES, interpret


@pytest.mark.parametrize("world_size", [2, pytest.param(5, marks=pytest.mark.full)])
def test_every_call_takes_them(world_size: int) -> None:
    shared_ranks.run(targets.every_call, world_size)


@pytest.mark.full
def test_training_has_the_bits_of_ordinary_tensors() -> None:
    for mapped, ordinary in shared_ranks.run(targets.trained, 2):
        assert mapped == ordinary


@pytest.mark.full
def test_a_tensor_is_of_one_communicator_and_ordinary_for_others() -> None:
    shared_ranks.run(targets.of_several_communicators, 4)


def test_calls_go_on_after_a_reset() -> None:
    shotcast.spawn(targets.after_a_reset, 2, timeout_s=300)


@pytest.mark.full
def test_ranks_of_several_nodes_map_none() -> None:
    shared_ranks.run(targets.ordinary, 2, env={"SHOTCAST_RANKS_PER_NODE": "1"})


def test_shapes_are_those_of_torch() -> None:
    shared_ranks.run(targets.shapes, 2)


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "counts"),
    [
        (2, [0, 333]),
        pytest.param(3, [1, 1030], marks=pytest.mark.full),
        pytest.param(8, [600], marks=[pytest.mark.full, pytest.mark.timeout(1500)]),
    ],
)
def test_few_sms_work_where_they_lie(world_size: int, counts: list[int]) -> None:
    """Some ranks have mapped tensors, at odd addresses too; the results are the same, and all take the same way."""
    dtypes = [torch.bfloat16, torch.int64] if world_size == 2 else [torch.float32, torch.bfloat16, torch.uint8]
    arguments = "cpu", counts, dtypes, 1 << 16
    made = interpret(targets.few_sms_in_place, world_size, *arguments, env=GPU_COLLECTIVES, fresh=True, timeout_s=900)
    assert min(made) > 0
    assert len(set(made)) == 1


@pytest.mark.full
def test_a_late_rank_of_few_sms_in_place() -> None:
    first, second = interpret(targets.late_in_place, 2, "cpu", env=GPU_COLLECTIVES, fresh=True)
    assert first == ("late", (1,), True)
    assert second == ("", (), True)
