"""Ranks of a Communicator that die, stop, come late or make other calls: the error, its delay, and the state left."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Iterator
from typing import Any

import fault_targets as targets
import pytest
from workers import SIGNALS, killed, late_then_reset, mismatched

import shotcast
from shotcast import CollectiveMismatch, CollectiveTimeout, RankFailed, wire

pytestmark = pytest.mark.timing
TIMEOUT_S = 2.0
SOON_S = 60.0
"""The longest that a fault takes to be seen on a busy machine, where the deadline is later by far."""


@pytest.fixture
def shm() -> Iterator[dict[str, str]]:
    """An environment with its own directory on the real tmpfs, which must be empty at the end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-") as directory:
        yield {"SHOTCAST_SHM_DIR": directory}
        assert os.listdir(directory) == []


def expect_timeout(outcome: dict[str, Any], missing: int, timeout_s: float, reason: str = "late") -> None:
    error = outcome["error"]
    assert isinstance(error, CollectiveTimeout), error
    assert (error.missing, error.op, error.timeout_s) == ((missing,), "all_reduce", timeout_s)
    assert error.reason == reason
    assert error.epoch == 3, "two calls went before"
    if reason == "late":
        assert timeout_s * 0.9 < outcome["took"] < timeout_s + SOON_S
        assert outcome["nan"]
    else:
        assert outcome["took"] < SOON_S, "a dead rank is not waited for"


class TestKilled:
    @pytest.mark.parametrize(
        ("world_size", "fault", "algorithm", "victim"),
        [
            (2, "killed", "one_shot", 1),
            pytest.param(2, "stopped", "ring", 0, marks=pytest.mark.full),
            (4, "killed", "ring", 2),
            (4, "stopped", "two_shot", 3),
            pytest.param(4, "killed", "two_shot", 0, marks=pytest.mark.full),
        ],
    )
    def test_survivors_name_the_victim(
        self, world_size: int, fault: str, algorithm: str, victim: int, shm: dict[str, str]
    ) -> None:
        timeout_s = 600.0 if fault == "killed" else TIMEOUT_S
        results = shotcast.spawn(
            killed,
            world_size,
            "cpu",
            algorithm,
            victim,
            SIGNALS[fault],
            timeout_s,
            timeout_s=200,
            env=shm,
            return_exceptions=True,
        )
        failed = results.pop(victim)
        assert isinstance(failed, RankFailed)
        if fault == "killed":
            assert "SIGKILL" in failed.detail
        for outcome in results:
            assert isinstance(outcome, dict), outcome
            expect_timeout(outcome, victim, timeout_s, "dead" if fault == "killed" else "late")
            assert isinstance(outcome["again"], CollectiveTimeout)
            assert (outcome["again"].missing, outcome["again"].epoch) == ((victim,), 3)
            assert outcome["again_s"] < SOON_S
        assert any(outcome["nan"] for outcome in results), "later calls are refused, and write nothing"

    @pytest.mark.parametrize(
        "op",
        [
            "all_gather",
            "broadcast",
            "recv",
            *(pytest.param(op, marks=pytest.mark.full) for op in ("reduce_scatter", "all_to_all", "barrier")),
        ],
    )
    def test_in_every_operation(self, op: str, shm: dict[str, str]) -> None:
        call = targets.killed_in_each_call
        results = shotcast.spawn(call, 3, 1, 600.0, op, env=shm, timeout_s=200, return_exceptions=True)
        assert isinstance(results.pop(1), RankFailed)
        kinds = []
        for outcome in results:
            assert isinstance(outcome, dict), outcome
            assert (outcome["error"].missing, outcome["error"].reason) == ((1,), "dead")
            kinds.append(outcome["error"].op)
            assert outcome["took"] < SOON_S, "a dead rank is not waited for"
            assert outcome["after"] < SOON_S
        assert any(outcome["nan"] for outcome in results), "later calls are refused, and write nothing"
        assert kinds == [op, op]

    def test_survivors_continue_in_a_new_communicator(self) -> None:
        results = shotcast.spawn(targets.survivors_go_on, 4, 1, timeout_s=200, return_exceptions=True)
        assert isinstance(results.pop(1), RankFailed)
        assert results == [[5.0] * 4] * 3

    def test_inside_the_vendor_library(self) -> None:
        results = shotcast.spawn(targets.killed_inside_gloo, 3, 1, timeout_s=200, return_exceptions=True)
        assert isinstance(results.pop(1), RankFailed)
        for kind, text in results:
            assert kind == "CollectiveTimeout"
            assert "all_reduce (call 2) cannot complete, as processes have ended; dead ranks: 1" in text

    def test_spawn_names_the_dead_rank_and_not_a_survivor(self) -> None:
        with pytest.raises(RankFailed) as caught:
            shotcast.spawn(targets.killed_in_each_call, 3, 1, 300.0, "barrier", timeout_s=200)
        assert caught.value.rank == 1
        assert "SIGKILL" in caught.value.detail


class TestDeadIsNotLate:
    """A rank whose process has ended is named at once; the end of a rank that has done its part harms nobody."""

    def test_while_the_others_wait(self) -> None:
        results = shotcast.spawn(targets.killed_while_others_wait, 3, 1, timeout_s=200, return_exceptions=True)
        assert isinstance(results.pop(1), RankFailed)
        for error, delay in results:
            assert (error.missing, error.reason) == ((1,), "dead")
            assert "dead ranks: 1" in str(error)
            assert delay < SOON_S

    def test_a_rank_that_is_late_beside_a_dead_one_is_not_named(self) -> None:
        results = shotcast.spawn(targets.one_dead_one_late, 3, timeout_s=200, return_exceptions=True)
        assert isinstance(results[1], RankFailed)
        assert (results[0].missing, results[0].reason) == ((1,), "dead")
        assert (results[2].missing, results[2].reason) == ((1,), "dead")

    def test_ranks_that_leave_when_they_are_done(self) -> None:
        assert shotcast.spawn(targets.leave_one_by_one, 4, timeout_s=200) == [10.0] * 4

    @pytest.mark.full
    def test_a_rank_that_has_left(self) -> None:
        results = shotcast.spawn(targets.left_after_its_last_call, 3, 1, timeout_s=200)
        assert results.pop(1) == {}
        for found in results:
            for what in ("all_reduce", "again", "split"):
                error, took = found[what]
                assert (error.missing, error.reason, error.group) == ((1,), "left", "split(color=0)"), what
                assert "ranks that left: 1" in str(error)
                assert took < 1
            assert "barrier was not made: group split(color=0) was stopped by call 3: all_reduce" in str(
                found["again"][0]
            )
            assert str(found["cause"][0]) == str(found["all_reduce"][0])

    def test_during_the_construction_of_another_communicator(self) -> None:
        results = shotcast.spawn(targets.killed_in_split, 3, 2, timeout_s=200, return_exceptions=True)
        assert isinstance(results.pop(2), RankFailed)
        for error, took in results:
            assert (error.missing, error.reason, error.op) == ((2,), "dead", "split")
            assert took < SOON_S


class TestWaits:
    @pytest.mark.full
    def test_the_log_says_who_is_awaited(self) -> None:
        """Once or twice for each wait; ranks are those of the job, though the communicator is one of two of them."""
        results = shotcast.spawn(targets.waits, 3, 1, timeout_s=200)
        assert not any(threads for _, threads in results), "the watch ends with the last communicator"
        lines = results[1][0]
        for what in (r"all_reduce \(call 5\)", "send or recv", r"split \(call \d+\)"):
            pattern = (
                rf"WARNING: rank 1: {what} of group split\(color=0\) waits for rank 2, for \d s so far; its timeout is"
            )
            assert sum(re.match(pattern, line) is not None for line in lines) in (1, 2), (what, lines)


class TestFirstUse:
    """Compilation is outside any deadline, and the deadline holds for ranks that do not come to compile."""

    @pytest.mark.full
    def test_a_rank_that_comes_late_and_compiles_long(self) -> None:
        assert shotcast.spawn(targets.compile_late, 3, 1.0, 2.5, False, timeout_s=200) == [6.0] * 3

    def test_a_rank_killed_while_it_compiles(self) -> None:
        results = shotcast.spawn(targets.compile_late, 3, 0.2, 0.0, True, timeout_s=200, return_exceptions=True)
        assert isinstance(results.pop(1), RankFailed)
        for error, delay in results:
            assert (error.missing, error.reason) == ((1,), "dead")
            assert delay < SOON_S

    def test_a_rank_killed_while_it_compiles_that_hosts_the_store(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        results = shotcast.spawn(targets.host_of_the_store_killed, 3, port, timeout_s=200, return_exceptions=True)
        for error, delay in results[1:]:
            assert (error.missing, error.reason) == ((0,), "dead")
            assert delay < SOON_S

    @pytest.mark.full
    def test_a_rank_that_fails_to_compile(self) -> None:
        """The others wait for it no longer than for any; after a reset, all meet again, whatever the deadline."""
        for rank, (error, took, again, total) in enumerate(
            shotcast.spawn(targets.compile_in_vain, 3, 2.0, timeout_s=200)
        ):
            assert error == ("no memory" if rank == 1 else "late (1,)")
            assert took < 1.8
            assert again > 1.9
            assert total == 6.0

    def test_a_fault_while_others_are_awaited(self) -> None:
        results = shotcast.spawn(targets.fault_during_a_first_call, 3, timeout_s=200)
        assert [error for error, _ in results[::2]] == ["CollectiveMismatch"] * 2
        assert max(took for _, took in results) < SOON_S

    def test_a_rank_that_stays_away(self) -> None:
        for rank, (error, took, total) in enumerate(shotcast.spawn(targets.absent_from_a_first_call, 3, timeout_s=200)):
            assert total == 3.0
            if rank != 1:
                assert (error.missing, error.reason, error.op) == ((1,), "late", "all_reduce")
                assert 1.9 < took < 2 + SOON_S

    def test_two_ranks_that_both_send_first(self) -> None:
        (took, from_1), (also_took, from_0) = shotcast.spawn(targets.cross_first_messages, 2, timeout_s=200)
        assert (from_0, from_1) == (1.0, 2.0)
        assert max(took, also_took) < SOON_S, "neither waits for the other to receive"


class TestInterrupted:
    def test_ctrl_c_ends_a_call_at_once(self) -> None:
        results = shotcast.spawn(targets.interrupted, 2, timeout_s=200)
        (kind, took, nan), error = results
        assert kind == "KeyboardInterrupt"
        assert took < SOON_S
        assert nan
        assert (error.missing, error.reason) == ((0,), "interrupted")

    def test_a_handler_that_returns_lets_the_call_go_on(self) -> None:
        assert shotcast.spawn(targets.handled_signal, 2, timeout_s=200) == [(3.0, 1), (3.0, 0)]


class TestLate:
    @pytest.mark.parametrize(
        ("world_size", "algorithm", "late"),
        [(2, "one_shot", 0), (4, "two_shot", 1), pytest.param(4, "ring", 3, marks=pytest.mark.full)],
    )
    def test_late_rank_is_named_and_reset(self, world_size: int, algorithm: str, late: int) -> None:
        results = shotcast.spawn(late_then_reset, world_size, "cpu", algorithm, late, TIMEOUT_S, timeout_s=200)
        for rank, outcome in enumerate(results):
            if rank == late:  # the late rank learns at once what the others found
                assert isinstance(outcome["error"], CollectiveTimeout)
                assert (outcome["error"].missing, outcome["error"].rank) == ((late,), late)
                assert outcome["took"] < SOON_S
            else:
                expect_timeout(outcome, late, TIMEOUT_S)

    def test_second_attempt_to_reset(self) -> None:
        shotcast.spawn(targets.reset_after_a_missed_attempt, 3, 1, timeout_s=200)

    def test_slow_store(self) -> None:
        shotcast.spawn(targets.gather_with_a_slow_store, 3, 0, timeout_s=200)

    def test_each_rank_has_its_own_deadline(self) -> None:
        results = shotcast.spawn(targets.timeouts_of_each_rank, 3, timeout_s=200)
        assert [kind for _, kind in results] == ["CollectiveTimeout", "CollectiveTimeout", ""]
        assert 1.9 < results[1][0] < 2 + SOON_S
        assert results[0][0] < 2 + SOON_S, "well before its own 300 s"


class TestMismatch:
    @pytest.mark.parametrize(
        ("world_size", "odd", "what"),
        [
            (2, 1, "op"),
            (2, 1, "nbytes"),
            (2, 1, "launch"),
            *((4, 0, what) for what in ("op", "nbytes", "dtype", "algorithm", "root")),
        ],
    )
    def test_all_ranks_report_the_same(self, world_size: int, odd: int, what: str) -> None:
        for rank, outcome in enumerate(shotcast.spawn(mismatched, world_size, "cpu", what, odd, 300.0, timeout_s=200)):
            error = outcome["error"]
            assert isinstance(error, CollectiveMismatch), error
            assert (error.rank, error.differing, error.fields) == (rank, (odd,), (what,))
            assert sorted(error.calls) == list(range(world_size))
            assert error.epoch == 7, "six calls went before"
            assert outcome["took"] < SOON_S

    @pytest.mark.full
    def test_mismatch_is_found_before_the_vendor_runs(self) -> None:
        for seen in shotcast.spawn(targets.different_calls, 3, 2, timeout_s=200):
            assert len(seen) == 10
            for what, (error, took) in seen.items():
                assert error.differing == (2,), what
                assert what.split(",")[0] in error.fields, (what, error)
                assert took < SOON_S, what

    @pytest.mark.parametrize("what", ["dtype", "nbytes"])
    def test_mismatched_message(self, what: str) -> None:
        errors = shotcast.spawn(targets.different_messages, 3, what, timeout_s=200)
        assert errors[0] is errors[2] is None
        assert errors[1].fields == (what,)
        assert sorted(errors[1].calls) == [0, 1]

    @pytest.mark.full
    def test_missing_message(self) -> None:
        first, second, third = shotcast.spawn(targets.missing_messages, 3, timeout_s=200)
        assert [error and error.missing for error in first] == [None, (1,)]
        assert [error and error.missing for error in second] == [(0,), None]
        assert third == [None, None]

    def test_output_is_nan_in_every_dtype_that_has_nan(self) -> None:
        served = sum(name.startswith(("float", "bfloat", "complex")) for name in wire.DTYPES)
        assert shotcast.spawn(targets.outputs_after_a_fault, 2, timeout_s=200) == [served] * 2
