"""Linear layers that write their results where they are told."""

from __future__ import annotations

import pytest
import torch

from shotcast.layers.linear import Linear, products_by
from shotcast.layers.quantized import quantize, scaled_matmul


@pytest.mark.parametrize("rows", [1, 4, 300])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_written_where_it_is_told(rows: int, biased: bool, dtype: torch.dtype) -> None:
    weight, x = torch.randn(48, 64, dtype=dtype), torch.randn(rows, 64, dtype=dtype)
    linear = Linear(weight, torch.randn(48, dtype=dtype) if biased else None)
    memory = torch.full((rows + 2, 48), torch.nan, dtype=dtype)
    out = memory[1:-1]
    assert linear(x, out) is out
    assert torch.equal(out, linear(x))
    assert memory[[0, -1]].isnan().all()


def test_a_library_product_is_written_where_it_is_told() -> None:
    """The library multiplies many rows on GPUs."""
    weight, x = torch.randn(48, 64), torch.randn(300, 64)
    for bias in (None, torch.randn(48)):
        linear, out = Linear(weight, bias), torch.empty(300, 48)
        assert linear._by_library(x, out) is out
        torch.testing.assert_close(out, linear._by_library(x))


def test_a_product_in_fp8_is_written_where_it_is_told() -> None:
    x, weight = (quantize(torch.randn(rows, 64).bfloat16()) for rows in (32, 48))
    memory = torch.full((34, 48), torch.nan, dtype=torch.bfloat16)
    out = memory[1:-1]
    for bias in (None, torch.randn(48).bfloat16()):
        assert scaled_matmul(x, weight, bias, out) is out
        assert torch.equal(out, scaled_matmul(x, weight, bias))
        assert memory[[0, -1]].isnan().all()


def test_a_product_of_ours_is_written_where_it_is_told() -> None:
    seen: list[torch.Tensor | None] = []

    def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(out)
        return a @ b if out is None else out.copy_(a @ b)

    linear, x = Linear(torch.randn(48, 64).bfloat16()), torch.randn(300, 64).bfloat16()
    out = torch.empty(300, 48, dtype=torch.bfloat16)
    with products_by(product):
        assert linear._by_library(x, out) is out
        linear._by_library(x)
    assert seen[0] is out
    assert seen[1] is None
