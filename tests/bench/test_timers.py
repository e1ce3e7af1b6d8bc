"""Timers: the time that a sample stands for."""

from __future__ import annotations

import pytest

from shotcast.bench import timers


class Machine:
    """A machine whose calls take 3 us."""

    now_ns = 0

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def call(self) -> None:
        self.now_ns += 3000


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    fake = Machine()
    monkeypatch.setattr(timers, "time", fake)
    return fake


def test_cpu_samples_are_single_calls(machine: Machine) -> None:
    assert timers.cpu(machine.call, 4)().tolist() == [3.0] * 4
