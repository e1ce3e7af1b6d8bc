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
from shotcast.transport.cpu.norm_rows import norm_sum
from shotcast.wire import LAYER, LAYER_WITH_BIAS, NORM_KINDS, QUANTIZATIONS, RMS, Norm

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
        monkeypatch.setattr(floats, "machine_has_half", lambda: False)
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


def check(total, residual, weight, eps, quantization, keeps, scale, offset=0, kind=RMS):
    bias = weight.flip(0).contiguous() if kind == LAYER_WITH_BIAS else None
    expected = reference(total, residual, weight, eps, quantization, scale, kind, bias)
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
    tensors = NormTensors(new_residual, weight, eps, new_residual, normed, quantized, given, bias)
    norm_sum(total, tensors, Norm(shape[1], quantization, keeps, weight_of(weight, dtype), kind))
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


def weight_of(weight: torch.Tensor, dtype: torch.dtype) -> str:
    """Return the dtype of a weight as a norm has it."""
    return "" if weight.dtype == dtype else str(weight.dtype).removeprefix("torch.")


@pytest.mark.every(4)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [RMS, LAYER_WITH_BIAS])
def test_weights_of_another_dtype(dtype, weight_dtype, kind):
    for turn, hidden in enumerate((1, 31, 33, 64, 321)):
        total, residual = values((3, hidden), dtype, turn), values((3, hidden), dtype, turn + 100)
        weight = values((hidden,), weight_dtype, turn + 200)
        for quantization, keeps in FORMS:
            scale = torch.tensor([0.013])
            check(total, residual, weight, 1e-6, quantization, keeps, scale, offset=turn % 4, kind=kind)


@pytest.mark.every(4)
@pytest.mark.parametrize(("quantization", "keeps"), FORMS)
@pytest.mark.parametrize("kind", NORM_KINDS)
def test_every_length_of_a_row(dtype, quantization, keeps, kind):
    for turn, hidden in enumerate((1, 2, 3, 15, 31, 32, 33, 63, 64, 65, 257, 4097)):
        total, residual = values((3, hidden), dtype, turn), values((3, hidden), dtype, turn + 100)
        weight = values((hidden,), dtype, turn + 200)
        scale = torch.tensor([0.013])
        check(total, residual, weight, 1e-6, quantization, keeps, scale, offset=turn % 4, kind=kind)


@pytest.mark.parametrize("kind", [RMS, LAYER_WITH_BIAS])
def test_special_values(dtype, kind):
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
                check(total, residual, ordinary, 1e-5, quantization, keeps, torch.tensor([scale]), kind=kind)


def test_rows_of_zeros_and_of_tiny_values(dtype):
    weight = torch.ones(40).to(dtype)
    for fill in (0.0, -0.0, torch.finfo(dtype).smallest_normal, 2.0**-24, 1e-40):
        total = torch.full((2, 40), fill).to(dtype)
        for eps in (0.0, 1e-6, 1.0):
            for quantization, keeps in FORMS:
                check(total, total.clone(), weight * 2.0**-10, eps, quantization, keeps, torch.tensor([1.0]))


@given(
    dtype=st.sampled_from(sorted(set(KINDS.values()), key=str)),
    weight_dtype=st.sampled_from(sorted(set(KINDS.values()), key=str)),
    rows=st.integers(0, 4),
    hidden=st.integers(1, 200),
    exponent=st.integers(-12, 12),
    eps=st.floats(0, 1, width=32),
    scale=st.floats(2.0**-20, 2.0**20, width=32),
    form=st.sampled_from(FORMS),
    kind=st.sampled_from(NORM_KINDS),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=60)
def test_any_rows(dtype, weight_dtype, rows, hidden, exponent, eps, scale, form, kind, seed):
    total = (values((rows, hidden), torch.float32, seed) * 2.0**exponent).to(dtype)
    residual, weight = values((rows, hidden), dtype, seed + 1), values((hidden,), weight_dtype, seed + 2)
    check(total, residual, weight, eps, *form, torch.tensor([scale]), offset=seed % 3, kind=kind)


@pytest.mark.parametrize("hidden", [64, 4096])
def test_the_norm_is_within_the_rounding_of_its_dtype(dtype, hidden):
    total, residual = values((8, hidden), dtype, 4), values((8, hidden), dtype, 5)
    weight, normed, new_residual = values((hidden,), dtype, 6), torch.empty_like(total), torch.empty_like(total)
    norm_sum(total, NormTensors(residual, weight, 1e-6, new_residual, normed), Norm(hidden))
    exact = new_residual.double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    # Half a place of the result, and in float32 first: the products, the root, and the sum of hidden / 32 + 5 terms.
    bound = torch.finfo(dtype).eps / 2 + (hidden / 32 + 10) * 2.0**-24
    error = (normed.double() - exact).abs() / exact.abs().clamp_min(torch.finfo(dtype).smallest_normal)
    assert error.max() < bound


@pytest.mark.every(4)
@pytest.mark.parametrize("offset", [0.0, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("hidden", [1, 2, 33, 64, 4099])
def test_layer_norm_keeps_its_accuracy_however_large_the_mean_is(dtype, hidden, offset):
    """The error does not grow with the mean: its rounding is made good, and differences from it are nearly exact."""
    if dtype == torch.float16:
        offset = min(offset, 1e3)
    total, residual = values((8, hidden), dtype, 4), torch.full((8, hidden), offset).to(dtype)
    residual[1] = -residual[1]
    total[2] = 0.25  # a constant row
    weight, bias = values((hidden,), torch.float32, 6), values((hidden,), torch.float32, 7)
    normed, new_residual = torch.empty_like(total), torch.empty_like(total)
    tensors = NormTensors(residual, weight, 1e-5, new_residual, normed, bias=bias)
    norm_sum(total, tensors, Norm(hidden, weight=weight_of(weight, dtype), kind=LAYER_WITH_BIAS))
    exact = new_residual.double()
    exact = exact - exact.mean(-1, keepdim=True)
    deviation = (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    exact = exact / deviation * weight.double()
    # half a place of the result, which has both terms; in float32 the sums, the root, the products and the last sum
    inside = (hidden / 32 + 20) * 2.0**-24 * (exact.abs() + weight.double().abs())
    bound = (torch.finfo(dtype).eps / 2 + 2.0**-23) * (exact + bias.double()).abs() + inside
    bound += torch.finfo(dtype).smallest_normal
    assert ((normed.double() - exact - bias.double()).abs() <= bound).all()


def test_a_row_with_an_infinity_or_nan_is_nan(dtype):
    for special in (float("inf"), float("-inf"), float("nan")):
        total = values((2, 70), dtype, 1)
        total[1, 41] = special
        normed, new_residual = torch.empty_like(total), torch.empty_like(total)
        tensors = NormTensors(torch.zeros_like(total), torch.ones(70).to(dtype), 1e-5, new_residual, normed)
        norm_sum(total, tensors, Norm(70, kind=LAYER))
        assert normed[1].isnan().all()
        assert normed[0].isfinite().all()
