"""The relay between packets' ends that need no root: Unix sockets in place of TUN devices."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
from simulated_hosts.relay import Relay


def packet(source: int, to: int, number: int, nbytes: int = 100) -> bytes:
    """Return an IPv4 packet as a TUN device gives it, with a number and the time as its data."""
    header = bytes(10) + b"\x45" + bytes(11) + bytes([10, 231, 0, source + 1, 10, 231, 0, to + 1])
    data = struct.pack("qqqq", source, to, number, time.monotonic_ns())
    return (header + data).ljust(nbytes, b"\0")


class Ends:
    """The hosts' ends of the relay, and all packets that came out of them."""

    def __init__(self, hosts: int):
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(hosts)]
        self.ours, self.relays = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        for end in self.relays:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
            end.setblocking(False)
        self.received: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
        self._threads = [threading.Thread(target=self._receive, args=(end,), daemon=True) for end in self.ours]
        for thread in self._threads:
            thread.start()

    @property
    def descriptors(self) -> list[int]:
        return [end.fileno() for end in self.relays]

    def _receive(self, end: socket.socket) -> None:
        while data := end.recv(1 << 17):
            now = time.monotonic_ns()
            source, to, number, sent = struct.unpack("qqqq", data[30:62])
            self.received[source, to].append((number, (now - sent) / 1e3))

    def send(self, source: int, to: int, number: int, nbytes: int = 100) -> None:
        self.ours[source].send(packet(source, to, number, nbytes))

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + 100
        while sum(map(len, self.received.values())) < count and time.monotonic() < deadline:
            time.sleep(0.005)
        assert sum(map(len, self.received.values())) == count

    def close(self) -> None:
        for end in self.ours:
            end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (*self.ours, *self.relays):
            end.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends(3)
    yield made
    made.close()


@pytest.mark.parametrize("slots", [7, 4096])
def test_packets_under_load_all_arrive_in_order_and_not_early(ends: Ends, slots: int) -> None:
    """With few slots the relay holds back what it has no room for, and loses nothing."""
    relay = Relay(ends.descriptors, delay_us=700, slots=slots)
    counts, random = np.zeros((3, 3), int), np.random.default_rng(1)
    try:
        for _ in range(1500):
            source, to = random.choice(3, 2, replace=False)
            ends.send(source, to, counts[source, to], int(random.choice([62, 100, 5000, 65000])))
            counts[source, to] += 1
        ends.wait_for(1500)
    finally:
        relay.close()
    for pair, arrived in ends.received.items():
        assert [number for number, _ in arrived] == list(range(counts[pair]))
        assert min(late_us for _, late_us in arrived) >= 700
    assert relay.counters().failed == sum(relay.counters().lost) == 0
    assert sum(relay.counters().packets) == 1500


def test_a_shorter_delay_lets_no_packet_overtake_another(ends: Ends) -> None:
    relay = Relay(ends.descriptors, delay_us=200_000)
    try:
        ends.send(0, 1, 0)
        while relay.counters().packets[0] == 0:
            time.sleep(0.001)
        relay.set_delay(0)
        ends.send(0, 1, 1)
        ends.wait_for(2)
    finally:
        relay.close()
    assert [number for number, _ in ends.received[0, 1]] == [0, 1]


@pytest.mark.timing
def test_a_cut_host_gets_nothing_and_sends_nothing(ends: Ends) -> None:
    """Packets that are on their way when the host is cut off are lost too; other hosts do not notice."""
    relay = Relay(ends.descriptors, delay_us=1_000_000)
    try:
        for number, (source, to) in enumerate([(0, 1), (1, 2), (0, 2)]):
            ends.send(source, to, number)
        while sum(relay.counters().packets) < 3:
            time.sleep(0.001)
        relay.set_cut(1, True)
        relay.set_delay(0)
        ends.send(2, 1, 3)
        ends.wait_for(1)
        assert list(ends.received) == [(0, 2)]
        assert sum(relay.counters().lost) == 3
        relay.set_cut(1, False)
        ends.send(2, 1, 4)
        ends.wait_for(2)
        assert [number for number, _ in ends.received[2, 1]] == [4]
    finally:
        relay.close()


def test_a_link_carries_no_more_than_its_bandwidth(ends: Ends) -> None:
    """Two senders share the receiver's link: 40 packets of 12,500 bytes at 100 Mbit/s take 40 ms."""
    relay = Relay(ends.descriptors, delay_us=0, bandwidth_gbps=0.1)
    start = time.monotonic()
    try:
        for number in range(20):
            for source in (0, 1):
                ends.send(source, 2, number, 12_500)
        ends.wait_for(40)
    finally:
        relay.close()
    assert time.monotonic() - start >= 0.039


def test_packets_for_no_host_are_ignored(ends: Ends) -> None:
    relay = Relay(ends.descriptors, delay_us=0)
    try:
        ends.ours[0].send(packet(0, 9, 0))
        ends.ours[0].send(bytes(10) + b"\x60".ljust(80, b"\0"))  # IPv6
        ends.send(0, 1, 1)
        ends.wait_for(1)
    finally:
        relay.close()
    assert list(ends.received) == [(0, 1)]


def test_an_idle_relay_sleeps(ends: Ends) -> None:
    busy = []
    for number in range(1, 11):  # a busy machine may hold one up
        relay = Relay(ends.descriptors, delay_us=0, spin_us=60)
        try:
            time.sleep(0.3)
            ends.send(0, 1, number)
            ends.wait_for(number)
            time.sleep(0.01)
            busy.append(relay.counters().busy)
        finally:
            relay.close()
        if busy[-1] < 0.2:
            return
    pytest.fail(f"parts of the time in which it was busy: {busy}")
