"""The tests here start their own ranks, forked from a test process that has compiled the host code already."""

from __future__ import annotations

import pytest

from shotcast.cpu import copies, floats, one_shot, point_to_point, ring, two_shot
from shotcast.cpu.compilation import Arithmetic, Schedule


@pytest.fixture(scope="session", autouse=True)
def compiled_before_forking():
    for module in (copies, one_shot, point_to_point, ring, two_shot):
        for value in vars(module).values():
            if isinstance(value, Schedule):
                value.get()
    for arithmetic in (*floats.SUMS.values(), floats.SUM_HALF_BITS):
        assert isinstance(arithmetic, Arithmetic)
        arithmetic.address()
