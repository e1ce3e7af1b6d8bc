"""The host's part of a call: the time that a sample stands for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from call_modes import host_time


class Machine:
    """A machine whose calls take 3 us of host time and 100 us of GPU time, for which a wait lasts."""

    def __init__(self) -> None:
        self.now_ns = self.pending_ns = self.calls = self.waits = 0
        self.most_pending = 0

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def call(self) -> None:
        self.now_ns += 3000
        self.pending_ns += 100_000
        self.calls += 1
        self.most_pending = max(self.most_pending, self.pending_ns // 100_000)

    def wait(self) -> None:
        self.now_ns += self.pending_ns
        self.pending_ns = 0
        self.waits += 1


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    fake = Machine()
    monkeypatch.setattr(host_time, "time", fake)
    return fake


def test_host_time_is_that_of_enqueueing(machine: Machine) -> None:
    samples = host_time.host(machine.call, 130, machine.wait)()
    assert np.allclose(samples, [3.0] * 3), "130 calls are three bursts"
    assert machine.calls == 3 * host_time.BURST
    assert machine.pending_ns == 0, "nothing is left for the next implementation"


def test_host_bursts_do_not_fill_a_launch_queue(machine: Machine) -> None:
    host_time.host(machine.call, 100_000, machine.wait)()
    assert machine.most_pending == host_time.BURST < 256


def test_host_bursts_begin_with_an_empty_queue(machine: Machine) -> None:
    machine.call()
    samples = host_time.host(machine.call, 1, machine.wait)()
    assert machine.most_pending == host_time.BURST
    assert samples.tolist() == [3.0]


def test_nobody_counts_allocations_on_the_cpu() -> None:
    assert host_time.allocations(torch.device("cpu")) is None
