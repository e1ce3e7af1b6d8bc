"""Timers of ranks; that of GPUs is tested in ``tests/engine/test_llm_cuda.py``."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from shotcast.layers.step_timer import DeviceStepTimer, HostStepTimer


def test_a_host_clock_counts_communication_within_steps() -> None:
    timer = HostStepTimer()
    started = time.perf_counter()
    for _ in range(2):
        with timer.step():
            time.sleep(0.01)
            with timer.communication():
                time.sleep(0.01)
    took = time.perf_counter() - started
    assert 0.02 <= timer.communication_s <= timer.step_s - 0.02
    assert 0.04 <= timer.step_s <= took


def test_what_stamps_take_is_taken_off() -> None:
    """Time a step of two calls of 3 us and 4 us of other work; an empty span is 1 us long, and delays by 2.5 us."""
    timer: Any = DeviceStepTimer.__new__(DeviceStepTimer)
    timer._span_ns, timer._delay_ns = 1000.0, 2500.0
    timer._arrived = SimpleNamespace(query=lambda: False)
    timer._latest_totals = [[1000 + 4000 + 2 * (3000 + 2500), 1], [2 * (3000 + 1000), 2]]
    assert timer.step_s == pytest.approx(10e-6)
    assert timer.communication_s == pytest.approx(6e-6)
    timer._latest_totals = [[0, 0], [1500, 2]]
    assert timer.communication_s == 0.0
