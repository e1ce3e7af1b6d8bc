"""FP8 products against float64: the errors are those of rounding to e4m3, and no more."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shotcast.errors import ConfigError
from shotcast.layers.linear import Linear, RowShard, column_parallel
from shotcast.layers.quantized import Float8Rows, quantize, scaled_matmul
from shotcast.layers.weights import Weights

SIDES = st.sampled_from([16, 32, 48, 256])


def rounding(matrix: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the largest error of each element in FP8, according to docs/reference/numerics.md."""
    return (matrix.abs() / 16).maximum(scale * 2**-10) * (1 + 2**-10)


@settings(max_examples=60)
@given(st.integers(1, 9), SIDES, SIDES, st.integers(0, 99), st.sampled_from([1e-6, 1.0, 1e6]), st.booleans())
def test_error_is_that_of_rounding(rows: int, inputs: int, outputs: int, seed: int, size: float, biased: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator, dtype=torch.float64).float()
    weight = torch.randn(outputs, inputs, generator=generator).mul(torch.rand(outputs, 1, generator=generator)) * size
    bias = torch.randn(outputs, generator=generator).bfloat16() if biased else None
    x8, weight8 = quantize(x), quantize(weight)
    exact, sizes = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    x_off, weight_off = rounding(x.double(), x8.scale.double()), rounding(weight.double(), weight8.scale.double())
    bound = x_off @ weight.double().abs().T + (x.double().abs() + x_off) @ weight_off.T
    if bias is not None:
        exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    bound += (sizes + bound) * 2**-12 + exact.abs() * 2**-8
    found = scaled_matmul(x8, weight8, bias)
    assert found.dtype == torch.bfloat16
    assert bool(((found.double() - exact).abs() <= bound).all())


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 99))
def test_every_row_has_its_scale(rows: int, columns: int, seed: int) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    values, scale = quantize(matrix)
    assert torch.equal(scale, matrix.abs().amax(1, keepdim=True) / 448)
    assert bool((values.float().abs().amax(1) == 448).all())
    assert bool(((values.double() * scale - matrix).abs() <= rounding(matrix.double(), scale.double())).all())


def test_slices_do_not_matter_and_zeros_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(7, 24)
    matrix[3] = 0
    whole = quantize(matrix)
    assert not whole.values[3].float().any()
    monkeypatch.setattr("shotcast.layers.quantized._AT_ONCE", 50)
    parts = quantize(matrix)
    assert torch.equal(whole.values.view(torch.uint8), parts.values.view(torch.uint8))
    assert torch.equal(whole.scale, parts.scale)


class Matrices:
    """A source that makes the tensors it is asked for, and records how many bytes were read."""

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        whole = torch.randn(64, 32, generator=torch.Generator().manual_seed(len(name)))
        return whole[rows or slice(None), columns or slice(None)]


def test_joined_matrices_are_quantised_each_by_its_rows() -> None:
    read: list[int] = []
    weights = Weights(Matrices(), torch.bfloat16, torch.device("cpu"), read.append, "fp8")
    layer = column_parallel(weights, [RowShard("a", range(16)), RowShard("bc", range(16, 48))])
    assert layer.weight.dtype == torch.float8_e4m3fn
    assert read == [16 * 32 + 4 * 16, 32 * 32 + 4 * 32]
    wanted = [
        quantize(Matrices().read(f"{name}.weight", cut).bfloat16())
        for name, cut in (("a", slice(16)), ("bc", slice(16, 48)))
    ]
    x = quantize(torch.randn(3, 32).bfloat16())
    assert torch.equal(layer(x), torch.cat([scaled_matmul(x, part) for part in wanted], dim=1))


def test_sides_must_fit() -> None:
    with pytest.raises(ConfigError, match=r"multiples of 16; a rank's part of this one is \[24, 32\]"):
        Linear(quantize(torch.ones(24, 32)))


def test_rows_are_given_in_fp8_only_where_they_are_taken() -> None:
    from shotcast.kernels.triton import gemv

    few = gemv.MAX_ROWS
    layer = Linear(Float8Rows(torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(16, 1)))
    assert [layer.takes_float8(rows) for rows in (1, few, few + 1)] == [False, False, True]
    assert not Linear(torch.zeros(16, 16)).takes_float8(1000)
