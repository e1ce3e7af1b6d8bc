"""Products that leave room, on a real GPU: their values, and carve-outs."""

from __future__ import annotations

import contextlib

import pytest
import torch

from shotcast.errors import ConfigError
from shotcast.kernels.triton.gemm import GemmConfig
from shotcast.overlap.products import LibraryProduct, ShapedProduct

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


def test_a_carve_out_ends_with_an_exception() -> None:
    library = torch.backends.cuda.preferred_blas_library()
    with contextlib.suppress(KeyError), LibraryProduct(24).scope(torch.device("cuda", 0)):
        assert torch._C._get_sm_carveout_experimental() == 24
        raise KeyError
    assert torch._C._get_sm_carveout_experimental() is None
    assert torch.backends.cuda.preferred_blas_library() == library


def test_a_carved_product_in_a_graph_leaves_sms() -> None:
    a, b = operands(4096, 4096, 4096)
    product = LibraryProduct(24)
    exact = product(a, b)
    out = torch.empty_like(exact)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product(a, b, out)
    assert torch._C._get_sm_carveout_experimental() is None
    graph.replay()
    assert torch.equal(out, exact)
