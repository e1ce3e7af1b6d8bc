"""Faults of hosts and of the network between them: a named error in time, no hang, and processes that end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import hosts_fault_targets as targets
import pytest

from hosts import SimulatedHosts, all_arrived, needs_hosts
from shotcast import CollectiveMismatch, CollectiveTimeout, RankFailed, ShotcastError

pytestmark = [pytest.mark.timing, needs_hosts]

TIMEOUT_S = 1.5
GRACE_S = 60.0
"""The time beyond the deadline in which the error must come."""
DELAY_US = 500.0
LARGE = 1 << 20
ALGORITHMS = ("nvrar", "nvrar_pairs", "nvrar_halving", "nvrar_two_shot", "nvrar_16bit")

full = pytest.mark.full
SHAPES = [
    (2, 1, "nvrar", 1000),
    pytest.param(2, 2, "nvrar", LARGE, marks=full),
    pytest.param(4, 1, "nvrar_halving", 1000, marks=full),
    pytest.param(3, 2, "nvrar_pairs", LARGE, marks=full),
    pytest.param(3, 1, "nvrar_two_shot", 1000, marks=full),
    pytest.param(4, 1, "nvrar", LARGE, marks=full),
    pytest.param(3, 1, "nvrar_16bit", LARGE, marks=full),
    pytest.param(2, 2, "vendor", 1000, marks=full),
]
"""Hosts, ranks of each, algorithm, and elements of the message."""


def ranks_of(host: int, ranks_per_host: int) -> list[int]:
    return list(range(host * ranks_per_host, (host + 1) * ranks_per_host))


def check_fault(
    found: dict[str, Any], happened: float, timeout_s: float, accused: list[int], reasons: set[str]
) -> None:
    """Check the error of a rank that lost other ranks at the time ``happened``."""
    error = found["error"]
    assert isinstance(error, CollectiveTimeout), error
    assert error.reason in reasons, error
    assert error.missing
    assert set(error.missing) <= set(accused), error
    assert found["ended"] <= max(found["began"], happened) + timeout_s + GRACE_S
    assert isinstance(found["again"], CollectiveTimeout), "a stopped communicator makes no calls"
    assert found["close_s"] < GRACE_S
    assert found["threads"] == []


@pytest.mark.full
@pytest.mark.parametrize(("hosts", "ranks_per_host", "algorithm", "count"), SHAPES)
def test_a_host_without_power_is_named(
    tmp_path: Path, hosts: int, ranks_per_host: int, algorithm: str, count: int
) -> None:
    """It says nothing to anyone: its connections do not end."""
    lost = ranks_of(hosts - 1, ranks_per_host)
    with SimulatedHosts(hosts, delay_us=DELAY_US) as network:
        group = network.start(targets.calls_until_a_fault, ranks_per_host, str(tmp_path), algorithm, count, TIMEOUT_S)
        all_arrived(tmp_path, hosts * ranks_per_host)
        happened = time.monotonic()
        network.kill(hosts - 1, group)
        results = group.results(300, return_exceptions=True)
    for rank, found in enumerate(results):
        if rank in lost:
            assert isinstance(found, RankFailed)
        else:
            assert isinstance(found, dict), results
            check_fault(found, happened, TIMEOUT_S, lost, {"unreachable", "late"})
            if algorithm != "vendor":
                assert f"host{hosts - 1}" in str(found["error"]), "the error names the host"


@pytest.mark.parametrize(("hosts", "ranks_per_host", "algorithm", "count"), SHAPES)
def test_killed_ranks_of_a_host_are_named_at_once(
    tmp_path: Path, hosts: int, ranks_per_host: int, algorithm: str, count: int
) -> None:
    """Their kernel ends their connections, so nobody waits for the deadline."""
    lost = ranks_of(hosts - 1, ranks_per_host)
    with SimulatedHosts(hosts, delay_us=DELAY_US) as network:
        group = network.start(targets.calls_until_a_fault, ranks_per_host, str(tmp_path), algorithm, count, 600.0)
        all_arrived(tmp_path, hosts * ranks_per_host)
        happened = time.monotonic()
        network.kill_ranks(hosts - 1, group)
        results = group.results(300, return_exceptions=True)
    for rank, found in enumerate(results):
        if rank not in lost:
            assert isinstance(found, dict), results
            check_fault(found, happened, 0.5, lost, {"dead", "unreachable"})


@pytest.mark.parametrize("interface", [True, pytest.param(False, marks=full)])
@pytest.mark.parametrize(("hosts", "ranks_per_host", "algorithm", "count"), SHAPES)
def test_a_network_that_comes_back_too_late(
    tmp_path: Path, hosts: int, ranks_per_host: int, algorithm: str, count: int, interface: bool
) -> None:
    """Each side names the other; when the network is back, a reset makes the communicator work again."""
    world_size, lost = hosts * ranks_per_host, ranks_of(hosts - 1, ranks_per_host)
    others = [rank for rank in range(world_size) if rank not in lost]
    arrived, restored = tmp_path / "arrived", tmp_path / "restored"
    arrived.mkdir()
    with SimulatedHosts(hosts, delay_us=DELAY_US) as network:
        arguments = (str(arrived), str(restored), algorithm, count, TIMEOUT_S)
        group = network.start(targets.goes_on_after_a_reset, ranks_per_host, *arguments)
        all_arrived(arrived, world_size)
        happened = time.monotonic()
        network.cut(hosts - 1, interface=interface)
        all_arrived(arrived, 2 * world_size, within_s=TIMEOUT_S + 200)
        network.restore(hosts - 1)
        restored.touch()
        results = group.results(300, return_exceptions=True)
    for rank, found in enumerate(results):
        assert isinstance(found, dict), results
        error = found["error"]
        if isinstance(error, CollectiveTimeout):
            assert error.missing
            assert set(error.missing) <= set(others if rank in lost else lost), error
        else:  # cut off from the job's store, ranks that lost each other inside the library cannot ask who is at fault
            assert isinstance(error, ShotcastError), error
            assert algorithm == "vendor"
            assert rank in lost
            assert "the job's store does not answer" in str(error)
        assert found["ended"] <= max(found["began"], happened) + TIMEOUT_S + GRACE_S
        assert found["sum"] == sum(range(world_size + 1))
        assert found["close_s"] < GRACE_S


@pytest.mark.parametrize("slow", [0, 1])
def test_a_connection_that_ends_in_a_reset_is_no_rank_that_does(slow: int) -> None:
    """Ranks close their connections in a reset. One that is reset before its farewell arrives has no other end."""
    with SimulatedHosts(2, delay_us=DELAY_US) as network:
        group = network.start(targets.resets_without_a_farewell, 1, slow)
        assert group.results(300, return_exceptions=True) == [3.0, 3.0]


@full
@pytest.mark.parametrize("interface", [True, False])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_network_that_comes_back_in_time(tmp_path: Path, algorithm: str, interface: bool) -> None:
    arrived, stop = tmp_path / "arrived", tmp_path / "stop"
    arrived.mkdir()
    with SimulatedHosts(3, delay_us=DELAY_US) as network:
        group = network.start(targets.survives_a_pause, 1, str(arrived), str(stop), algorithm, 1000, 20.0)
        all_arrived(arrived, 3)
        network.cut(2, interface=interface)
        time.sleep(0.7)
        network.restore(2)
        stop.touch()
        results = group.results(300, return_exceptions=True)
    assert all(isinstance(longest, float) and longest > 0.5 for longest in results), results


@pytest.mark.parametrize(
    ("fault", "hosts", "ranks_per_host", "algorithm"),
    [
        ("other size", 2, 1, "nvrar"),
        *(
            pytest.param(fault, hosts, ranks_per_host, algorithm, marks=full)
            for fault in ("other size", "other operation", "absent")
            for hosts, ranks_per_host, algorithm in [
                (3, 1, "nvrar"), (2, 2, "nvrar_pairs"), (3, 2, "nvrar_halving"), (4, 1, "nvrar_two_shot"),
                (3, 1, "vendor"), (3, 1, "nvrar_16bit"),
            ]
        ),
    ],
)  # fmt: skip
def test_a_host_that_calls_something_else_is_named(fault: str, hosts: int, ranks_per_host: int, algorithm: str) -> None:
    culprits = ranks_of(hosts - 1, ranks_per_host)
    with SimulatedHosts(hosts, delay_us=DELAY_US) as network:
        arguments = (fault, culprits, algorithm, TIMEOUT_S)
        results = network.run(
            targets.calls_something_else, ranks_per_host, *arguments, timeout_s=300, return_exceptions=True
        )
    for rank, found in enumerate(results):
        assert isinstance(found, dict), results
        assert found["close_s"] < GRACE_S
        if fault == "absent" and rank in culprits:
            continue
        error = found["error"]
        assert found["ended"] - found["began"] <= TIMEOUT_S + GRACE_S
        if fault == "absent":
            assert isinstance(error, CollectiveTimeout), error
            assert set(error.missing) <= set(culprits)
            assert error.missing
        else:
            assert isinstance(error, CollectiveMismatch), error
            if hosts > 2:
                assert set(error.differing) <= set(culprits)
