"""Communicators of some of the ranks, of all ranks in another order, or of the same ranks again."""

from __future__ import annotations

import pytest
import split_targets as targets

import shotcast


@pytest.mark.parametrize("world_size", [2, 5])
def test_groups_and_orders(world_size: int) -> None:
    shotcast.spawn(targets.colors_and_keys, world_size, timeout_s=50)


def test_rank_without_a_color() -> None:
    shotcast.spawn(targets.last_rank_left_out, 4, timeout_s=50)


@pytest.mark.parametrize("world_size", [4, 6])
def test_communicators_used_in_turn(world_size: int) -> None:
    shotcast.spawn(targets.communicators_in_turn, world_size, 150, timeout_s=50)


def test_own_workspace_size() -> None:
    shotcast.spawn(targets.own_workspace_size, 4, 1 << 18, 1 << 20, timeout_s=50)


@pytest.mark.timing
def test_independent_of_each_other() -> None:
    shotcast.spawn(targets.independent, 3, timeout_s=50)


def test_ranks_may_have_split_before_without_the_others() -> None:
    shotcast.spawn(targets.after_different_splits, 4, 2, timeout_s=50)


def test_closing_releases_files_and_threads() -> None:
    for half, whole in shotcast.spawn(targets.resources_of_many_splits, 2, 20, timeout_s=50):
        assert whole == half
