"""Ranks of test_matmuls.py: products by the interpreted kernel."""

from __future__ import annotations

import torch
from large_gemm import GemmConfig
from matmuls import LibraryProduct, ShapedProduct

from shotcast.errors import ConfigError


def products() -> list[str]:
    """Return what is wrong with products of either kind."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(40, 48, generator=generator).bfloat16()
    weight = torch.randn(72, 48, generator=generator).bfloat16()
    exact = a.double() @ weight.T.double()
    wrong = []
    small = GemmConfig(16, 32, 32, 2, 4, persistent=True)
    results = []
    for product in (ShapedProduct(), ShapedProduct(small, 1), ShapedProduct(small, 3), LibraryProduct()):
        out = torch.full((40, 72), float("nan")).bfloat16()
        for result in (product(a, weight.T, out), product(a, weight.T)):
            if not torch.allclose(result.double(), exact, rtol=2**-8, atol=2**-8):
                wrong.append(f"{product}: values")
        results.append(out)
        for operand in (weight, weight.T[:, ::2].float(), weight.T[:40]):
            try:
                product(a, operand)
                wrong.append(f"{product}: took {operand.shape}, {operand.stride()}")
            except (RuntimeError, ValueError, TypeError):
                pass
    if not torch.equal(results[1], results[2]):
        wrong.append("other bits on other numbers of SMs")
    try:
        ShapedProduct(GemmConfig(256, 256, 64, 4))(a, weight.T)
        wrong.append("a block of 320 KiB")
    except ConfigError as error:
        if "take 327680 bytes of shared memory; a block may have 261120" not in str(error):
            wrong.append(str(error))
    return wrong
