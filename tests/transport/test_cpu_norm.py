"""Rows of one process: residual add, RMSNorm and quantization compared with plain torch and NumPy, to the bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from norm_reference import reference

from shotcast.device.cpu import floats
from shotcast.memory.operands import NormTensors
from shotcast.transport.cpu import norm
from shotcast.transport.cpu.norm_rows import add_rms_norm
from shotcast.wire import QUANTIZATIONS, Norm

KINDS = {
    "float32": torch.float32,
    "float16": torch.float16,
    "float16 by bits": torch.float16,
    "bfloat16": torch.bfloat16,
}
FORMS = [(quantization, keeps) for quantization in QUANTIZATIONS for keeps in (True, False) if keeps or quantization]
GUARD = 5


@pytest.fixture(params=KINDS)
def dtype(request, monkeypatch):
    if request.param == "float16" and not floats.machine_has_half():
        pytest.skip("no float16 conversions in hardware")
    if request.param == "float16 by bits":
        monkeypatch.setitem(norm.ADDS, "float16", norm.ADDS_HALF_BITS)
        monkeypatch.setitem(norm.NORMS, "float16", norm.NORMS_HALF_BITS)
    return KINDS[request.param]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return values of a wide range of magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * torch.exp(torch.randn(shape, generator=generator))).to(dtype)


def guarded(shape: tuple[int, int], dtype: torch.dtype, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor ``offset`` elements into memory that is watched before and behind it."""
    count = shape[0] * shape[1]
    memory = torch.full(((count + offset + GUARD) * dtype.itemsize,), 0x5A, dtype=torch.uint8)
    return memory.view(dtype)[offset : offset + count].view(shape), memory


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    """Assert that bits are equal; where NaN is expected, any NaN will do."""
    assert actual.shape == expected.shape, what
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan), what
    actual, expected = actual[~nan], expected[~nan]
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8)), what


def check(total, residual, weight, eps, quantization, keeps, scale, offset=0):
    expected = reference(total, residual, weight, eps, quantization, scale)
    shape, dtype = tuple(total.shape), total.dtype
    watched = {}
    new_residual, watched["new_residual"] = guarded(shape, dtype, offset)
    new_residual.copy_(residual)
    normed = quantized = given = None
    if keeps:
        normed, watched["normed"] = guarded(shape, dtype, offset)
    if quantization:
        quantized, watched["quantized"] = guarded(shape, torch.float8_e4m3fn, offset)
        given = scale.clone()
    if quantization == "dynamic":
        given, watched["scale"] = guarded((shape[0], 1), torch.float32, offset)
    tensors = NormTensors(new_residual, weight, eps, new_residual, normed, quantized, given)
    add_rms_norm(total, tensors, Norm(shape[1], quantization, keeps))
    assert_equal(new_residual, expected.new_residual, "new_residual")
    if keeps:
        assert_equal(normed, expected.normed, "normed")
    if quantization:
        assert torch.equal(quantized.view(torch.uint8), expected.quantized), "quantized"
        assert_equal(given, expected.scale.view(given.shape), "scale")
    for name, memory in watched.items():
        itemsize = {"quantized": 1, "scale": 4}.get(name, dtype.itemsize)
        before, behind = memory[: offset * itemsize], memory[-GUARD * itemsize :]
        assert (before == 0x5A).all(), name
        assert (behind == 0x5A).all(), name


@pytest.mark.parametrize(("quantization", "keeps"), FORMS)
def test_every_length_of_a_row(dtype, quantization, keeps):
    for turn, hidden in enumerate((1, 2, 3, 15, 31, 32, 33, 63, 64, 65, 257, 4097)):
        total, residual = values((3, hidden), dtype, turn), values((3, hidden), dtype, turn + 100)
        weight = values((hidden,), dtype, turn + 200)
        check(total, residual, weight, 1e-6, quantization, keeps, torch.tensor([0.013]), offset=turn % 4)


def test_special_values(dtype):
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-7, -6e-8, 1e-40, 65504.0, 3e38, -1.0, 448.0]
    special = torch.tensor(special).to(dtype)
    pairs = torch.tensor(list(itertools.product(range(len(special)), repeat=2)))
    # One special pair in each row, in different columns; the other columns are ordinary.
    total, residual = values((len(pairs), 37), dtype, 1), values((len(pairs), 37), dtype, 2)
    column = torch.arange(len(pairs)) % 37
    total[torch.arange(len(pairs)), column] = special[pairs[:, 0]]
    residual[torch.arange(len(pairs)), column] = special[pairs[:, 1]]
    weight = values((37,), dtype, 3)
    weight[:5] = special[:5]
    for quantization, keeps in FORMS:
        for ordinary in (values((37,), dtype, 3), weight):
            for scale in (0.02, 0.0, 1e-40, float("inf"), float("nan")):
                check(total, residual, ordinary, 1e-5, quantization, keeps, torch.tensor([scale]))


def test_rows_of_zeros_and_of_tiny_values(dtype):
    weight = torch.ones(40).to(dtype)
    for fill in (0.0, -0.0, torch.finfo(dtype).smallest_normal, 2.0**-24, 1e-40):
        total = torch.full((2, 40), fill).to(dtype)
        for eps in (0.0, 1e-6, 1.0):
            for quantization, keeps in FORMS:
                check(total, total.clone(), weight * 2.0**-10, eps, quantization, keeps, torch.tensor([1.0]))


@given(
    name=st.sampled_from(sorted(norm.ADDS)),
    rows=st.integers(0, 4),
    hidden=st.integers(1, 200),
    exponent=st.integers(-12, 12),
    eps=st.floats(0, 1, width=32),
    scale=st.floats(2.0**-20, 2.0**20, width=32),
    form=st.sampled_from(FORMS),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=60)
def test_any_rows(name, rows, hidden, exponent, eps, scale, form, seed):
    dtype = KINDS[name]
    total = (values((rows, hidden), torch.float32, seed) * 2.0**exponent).to(dtype)
    residual, weight = values((rows, hidden), dtype, seed + 1), values((hidden,), dtype, seed + 2)
    check(total, residual, weight, eps, *form, torch.tensor([scale]), offset=seed % 3)


@pytest.mark.parametrize("hidden", [64, 4096])
def test_the_norm_is_within_the_rounding_of_its_dtype(dtype, hidden):
    total, residual = values((8, hidden), dtype, 4), values((8, hidden), dtype, 5)
    weight, normed, new_residual = values((hidden,), dtype, 6), torch.empty_like(total), torch.empty_like(total)
    add_rms_norm(total, NormTensors(residual, weight, 1e-6, new_residual, normed), Norm(hidden))
    exact = new_residual.double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    # Half a place of the result, and in float32 first: the products, the root, and the sum of hidden / 32 + 5 terms.
    bound = torch.finfo(dtype).eps / 2 + (hidden / 32 + 10) * 2.0**-24
    error = (normed.double() - exact).abs() / exact.abs().clamp_min(torch.finfo(dtype).smallest_normal)
    assert error.max() < bound
