"""Unmodified calls of torch.distributed on CPU ranks, by the backend "shotcast"."""

from __future__ import annotations

from pathlib import Path

import group_targets as targets
import pytest

import shotcast

MOST_FRAMES = 12
"""The most functions of the package that a repeated call runs before it is launched."""


@pytest.mark.parametrize(("asynchronous", "world_size"), [(False, 2), (True, 3)])
def test_every_collective(asynchronous: bool, world_size: int) -> None:
    for counts in shotcast.spawn(targets.collectives, world_size, asynchronous, timeout_s=300):
        assert counts == {
            "all_gather": {"own": 2},
            "all_reduce": {"own": 3},
            "all_to_all": {"own": 3},
            "barrier": {"own": 1},
            "broadcast": {"own": 1},
            "gather": {"own": 1},
            "reduce": {"own": 1},
            "reduce_scatter": {"own": 2},
            "scatter": {"own": 1},
        }


def test_repeated_calls_take_few_frames() -> None:
    """Most of the time of a small call passes in Python."""
    for found, counts in shotcast.spawn(targets.repeated_calls, 2, timeout_s=300):
        for name, functions in found.items():
            assert "PreparedCall.run" in functions, (name, functions)
            assert len(functions) <= MOST_FRAMES, (name, functions)
        assert counts == {
            op: {"own": number}
            for op, number in {
                "all_gather": 10,
                "all_reduce": 10,
                "all_to_all": 5,
                "barrier": 6,
                "broadcast": 6,
                "reduce_scatter": 5,
            }.items()
        }


def test_objects_and_messages() -> None:
    shotcast.spawn(targets.objects, 3, timeout_s=300)


@pytest.mark.full
def test_ddp() -> None:
    (first, alone), (second, _) = shotcast.spawn(targets.ddp, 2, timeout_s=300)
    assert first == second
    assert first == pytest.approx(alone, rel=1e-4, abs=1e-6)


@pytest.mark.full
def test_every_reduction() -> None:
    for counts in shotcast.spawn(targets.reductions, 3, timeout_s=300):
        assert counts["all_reduce"] == {"own": 26}
        assert counts["reduce"] == {"own": 21}
        assert counts["reduce_scatter"] == {"own": 22}


@pytest.mark.full
def test_layouts_dtypes_and_sparse_tensors() -> None:
    shotcast.spawn(targets.layouts, 3, timeout_s=300)


def test_coalesced_forms() -> None:
    shotcast.spawn(targets.coalesced, 2, timeout_s=300)


@pytest.mark.full
def test_the_group_itself() -> None:
    shotcast.spawn(targets.direct, 3, timeout_s=300)


@pytest.mark.full
def test_what_pytorch_builds_on_groups() -> None:
    shotcast.spawn(targets.frameworks, 2, timeout_s=300)


def test_names_and_rendezvous(tmp_path: Path) -> None:
    shotcast.spawn(targets.forms, 2, str(tmp_path), timeout_s=300)


def test_a_destroyed_group_says_so() -> None:
    assert shotcast.spawn(targets.destroyed, 2, timeout_s=300) == ["this process group was destroyed"] * 2


def test_destroying_a_group_waits_for_its_calls() -> None:
    shotcast.spawn(targets.pending, 2, timeout_s=300)


def test_groups_that_are_destroyed_leave_nothing() -> None:
    for found in shotcast.spawn(targets.groups_that_come_and_go, 2, timeout_s=300):
        assert found[-1] <= found[2], found


def test_the_first_call_may_be_started_while_the_store_is_in_use() -> None:
    shotcast.spawn(targets.first_call_on_a_thread, 2, timeout_s=300)


@pytest.mark.full
def test_calls_in_callbacks() -> None:
    shotcast.spawn(targets.callbacks, 2, timeout_s=300)


@pytest.mark.parametrize("late", [0, 1])
def test_calls_of_callbacks_have_one_place_on_all_ranks(late: int) -> None:
    """A rank may find its call over as it adds a callback, or not."""
    wanted = [2.0, 2.0, 20.0, 2.0, 20.0, 200.0, 2000.0, 8.0, 80.0, 800.0, 8000.0, 4.0, 4.0, 40.0]
    assert shotcast.spawn(targets.places_of_callbacks, 2, late, timeout_s=300) == [[wanted]] * 2
