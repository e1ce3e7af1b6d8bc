"""Ranks of the backend "shotcast" that die, come late or make other calls, and programs with threads and forks."""

from __future__ import annotations

import time

import fault_group_targets as targets
import pytest

import shotcast


@pytest.mark.timing
@pytest.mark.parametrize("when", ["first", "synchronous", "asynchronous", "message", "barrier"])
def test_a_killed_rank_is_named(when: str) -> None:
    results = shotcast.spawn(targets.killed, 3, when, timeout_s=40, return_exceptions=True)
    assert isinstance(results[1], shotcast.RankFailed)
    for rank in (0, 2):
        ends, elapsed = results[rank]
        assert ends == [("CollectiveTimeout", (1,), "dead")] * 2
        assert elapsed < 5


@pytest.mark.timing
def test_a_rank_killed_in_ddp_is_named() -> None:
    results = shotcast.spawn(targets.killed_in_ddp, 2, timeout_s=40, return_exceptions=True)
    assert "dead ranks: 1" in results[0]


def test_late_ranks_and_calls_that_differ() -> None:
    (first, second), (_, other) = shotcast.spawn(targets.late_and_different, 2, timeout_s=40)
    assert first == [("CollectiveTimeout", (1,), "late")] * 2
    for ends in (second, other):
        assert [end[0] for end in ends] == ["CollectiveMismatch"] * 2


@pytest.mark.timing
def test_an_abort_ends_calls_that_wait() -> None:
    found = shotcast.spawn(targets.aborted, 2, timeout_s=60)[0]
    first, synchronous, asynchronous = [ends for ends, _ in found]
    assert [end[0] for end in first] == ["ClosedError"] * 2
    for ends in (synchronous, asynchronous):
        assert ends[0] == ("CollectiveTimeout", (0,), "interrupted")
        assert ends[-1][0] == "ClosedError"
    assert asynchronous[1][0] == "CollectiveTimeout"
    assert max(took for _, took in found) < 5  # of 25


def test_limits_of_waits() -> None:
    shotcast.spawn(targets.limits, 2, timeout_s=40)


def test_a_group_with_a_call_under_way_is_destroyed() -> None:
    begun = time.monotonic()
    waited, _ = shotcast.spawn(targets.pending, 2, timeout_s=40)
    assert waited < 10
    assert time.monotonic() - begun < 30


def test_threads() -> None:
    shotcast.spawn(targets.threads, 2, timeout_s=60)


def test_forked_workers_read_data() -> None:
    shotcast.spawn(targets.workers, 2, timeout_s=60)


def test_debug_mode_and_sparse_gradients() -> None:
    shotcast.spawn(targets.detail, 2, timeout_s=60, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
