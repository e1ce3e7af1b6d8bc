"""The conversion to FP8 by itself: every tie and its neighbours, every exponent, specials; vectors and scalars."""

from __future__ import annotations

import pytest
import torch
from numba import njit, types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from shotcast.device.cpu.float8 import BYTE, to_e4m3
from shotcast.device.cpu.floats import F32, LANES, WORD, vector


@intrinsic(prefer_literal=True)
def _convert(_context, lanes, destination, source, count):
    """Convert ``count`` groups of ``lanes`` elements from float32 to bytes."""
    width = lanes.literal_value

    def generate(target, builder, _signature, arguments):
        _, destination, source, count = arguments

        def place(address, kind, index):
            step = width * (4 if kind is F32 else 1)
            address = builder.add(address, builder.mul(index, WORD(step)))
            return builder.inttoptr(address, vector(kind, width).as_pointer())

        with cgutils.for_range(builder, count) as group:
            value = builder.load(place(source, F32, group.index), align=1)
            builder.store(to_e4m3(builder, value, width), place(destination, BYTE, group.index), align=1)
        return target.get_dummy_value()

    return signature(types.void, lanes, *(types.int64,) * 3), generate


@njit
def _vectors_to_bytes(destination, source, count):
    _convert(LANES, destination, source, count)


@njit
def _scalars_to_bytes(destination, source, count):
    _convert(1, destination, source, count)


WAYS = {LANES: _vectors_to_bytes, 1: _scalars_to_bytes}


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def padded(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([values, values.new_zeros(-len(values) % LANES)])


def expected_bytes(values: torch.Tensor) -> torch.Tensor:
    # Written out, since PyTorch turns values beyond 464 into NaN, and keeps the sign of NaN, which is dropped here.
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(values.isnan(), torch.full_like(expected, 0x7F), expected)


def check(lanes: int, values: torch.Tensor) -> None:
    values = padded(values)
    out = torch.full((len(values),), 0x55, dtype=torch.uint8)
    WAYS[lanes](out.data_ptr(), values.data_ptr(), len(values) // lanes)
    wrong = out != expected_bytes(values)
    assert not wrong.any(), (values[wrong][:5], out[wrong][:5], expected_bytes(values)[wrong][:5])


@pytest.mark.parametrize("lanes", WAYS)
def test_every_value_tie_and_neighbour(lanes):
    values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (values[1:] + values[:-1]) / 2
    exact = torch.cat([values, ties, torch.tensor([464.0, 480.0])])
    near = torch.cat([bits(exact) + step for step in (-2, -1, 0, 1, 2)]).clamp(min=0).view(torch.float32)
    check(lanes, torch.cat([near, -near]))


@pytest.mark.parametrize("lanes", WAYS)
def test_every_exponent_and_specials(lanes):
    generator = torch.Generator().manual_seed(3)
    mantissas = torch.randint(0, 1 << 23, (40,), generator=generator, dtype=torch.int32)
    mantissas = torch.cat([mantissas, torch.tensor([0, 1, 0x7FFFFF, 0x400000, 0x3FFFFF, 0x400001], dtype=torch.int32)])
    words = torch.arange(256, dtype=torch.int32).repeat_interleave(len(mantissas)) << 23 | mantissas.repeat(256)
    values = words.view(torch.float32)
    assert values.isnan().any()
    assert values.isinf().any()
    check(lanes, torch.cat([values, (words | -(1 << 31)).view(torch.float32)]))
