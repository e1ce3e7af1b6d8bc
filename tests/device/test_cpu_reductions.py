"""Reductions over ranks by themselves: any bits of every dtype, compared with plain torch."""

from __future__ import annotations

import ctypes
import functools
from array import array

import pytest
import torch
from expected_results import reduced
from hypothesis import given, settings
from hypothesis import strategies as st

from shotcast import wire
from shotcast.device.cpu import reductions
from shotcast.device.cpu.compilation import Arithmetic

EVERY = [(dtype, name) for dtype, names in wire.REDUCED.items() for name in names]
BY_BITS = [("float16 by bits", "avg"), ("float16 by bits", "prod")]


def any_bits(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Return random bits of a dtype: NaN with any payload, infinities, both zeros, subnormals and numbers."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        kinds = torch.tensor([0, 0, 1, 2, 3, 64, 128, 255], dtype=torch.uint8)  # not 0 is true
        return kinds[torch.randint(len(kinds), (count,), generator=generator)].view(dtype)
    x = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return x
    parts = torch.view_as_real(x) if dtype.is_complex else x
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, -1.0, 1.5]).to(parts.dtype)
    taken = special[torch.randint(8, parts.shape, generator=generator)]
    near = torch.randn(parts.shape, generator=generator).to(parts.dtype)
    which = torch.rand(parts.shape, generator=generator)
    parts.copy_(torch.where(which < 0.3, taken, torch.where(which < 0.8, near, parts)))
    return x


def run(arithmetic: Arithmetic, inputs: list[torch.Tensor], out: torch.Tensor) -> None:
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(arithmetic.address())
    sources = array("q", [x.data_ptr() for x in inputs])
    function(out.data_ptr(), sources.buffer_info()[0], len(inputs), out.numel())


def assert_bits(got: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
    """Assert that bits are equal; every NaN of ``got`` is the positive quiet one."""
    if got.is_complex():
        got, wanted = torch.view_as_real(got), torch.view_as_real(wanted)
    if got.is_floating_point():
        nan = wanted.isnan()
        quiet = torch.full_like(got, float("nan"))
        wanted = torch.where(nan, quiet, wanted)
    assert torch.equal(got.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)), what


@functools.cache
def arithmetic_of(form: str, reduction: str) -> Arithmetic:
    return reductions.REDUCTIONS.get((form, reduction)) or reductions.arithmetic(form, reduction)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([*EVERY, *BY_BITS]),
    st.integers(1, 8),
    st.sampled_from([0, 1, 2, 31, 32, 33, 63, 65, 257]) | st.integers(0, 300),
    st.integers(0, 3),
    st.integers(0, 1 << 20),
    st.booleans(),
)
def test_any_bits(form, ranks: int, count: int, offset: int, seed: int, in_place: bool) -> None:
    (form, reduction) = form
    dtype = getattr(torch, form.partition(" ")[0])
    inputs = [any_bits(dtype, count + offset + 1, seed * 8 + rank)[offset:] for rank in range(ranks)]
    wanted = reduced([x[:count] for x in inputs], reduction)
    out = inputs[ranks // 2] if in_place else any_bits(dtype, count + 1, seed + 1)
    guard = out[count:].view(torch.uint8).clone()  # a copy of bool may make bytes 0 or 1
    run(arithmetic_of(form, reduction), inputs, out[:count])
    assert_bits(out[:count], wanted, (form, reduction))
    assert torch.equal(out[count:].view(torch.uint8), guard), "no more was written"


@pytest.mark.every(5)
@pytest.mark.parametrize(("form", "reduction"), [*EVERY, *BY_BITS])
def test_every_dtype(form: str, reduction: str) -> None:
    dtype = getattr(torch, form.partition(" ")[0])
    inputs = [any_bits(dtype, 1001, 7 * rank) for rank in range(3)]
    out = torch.empty_like(inputs[0])
    run(arithmetic_of(form, reduction), inputs, out)
    assert_bits(out, reduced(inputs, reduction), (form, reduction))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("reduction", ["max", "min"])
def test_every_pair_of_special_values(name: str, reduction: str) -> None:
    dtype = getattr(torch, name)
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 6e-8, -6e-8, 1.0]).to(dtype)
    left, right = values.repeat(len(special)), special.repeat_interleave(len(values))
    out = torch.empty_like(left)
    run(arithmetic_of(name, reduction), [left, right], out)
    assert_bits(out, reduced([left, right], reduction), (name, reduction))


def test_reference_against_plain_torch() -> None:
    """The reference itself, where PyTorch reduces in one call."""
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
        xs = [any_bits(dtype, 100, rank) for rank in range(5)]
        stacked = torch.stack(xs)
        assert torch.equal(reduced(xs, "sum"), stacked.sum(0).to(dtype))
        assert torch.equal(reduced(xs, "prod"), stacked.prod(0).to(dtype))
        assert torch.equal(reduced(xs, "max"), stacked.amax(0))
        assert torch.equal(reduced(xs, "min"), stacked.amin(0))
    xs = [any_bits(torch.uint64, 100, rank) for rank in range(5)]
    numbers = [x.tolist() for x in xs]
    columns = list(zip(*numbers, strict=True))
    assert reduced(xs, "max").tolist() == [max(column) for column in columns]
    assert reduced(xs, "min").tolist() == [min(column) for column in columns]
    assert reduced(xs, "sum").tolist() == [sum(column) % (1 << 64) for column in columns]
    xs = [any_bits(torch.float64, 100, rank) for rank in range(5)]
    stacked = torch.stack(xs)
    assert torch.equal(reduced(xs, "max").nan_to_num(7.0), stacked.amax(0).nan_to_num(7.0))
    assert torch.equal(reduced(xs, "min").nan_to_num(7.0), stacked.amin(0).nan_to_num(7.0))
    zero = torch.tensor([0.0])
    assert not reduced([-zero, zero], "max").signbit().any()
    assert reduced([zero, -zero], "min").signbit().all()
