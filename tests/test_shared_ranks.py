"""Ranks that tests share: the same processes for one call after the other, and others after a failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import shared_ranks
import shared_ranks_targets as targets
from shotcast.errors import RankFailed


def test_calls_share_processes_and_communicate() -> None:
    first = shared_ranks.run(targets.numbered, 2)
    assert [rank for _, rank in first] == [0, 1]
    assert shared_ranks.run(targets.reduced, 2) == [[2.0, 2.0]] * 2
    assert shared_ranks.run(targets.reduced, 2) == [[2.0, 2.0]] * 2
    assert shared_ranks.run(targets.numbered, 2) == first
    assert shared_ranks.run(targets.numbered, 2, env={"SHOTCAST_SHM_DIR": "/dev/shm"}) != first


def test_what_a_call_replaced_is_put_back() -> None:
    shared_ranks.run(targets.replace_what_is_there, 1)
    assert shared_ranks.run(targets.what_is_there, 1) == [(False, False)]


@pytest.mark.parametrize(
    ("fn", "argument", "timeout_s", "said"),
    [
        (targets.fails_on, 1, 300.0, "rank 1 found something"),
        (targets.ends_on, 1, 300.0, "ended without a word"),
        (targets.sleeps, 600.0, 0.2, "took more than 0.2 s"),
    ],
)
def test_a_failure_ends_the_set(fn: Callable[..., Any], argument: Any, timeout_s: float, said: str) -> None:
    before = shared_ranks.run(targets.numbered, 2)
    with pytest.raises(RankFailed, match=said):
        shared_ranks.run(fn, 2, argument, timeout_s=timeout_s)
    after = shared_ranks.run(targets.numbered, 2)
    assert {pid for pid, _ in before}.isdisjoint(pid for pid, _ in after)
