"""Compiled products of few rows with a matrix, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shotcast.kernels.cpu import gemv
from shotcast.layers.linear import Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=30)
@given(
    rows=st.integers(1, 4),
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 70),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_products(dtype: torch.dtype, rows: int, inputs: int, outputs: int, threads: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    before, from_bytes = torch.get_num_threads(), gemv._THREADS_FROM_BYTES
    torch.set_num_threads(threads)
    gemv._THREADS_FROM_BYTES = 0
    try:
        out = gemv.linear(x, weight)
    finally:
        torch.set_num_threads(before)
        gemv._THREADS_FROM_BYTES = from_bytes
    assert (out.dtype, out.shape) == (torch.float32, (rows, outputs))
    wanted = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    assert ((out.double() - wanted).abs() <= 1e-6 * size + 1e-30).all()


def test_not_a_number_and_infinity_stay() -> None:
    weight = torch.ones(4, 8)
    weight[1, 3], weight[2, 5] = float("nan"), float("inf")
    out = gemv.linear(torch.ones(1, 8), weight)[0]
    assert out[0] == 8
    assert out[1].isnan()
    assert out[2] == float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 40])
def test_a_linear_layer_takes_either_way(dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    taken = []
    compiled = gemv.linear
    monkeypatch.setattr(gemv, "linear", lambda x, weight: taken.append(rows) or compiled(x, weight))
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((rows, 64), (32, 64), (32,)))
    out = Linear(weight, bias)(x)
    assert out.dtype == dtype
    assert bool(taken) == (rows <= gemv.MAX_ROWS[dtype])
    wanted = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
