"""Hosts simulated by namespaces: what their ranks see, their network, its faults, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import simulated_hosts_targets as targets
from simulated_hosts import linux, probe

from hosts import SimulatedHosts, all_arrived, needs_hosts
from shotcast.errors import ConfigError, RankFailed, ShotcastError

pytestmark = pytest.mark.timing


def test_who_is_not_root_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match=r"does not run as root.*sudo make bench-hosts"):
        SimulatedHosts(2)


@needs_hosts
def test_a_machine_without_tun_devices_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "_TUN", "/dev/net/absent")
    with pytest.raises(ConfigError, match="/dev/net/absent: No such file"):
        SimulatedHosts(2)


@needs_hosts
def test_root_without_rights_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may not mount in containers, and a TUN device may not be there for it."""

    def refuse(*arguments: object) -> None:
        raise PermissionError(1, "mount: Operation not permitted")

    monkeypatch.setattr(linux, "_mount", refuse)
    with pytest.raises(ConfigError, match=r"though it runs as root \(mount: Operation not permitted"):
        SimulatedHosts(2)


@needs_hosts
@pytest.mark.parametrize(("hosts", "delay_us"), [(1, 0.0), (65, 0.0), (2, -1.0), (2, float("nan"))])
def test_wrong_networks_are_refused(hosts: int, delay_us: float) -> None:
    with pytest.raises(ConfigError):
        SimulatedHosts(hosts, delay_us=delay_us)


@pytest.mark.full
@needs_hosts
def test_each_host_is_a_machine_of_its_own() -> None:
    with SimulatedHosts(2) as network:
        ranks = network.run(targets.identity, 2, timeout_s=200)
        network.check()
    assert [rank["host"] for rank in ranks] == ["host0", "host0", "host1", "host1"]
    own = Path("/proc/sys/kernel/random/boot_id").read_text()
    assert len({own, *(rank["boot"] for rank in ranks)}) == 3
    assert all(rank["total"] == [6.0] * 4 and rank["folder"] == os.getcwd() for rank in ranks)
    assert [rank["environment"] for rank in ranks] == [
        (0, 0, 0, 4, 2),
        (1, 1, 0, 4, 2),
        (2, 0, 1, 4, 2),
        (3, 1, 1, 4, 2),
    ]
    assert socket.gethostname() not in ("host0", "host1")


@needs_hosts
def test_the_network_delays_and_loses_nothing() -> None:
    with SimulatedHosts(2, delay_us=2000) as network:
        assert any(0 < probe.own_delay_us(network)[0] < 2000 for _ in range(10))
        assert probe.throughput_gbps(network) > 0.2
        assert any(0 < probe.own_delay_us(network, packets=5)[0] < 2000 for _ in range(10))  # the delay is back
        network.check()


@needs_hosts
def test_a_lost_packet_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with SimulatedHosts(2) as network:
        monkeypatch.setattr(linux, "interface_drops", lambda host: 1)
        with pytest.raises(ShotcastError, match="the interfaces dropped 2"):
            network.check()


@needs_hosts
@pytest.mark.parametrize("interface", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_network_that_is_cut_and_restored_goes_on(tmp_path: Path, interface: bool) -> None:
    (tmp_path / "arrived").mkdir()
    with SimulatedHosts(2, delay_us=100) as network:
        group = network.start(targets.reduce_until_told, 1, str(tmp_path / "arrived"), str(tmp_path / "stop"), 100.0)
        all_arrived(tmp_path / "arrived", 2)
        network.cut(1, interface=interface)
        time.sleep(0.3)
        (tmp_path / "stop").touch()
        time.sleep(0.2)
        assert not any(rank.results.poll() for rank in group.ranks)
        network.restore(1)
        assert group.results(200, return_exceptions=True) == ["stopped", "stopped"]


@needs_hosts
@pytest.mark.full
def test_a_killed_host_ends_without_a_word(tmp_path: Path) -> None:
    """Its connections do not end, so others wait until their timeout."""
    with SimulatedHosts(2, delay_us=100) as network:
        group = network.start(targets.reduce_until_told, 1, str(tmp_path), "/absent", 2.0)
        all_arrived(tmp_path, 2)
        start = time.monotonic()
        network.kill(1, group)
        survivor, killed = group.results(200, return_exceptions=True)
        assert isinstance(killed, RankFailed)
        assert "Timed out" in survivor
        assert time.monotonic() - start > 1.5


@needs_hosts
@pytest.mark.full
def test_killed_ranks_close_their_connections(tmp_path: Path) -> None:
    with SimulatedHosts(2, delay_us=100) as network:
        group = network.start(targets.reduce_until_told, 1, str(tmp_path), "/absent", 30.0)
        all_arrived(tmp_path, 2)
        start = time.monotonic()
        network.kill_ranks(1, group)
        survivor, killed = group.results(200, return_exceptions=True)
        assert isinstance(killed, RankFailed)
        assert isinstance(survivor, str)
        assert time.monotonic() - start < 10


@needs_hosts
def test_commands_run_on_a_host() -> None:
    with SimulatedHosts(2) as network:
        command = ["sh", "-c", "hostname; pwd; echo $GLOO_SOCKET_IFNAME $ADDED"]
        with network.popen(1, command, env={"ADDED": "more"}, stdout=subprocess.PIPE, text=True) as process:
            output, _ = process.communicate(timeout=200)
    assert output.split() == ["host1", os.getcwd(), "sim0", "more"]


STARTS_AND_WAITS = """
import sys, time
import simulated_hosts_targets
from hosts import SimulatedHosts
if __name__ == "__main__":
    with SimulatedHosts(2) as network:
        group = network.start(simulated_hosts_targets.sleeps, 1, sys.argv[1])
        command = network.popen(1, ["sleep", "600"])
        print(*group.pids, command.pid, flush=True)
        time.sleep(600)
"""


@pytest.mark.full
@needs_hosts
@pytest.mark.parametrize("ended_by", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_nothing_is_left_behind(tmp_path: Path, ended_by: signal.Signals) -> None:
    """However the process ends, so do the ranks, the commands and the namespaces that they were in."""
    (tmp_path / "arrived").mkdir()
    script = tmp_path / "starts.py"
    script.write_text(STARTS_AND_WAITS)
    folders = os.pathsep.join([*sys.path, str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "arrived")],
        env=os.environ | {"PYTHONPATH": folders},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        pids = process.stdout.readline().split()
        all_arrived(tmp_path / "arrived", 2)
        spaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
        assert os.readlink("/proc/self/ns/net") not in spaces
        process.send_signal(ended_by)
        process.wait(200)
        deadline = time.monotonic() + 100
        while left := spaces & networks():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


def networks() -> set[str]:
    """Return the network namespaces of all processes."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.add(os.readlink(entry / "ns" / "net"))
            except OSError:
                continue
    return found
