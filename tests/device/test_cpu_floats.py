"""Sums over ranks by themselves: every 16-bit value, every rounding case, both float16 conversions."""

from __future__ import annotations

import ctypes
from array import array

import pytest
import torch

from shotcast.device.cpu import compilation, floats, reductions
from shotcast.device.cpu.compilation import Arithmetic

KINDS = {
    "float32": (torch.float32, reductions.SUMS["float32"]),
    "float16": (torch.float16, reductions.SUMS["float16"]),
    "float16 by bits": (torch.float16, reductions.arithmetic("float16 by bits", "sum")),
    "bfloat16": (torch.bfloat16, reductions.SUMS["bfloat16"]),
}
QUIET_NAN = {torch.float32: 0x7FC00000, torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)


def call_arithmetic(arithmetic: Arithmetic, inputs: list[torch.Tensor], out: torch.Tensor) -> None:
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(arithmetic.address())
    sources = array("q", [x.data_ptr() for x in inputs])
    function(out.data_ptr(), sources.buffer_info()[0], len(inputs), out.numel())


def check(kind: str, inputs: list[torch.Tensor]) -> None:
    dtype, arithmetic = KINDS[kind]
    out = torch.empty_like(inputs[0])
    call_arithmetic(arithmetic, inputs, out)
    total = torch.zeros(inputs[0].shape)
    for x in inputs:
        total = total + x.float()
    expected = total.to(dtype)
    nan = expected.isnan()
    assert torch.equal(bits(out)[~nan], bits(expected)[~nan])
    assert torch.equal(bits(out)[nan], torch.full((int(nan.sum()),), QUIET_NAN[dtype], dtype=bits(out).dtype))


def all_16_bit_values(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("kind", ["float16", "float16 by bits", "bfloat16"])
def test_every_16_bit_value(kind):
    if kind == "float16" and not floats.machine_has_half():
        pytest.skip("no float16 conversions in hardware")
    values = all_16_bit_values(KINDS[kind][0])
    check(kind, [values])
    generator = torch.Generator().manual_seed(1)
    for ranks in (2, 3, 8):
        check(kind, [values] + [values[torch.randperm(65536, generator=generator)] for _ in range(ranks - 1)])


@pytest.mark.parametrize("kind", ["float16", "float16 by bits", "bfloat16"])
def test_ties_and_neighbours_of_ties(kind):
    """Add halves of the last place to a large value: nearest even on either side."""
    dtype = KINDS[kind][0]
    values = all_16_bit_values(dtype)
    small = values.float().abs()
    step = torch.where(small > 0, small * torch.finfo(dtype).eps, torch.ones(()))
    for part in (0.25, 0.5, 0.75, 1.0, 1.5):
        check(kind, [values, (step * part).to(dtype)])
        check(kind, [values, (-step * part).to(dtype)])


def test_float32_specials():
    words = [0, 0x80000000, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 0x7F7FFFFF, 0x00800000]
    words += [0x7F800001, 0x3F800000, 0xBF800000, 0x33800000]
    values = torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32).view(torch.float32)
    count = len(words)
    left, right = values.repeat(count), values.repeat_interleave(count)
    check("float32", [left])
    check("float32", [left, right])
    check("float32", [left, right, right.flip(0)])


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_in_place_and_unaligned(kind):
    dtype, arithmetic = KINDS[kind]
    for count in (0, 1, 2, 31, 32, 33, 63, 65, 257):
        for offset in (0, 1, 3):
            inputs = [torch.randn(count + offset + 1).to(dtype)[offset:] for _ in range(3)]
            expected = (inputs[0].float() + inputs[1].float() + inputs[2].float()).to(dtype)
            guard = inputs[1][count].item()
            call_arithmetic(arithmetic, inputs, inputs[1][:count])
            assert torch.equal(bits(inputs[1][:count]), bits(expected[:count]))
            assert inputs[1][count].item() == guard


def test_without_a_place_for_the_cache_it_still_compiles(monkeypatch):
    monkeypatch.setattr(compilation, "_folders", lambda source: [])
    arithmetic = Arithmetic(reductions.SUMS["bfloat16"]._function)
    assert arithmetic._loaded is None
    x = torch.ones(5, dtype=torch.bfloat16)
    call_arithmetic(arithmetic, [x, x], x)
    assert arithmetic._loaded is not None
    assert x.tolist() == [2.0] * 5
