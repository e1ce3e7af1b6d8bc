"""Products of few rows, rows gated and quantised, and FP8 products on a real GPU. Run with ``pytest -m gpu``."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gemv_targets import SkinnyGemmCase, excess, operands, skinny_gemm_excess

from shotcast.kernels.triton import activations, batch_invariant_gemm, gemv
from shotcast.layers import quantized
from shotcast.layers.linear import Linear
from shotcast.layers.quantized import Float8Rows

pytestmark = pytest.mark.gpu
SHAPES = [(48, 6), (1024, 4096), (4096, 1536), (3584, 4098), (13312, 514)]
KINDS = [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)]


@pytest.mark.parametrize(("dtype", "fp8"), KINDS, ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_products(rows: int, dtype: torch.dtype, fp8: bool) -> None:
    for (inputs, outputs), gated in itertools.product(SHAPES, (False, True)):
        given = operands(rows, inputs, outputs, dtype, fp8, rows % 2 == 0, "cuda")
        assert excess(gemv.linear(*given, gated), *given, gated) <= 1, (inputs, outputs, gated)


def skinny_gemm_off(case: SkinnyGemmCase) -> float:
    """Return the excess; tensor cores of compute capability 9 sum products of float8 in about 14 bits."""
    return skinny_gemm_excess(case, "cuda", 2**-11 / case[1] if case[3] == "float8" else 2**-24)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8"])
@pytest.mark.parametrize("rows", [1, 3, 8, 17, 33, 64])
def test_skinny_products(rows: int, dtype: str) -> None:
    for (inputs, outputs), gated in itertools.product(SHAPES, (False, True)):
        case = rows, inputs, outputs, dtype, rows % 2 == 0, gated, None
        assert skinny_gemm_off(case) <= 1, case


@pytest.mark.parametrize("rows", [1, 8])
def test_chained_in_a_graph(rows: int) -> None:
    """Check that each product reads the results of the one before, though it starts before that one ends.

    The bits are the same each time. Three matrices take turns, so that the counters of one product were used shortly
    before.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    layers = [Linear(torch.randn(2048, 2048, generator=generator, device="cuda").bfloat16() / 45) for _ in range(3)]
    x = torch.randn(rows, 2048, generator=generator, device="cuda").bfloat16()
    one_by_one = x
    for number in range(21):
        one_by_one = layers[number % 3](one_by_one)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = x
        for number in range(21):
            out = layers[number % 3](out)
    for _ in range(50):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, one_by_one)


@pytest.mark.parametrize("rows", [1, 17, 300])
def test_rows_between_products(rows: int) -> None:
    x = torch.randn(rows, 2 * 3584, device="cuda").bfloat16()
    gate, other = x.double().chunk(2, 1)
    exact = F.silu(gate) * other
    torch.testing.assert_close(activations.gate(x).double(), exact, rtol=2**-8, atol=1e-30)
    values, scale = activations.quantize(x, gated=True)
    bound = (exact.abs() / 16).maximum(scale.double() * 2**-10) * (1 + 2**-10)
    assert bool(((values.double() * scale - exact).abs() <= bound).all())


@pytest.mark.parametrize("rows", [1, 2, 3, 64, 65, 1000])
@pytest.mark.parametrize("biased", [False, True])
def test_fp8_layer(rows: int, biased: bool) -> None:
    """Check both paths, also given rows in FP8: the errors stay within the rounding of weights and rows."""
    generator = torch.Generator("cuda").manual_seed(rows)
    parts = [
        quantized.quantize(torch.randn(size, 4096, generator=generator, device="cuda").bfloat16()) for size in (512, 48)
    ]
    weight = Float8Rows(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    bias = torch.randn(560, generator=generator, device="cuda").bfloat16() if biased else None
    layer = Linear(weight, bias)
    x = torch.randn(rows, 4096, generator=generator, device="cuda").bfloat16()
    wide = weight.values.double() * weight.scale
    exact, size = x.double() @ wide.T, x.double().abs() @ wide.abs().T
    bound = size / 16 * (1 + 2**-6)
    if bias is not None:
        exact = exact + bias.double()
    bound += exact.abs() * 2**-8
    for given in (x, x.t().contiguous().t(), Float8Rows(*activations.quantize(x))):
        assert bool(((layer(given).double() - exact).abs() <= bound).all())
    gated = layer.gated(x)
    assert isinstance(gated, Float8Rows) == layer.takes_float8(rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 3072), (2048, 4096), (7168, 4096), (4096, 640), (528, 130)])
def test_rows_have_the_same_bits_in_every_batch(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """Columns are divided into parts for few outputs, and each number of rows takes a tile of its own."""
    x, weight, _, bias = operands(2048, inputs, outputs, dtype, False, True, "cuda")
    whole = batch_invariant_gemm.linear(x, weight, bias)
    assert excess(whole, x, weight, None, bias, False) <= 1
    for rows in (1, 2, 3, 16, 17, 64, 65, 128, 129, 512, 2047):
        first = 2048 - rows
        assert torch.equal(batch_invariant_gemm.linear(x[first:], weight, bias), whole[first:]), rows
    assert not batch_invariant_gemm.differs(weight)
