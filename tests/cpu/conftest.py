"""The tests here start their own ranks, forked from a test process that has compiled the host code already."""

from __future__ import annotations

import pytest

from shotcast.cpu import copies, floats, fused, norm, one_shot, point_to_point, ring, rows, two_shot
from shotcast.cpu.compilation import Arithmetic, Schedule


@pytest.fixture(scope="session", autouse=True)
def compiled_before_forking():
    for module in (copies, fused, one_shot, point_to_point, ring, rows, two_shot):
        for value in vars(module).values():
            if isinstance(value, Schedule):
                value.get()
    half_bits = (floats.SUM_HALF_BITS, norm.ADDS_HALF_BITS, norm.NORMS_HALF_BITS)
    for arithmetic in (*floats.SUMS.values(), *norm.ADDS.values(), *norm.NORMS.values(), *half_bits):
        assert isinstance(arithmetic, Arithmetic)
        arithmetic.address()
