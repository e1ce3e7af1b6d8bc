"""research/matmuls.py on a real GPU. Run with ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import torch
from large_gemm import GemmConfig
from matmuls import LibraryProduct, ShapedProduct

from shotcast.errors import ConfigError

pytestmark = pytest.mark.gpu


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    a = torch.randn(m, k, generator=generator, device="cuda", dtype=torch.bfloat16)
    return a, torch.randn(n, k, generator=generator, device="cuda", dtype=torch.bfloat16).T


def test_a_block_that_is_too_large_is_refused() -> None:
    a, b = operands(256, 256, 256)
    with pytest.raises(ConfigError, match="of shared memory; a block may have"):
        ShapedProduct(GemmConfig(64, 64, 64, 2, 4, padding_bytes=230_000))(a, b)


@pytest.mark.parametrize(
    "product",
    [
        ShapedProduct(),
        ShapedProduct(sms=100),
        ShapedProduct(GemmConfig(64, 64, 64, 3, 4)),
        LibraryProduct(),
        LibraryProduct(24),
    ],
    ids=str,
)
def test_values(product: ShapedProduct | LibraryProduct) -> None:
    a, b = operands(1000, 1536, 1024)
    out = torch.full((1000, 1536), float("nan"), device="cuda", dtype=torch.bfloat16)
    exact = a.double() @ b.double()
    for result in (product(a, b, out), product(a, b)):
        torch.testing.assert_close(result.double(), exact, rtol=2**-8, atol=2**-8)
