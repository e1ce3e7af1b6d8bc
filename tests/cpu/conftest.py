"""The tests here start their own ranks, forked from a test process that has compiled the host code already."""

from __future__ import annotations

import pytest

from shotcast.cpu import (
    blocks,
    copies,
    floats,
    fused,
    norm,
    one_shot,
    point_to_point,
    ring,
    rows,
    two_shot,
    two_shot_fp8,
)
from shotcast.cpu.compilation import Arithmetic, Schedule


@pytest.fixture(scope="session", autouse=True)
def compiled_before_forking():
    for module in (copies, fused, one_shot, point_to_point, ring, rows, two_shot, two_shot_fp8):
        for value in vars(module).values():
            if isinstance(value, Schedule):
                value.get()
    by_dtype = (floats.SUMS, norm.ADDS, norm.NORMS, blocks.ENCODE, blocks.DECODE)
    half_bits = (floats.SUM_HALF_BITS, norm.ADDS_HALF_BITS, norm.NORMS_HALF_BITS)
    half_bits += (blocks.ENCODE_HALF_BITS, blocks.DECODE_HALF_BITS)
    for arithmetic in (*(kind for kinds in by_dtype for kind in kinds.values()), *half_bits, blocks.SUM):
        assert isinstance(arithmetic, Arithmetic)
        arithmetic.address()
