"""Ranks that torchrun started: they come to the leader, are refused together, and hear of each other's end."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import job_targets as targets
import pytest

from job_ranks import other_ranks
from shotcast import env
from shotcast.errors import ConfigError, EngineDead, RankFailed
from shotcast.launcher.job import JobLeader, Word
from shotcast.launcher.monitor import root_cause, wait_for_reports
from shotcast.launcher.spawn import RankGroup

FACTS = {"max_model_len": "1024", "dtype": "'float32'"}
HOST = socket.gethostname()


def leader() -> JobLeader:
    job = env.job()
    assert job is not None
    return JobLeader(job, 5.0)


def failure_of(found: JobLeader) -> RankFailed | None:
    """Wait for the members as a RankGroup does, and tell them how it ended."""
    wait_for_reports(found.members, None, stop_at_failure=True)
    failed = [member for member in found.members if member.failure is not None]
    failure = root_cause(failed) if failed else None
    for member in found.members:
        member.tell(Word(str(failure) if failure else ""))
    return failure


def wait_until_begun(folder: Path, ranks: int) -> None:
    until = time.monotonic() + 300
    while len(list(folder.iterdir())) < ranks:
        assert time.monotonic() < until
        time.sleep(0.01)


def results(others: RankGroup) -> list[Any]:
    """Return what each process returned, or the code with which it exited."""
    wait_for_reports(others.ranks, time.monotonic() + 300, stop_at_failure=False)
    for rank in others.ranks:
        rank.process.join(300)
    return [rank.value if rank.succeeded else rank.process.exitcode for rank in others.ranks]


def test_ranks_that_were_started_alike_begin_and_exit_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    with other_ranks(monkeypatch, 3, 2, targets.member, "work") as others:
        found = leader()
        with socket.create_connection(found._listener.address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: a.host.that.is.long.enough.for.a.proof.of.the.key\r\n\r\n")
            found.gather(FACTS)
        assert sorted((member.rank, member.host) for member in found.members) == [(1, HOST), (2, HOST)]
        found.begin()
        assert failure_of(found) is None
        assert results(others) == [0, 0]


def test_a_job_may_end_as_soon_as_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    with other_ranks(monkeypatch, 2, 1, targets.member, "work") as others:
        found = leader()
        found.gather(FACTS)
        found.begin()
        found.members[0].tell(Word(""))
        assert results(others) == [0]


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("behaviour", "kind", "message"),
    [
        (
            "differs",
            ConfigError,
            rf"the ranks were not started alike: max_model_len is 512 on rank 2 \(host {HOST}\) and 1024 on rank 0",
        ),
        ("lacks", ConfigError, rf"rank 2 \(host {HOST}\): there is no model here"),
        ("ends", EngineDead, rf"rank 2: host {HOST}: its process ended"),
        ("absent", ConfigError, r"ranks 2 of 3 did not come within 3 s"),
        ("secret", ConfigError, r"ranks 2 of 3 did not come within 3 s"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    behaviour: str,
    kind: type[Exception],
    message: str,
) -> None:
    with other_ranks(monkeypatch, 3, 2, targets.member, behaviour) as others:
        found = leader()
        with caplog.at_level(logging.WARNING), pytest.raises(kind, match=message), found.refusing():
            found.gather(FACTS, timeout_s=3.0 if behaviour in ("absent", "secret") else 60.0)
        if behaviour == "absent":
            others.ranks[1].process.kill()
        first, second = results(others)
        assert first.startswith(kind.__name__)
        assert re.search(message, first)
        if behaviour == "differs":
            assert second == first
        if behaviour == "lacks":
            assert second == "ConfigError: there is no model here"
        if behaviour == "secret":
            assert "SHOTCAST_SECRET has to be the same on all hosts" in second
            assert "a connection from 127.0.0.1 was refused: the other end does not know the key" in caplog.text


def test_a_killed_rank_is_named_and_ends_one_that_is_stuck(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with other_ranks(monkeypatch, 3, 2, targets.member, "stuck", str(tmp_path)) as others:
        found = leader()
        found.gather(FACTS)
        found.begin()
        wait_until_begun(tmp_path, 2)
        os.kill(others.pids[1], signal.SIGKILL)
        started = time.monotonic()
        failure = failure_of(found)
        assert failure is not None
        assert str(failure) == f"rank 2 failed\nhost {HOST}: its process ended, or its host cannot be reached"
        assert results(others) == [1, -signal.SIGKILL]
        assert time.monotonic() - started < 200  # of 600
    assert "rank 1 ends: rank 2 failed" in capfd.readouterr().err


def test_a_rank_that_raises_is_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    with other_ranks(monkeypatch, 3, 2, targets.member, "raises") as others:
        found = leader()
        found.gather(FACTS)
        found.begin()
        failure = failure_of(found)
        assert isinstance(failure, RankFailed)
        assert failure.rank == 2
        assert isinstance(failure.__cause__, ZeroDivisionError)
        assert results(others)[1] == 1
    assert "ZeroDivisionError: by zero" in capfd.readouterr().err


def test_the_end_of_the_leader_ends_the_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with other_ranks(monkeypatch, 2, 1, targets.member, "stuck", str(tmp_path)) as others:
        found = leader()
        found.gather(FACTS)
        found.begin()
        wait_until_begun(tmp_path, 1)
        found.members[0].connection.close()
        assert results(others) == [1]
    assert f"rank 1 ends: rank 0 (host {HOST}): its process ended" in capfd.readouterr().err


def test_ranks_go_on_after_one_signal(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """torchrun passes a signal to all ranks of its host; rank 0 decides when the job ends."""
    with other_ranks(monkeypatch, 3, 2, targets.member, "signals") as others:
        found = leader()
        found.gather(FACTS)
        found.begin()
        assert failure_of(found) is None
        assert results(others) == [0, 0]
    assert "rank 2 goes on until rank 0 ends; a second SIGTERM ends it" in capfd.readouterr().err


def test_an_end_in_order_ends_a_rank_that_is_still_busy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with other_ranks(monkeypatch, 2, 1, targets.member, "stuck", str(tmp_path)) as others:
        found = leader()
        found.gather(FACTS)
        found.begin()
        wait_until_begun(tmp_path, 1)
        found.members[0].tell(Word(""))
        assert results(others) == [0]


def test_a_job_has_one_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    with other_ranks(monkeypatch, 2, 1, targets.member, "work"):
        found = leader()
        with pytest.raises(ConfigError, match="the ranks of this job have served already"):
            leader()
        found.gather(FACTS)


def test_an_interface_that_does_not_exist_is_an_error_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with other_ranks(monkeypatch, 2, 1, targets.member, "work") as others:
        monkeypatch.setenv("SHOTCAST_SOCKET_IFNAME", "nosuch0")
        with pytest.raises(ConfigError, match="no network interface nosuch0"):
            leader()
        assert "no network interface nosuch0" in results(others)[0]
