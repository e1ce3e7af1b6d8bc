"""Ranks of the backend "shotcast" that die, come late or make other calls, and programs with threads and forks."""

from __future__ import annotations

import fault_group_targets as targets
import pytest

import shotcast


@pytest.mark.timing
@pytest.mark.parametrize("when", ["first", "synchronous", "asynchronous", "message", "barrier"])
def test_a_killed_rank_is_named(when: str) -> None:
    results = shotcast.spawn(targets.killed, 3, when, timeout_s=200, return_exceptions=True)
    assert isinstance(results[1], shotcast.RankFailed)
    for rank in (0, 2):
        ends, elapsed = results[rank]
        assert ends == [("CollectiveTimeout", (1,), "dead")] * 2
        assert elapsed < targets.LONG_S / 5


@pytest.mark.full
@pytest.mark.timing
def test_errors_of_a_part_name_ranks_of_the_job_and_the_group() -> None:
    found = shotcast.spawn(targets.subgroups, 3, timeout_s=200, return_exceptions=True)[1]
    assert isinstance(found, dict), found
    for what, group in (("late", ""), ("pending", "tp"), ("dead", "tp"), ("again", "tp")):
        error = found[what]
        assert isinstance(error, shotcast.CollectiveTimeout), error
        assert (error.rank, error.op) == (1, "all_reduce"), what
        assert error.missing == (() if what == "pending" and not error.missing else (2,)), what
        assert error.reason == {"again": "dead"}.get(what, what)
        assert not group or error.group == group
        assert "reset()" not in str(error)
        assert error.reason == "pending" or "make a new one" in str(error)
    assert "all_reduce (call 2) of group tp cannot complete, as processes have ended; dead ranks: 2" in str(
        found["dead"]
    )
    assert str(found["again"]).startswith("rank 1: barrier was not made: group tp was stopped by call 2: all_reduce ")
    assert str(found["cause"]) == str(found["dead"])
    different = found["mismatch"]
    assert (different.rank, different.differing, sorted(different.calls)) == (1, (2,), [1, 2])
    assert "of group pp differs" in str(different)
    assert "reset()" not in str(different)
    assert "monitored_barrier of group tp: " in str(found["barrier"])
    assert "Rank 2 failed" in str(found["barrier"]) or "rank 2" in str(found["barrier"]), found["barrier"]


@pytest.mark.timing
def test_a_rank_that_left_its_group_is_named_at_once() -> None:
    found = shotcast.spawn(targets.left, 3, timeout_s=200)
    assert found[1] == {}
    for rank in (0, 2):
        for error, took in found[rank].values():
            assert (error.missing, error.reason) == ((1,), "left"), error
            assert took < targets.LONG_S / 5


def test_all_groups_share_one_connection_to_the_store() -> None:
    assert max(shotcast.spawn(targets.connections, 2, timeout_s=200)) == 2  # one for each time that there was a job


@pytest.mark.timing
def test_a_rank_killed_in_ddp_is_named() -> None:
    results = shotcast.spawn(targets.killed_in_ddp, 2, timeout_s=200, return_exceptions=True)
    assert "dead ranks: 1" in results[0]


@pytest.mark.full
def test_late_ranks_and_calls_that_differ() -> None:
    (first, second), (_, other) = shotcast.spawn(targets.late_and_different, 2, timeout_s=200)
    assert first == [("CollectiveTimeout", (1,), "late")] * 2
    for ends in (second, other):
        assert [end[0] for end in ends] == ["CollectiveMismatch"] * 2


@pytest.mark.timing
def test_an_abort_ends_calls_that_wait() -> None:
    found = shotcast.spawn(targets.aborted, 2, timeout_s=200)[0]
    first, synchronous, asynchronous = [ends for ends, _ in found]
    assert [end[0] for end in first] == ["ClosedError"] * 2
    for ends in (synchronous, asynchronous):
        assert ends[0] == ("CollectiveTimeout", (0,), "interrupted")
        assert ends[-1][0] == "ClosedError"
    assert asynchronous[1][0] == "CollectiveTimeout"
    assert max(took for _, took in found) < targets.LONG_S / 5


@pytest.mark.full
def test_limits_of_waits() -> None:
    shotcast.spawn(targets.limits, 2, timeout_s=200)


def test_a_group_with_a_call_under_way_is_destroyed() -> None:
    waited, _ = shotcast.spawn(targets.pending, 2, timeout_s=200)
    assert waited < 50  # of the 100 that connecting may take


def test_threads() -> None:
    shotcast.spawn(targets.threads, 2, timeout_s=200)


def test_forked_workers_read_data() -> None:
    shotcast.spawn(targets.workers, 2, timeout_s=200)


@pytest.mark.full
def test_debug_mode_and_sparse_gradients() -> None:
    shotcast.spawn(targets.detail, 2, timeout_s=200, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
