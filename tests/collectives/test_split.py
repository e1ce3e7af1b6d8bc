"""Communicators of some of the ranks, of all ranks in another order, or of the same ranks again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import split_targets as targets
from resource_targets import many_splits

import shotcast
from shotcast.collectives.choice.table import TableRow, render
from shotcast.wire import NodeShape


@pytest.mark.every(2)
@pytest.mark.parametrize("world_size", [2, 5])
def test_groups_and_orders(world_size: int) -> None:
    shotcast.spawn(targets.colors_and_keys, world_size, timeout_s=300)


def test_rank_without_a_color() -> None:
    shotcast.spawn(targets.last_rank_left_out, 4, timeout_s=300)


@pytest.mark.parametrize("world_size", [4, 6])
def test_communicators_used_in_turn(world_size: int) -> None:
    shotcast.spawn(targets.communicators_in_turn, world_size, 150, timeout_s=300)


def test_own_workspace_size() -> None:
    shotcast.spawn(targets.own_workspace_size, 4, 1 << 18, 1 << 20, timeout_s=300)


@pytest.mark.timing
def test_independent_of_each_other() -> None:
    shotcast.spawn(targets.independent, 3, timeout_s=300)


def test_ranks_may_have_split_before_without_the_others() -> None:
    shotcast.spawn(targets.after_different_splits, 4, 2, timeout_s=300)


def test_each_size_takes_the_tables_made_for_it(tmp_path: Path) -> None:
    paths = {}
    for world_size, algorithm in ((3, "ring"), (2, "two_shot"), (8, "vendor")):
        paths[world_size] = path = tmp_path / f"x{world_size}.json"
        row = TableRow(64, algorithm, None, "eager")
        path.write_text(render("cpu", NodeShape(1, world_size), {("eager", "all_reduce", "float32"): [row]}, {}, []))
    env = {"SHOTCAST_TABLE": os.pathsep.join(map(str, paths.values()))}
    first, _, last = shotcast.spawn(targets.reasons_of_each_size, 3, env=env, timeout_s=300)
    assert first[0] == last[0]
    assert first[0].startswith(f"user table: {paths[3]}: ring for up to 64 B")
    assert first[1].startswith(f"user table: {paths[2]}: two_shot for up to 64 B")
    for alone in (first[2], last[1], last[2]):
        assert alone.startswith("cost model: ")
        for world_size, path in paths.items():
            assert f"; {path} is for {world_size} x cpu, and this is 1 x " in alone


@pytest.mark.full
@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.full)])
def test_closing_releases_everything(count: int) -> None:
    for early, late in shotcast.spawn(many_splits, 2, "cpu", count, 3, timeout_s=30 + count):
        assert late[:3] == early[:3], "files, threads and process groups"
        assert late.memory_kib - early.memory_kib < 2000 + count, "the job's store keeps a little of each"


def test_a_construction_that_fails_leaves_nothing() -> None:
    assert shotcast.spawn(targets.failed_constructions, 2, 20, timeout_s=300) == [(0, 0)] * 2
