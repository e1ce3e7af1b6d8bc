"""Ranks of test_gemv.py and test_skinny_gemm.py: products by the interpreted kernels, compared with float64."""

from __future__ import annotations

from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812

from shotcast.device.triton.intrinsics import shared_memory_per_sm
from shotcast.kernels.triton import batch_invariant_gemm, gemv, skinny_gemm
from shotcast.kernels.triton.gemv import GemvConfig
from shotcast.kernels.triton.skinny_gemm import SkinnyGemmConfig

Case = tuple[int, int, int, str, bool, bool, bool, GemvConfig | None]
"""Rows, inputs, outputs, dtype, FP8 weights, bias, gated, launch."""


def operands(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, fp8: bool, biased: bool, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Make x, weight, scale and bias."""
    generator = torch.Generator().manual_seed(rows * inputs + outputs)
    x = torch.randn(rows, inputs, generator=generator).to(device, dtype)
    # sums of about 1, so that none leaves the range of float16 when it is gated
    weight = torch.randn(outputs, inputs, generator=generator) / (1 if fp8 else inputs**0.5)
    scale = (torch.rand(outputs, generator=generator) + 0.5).to(device) if fp8 else None
    bias = torch.randn(outputs, generator=generator).to(device, dtype) if biased else None
    return x, weight.to(device, torch.float8_e4m3fn if fp8 else dtype), scale, bias


def excess(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    gated: bool,
    x_scale: torch.Tensor | None = None,
    summed_in: float = 2**-24,
) -> float:
    """Return the largest error relative to the bound for sums rounded by ``summed_in`` at each step, then once."""
    exact, size = (multiply(x.double(), weight.double()) for multiply in (_product, _size))
    if scale is not None:
        exact, size = exact * scale.double(), size * scale.double()
    if x_scale is not None:
        exact, size = exact * x_scale.double(), size * x_scale.double()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    bound = size * x.shape[1] * summed_in
    if gated:
        (gate, other), (gate_off, other_off) = exact.chunk(2, 1), bound.chunk(2, 1)
        exact = F.silu(gate) * other
        # the slope of silu is at most 1.1; exponential and division are good to a few parts in 2^22
        bound = 1.1 * gate_off * (other.abs() + other_off) + gate.abs() * other_off + exact.abs() * 2**-20
    bound = bound + exact.abs() * torch.finfo(out.dtype).eps / 2 + 1e-7
    assert out.shape == exact.shape
    assert out.dtype == (x.dtype if x_scale is None else torch.bfloat16)
    return float(((out.double() - exact).abs() / bound).max())


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.T


def _size(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.abs() @ weight.abs().T


def products(cases: list[Case]) -> list[float]:
    """Return :func:`excess` of each case."""
    found = []
    for rows, inputs, outputs, dtype, fp8, biased, gated, config in cases:
        given = operands(rows, inputs, outputs, getattr(torch, dtype), fp8, biased, "cpu")
        found.append(excess(gemv.linear(*given, gated, config), *given, gated))
    return found


SkinnyGemmCase = tuple[int, int, int, str, bool, bool, SkinnyGemmConfig | None]
"""Rows, inputs, outputs, dtype ("float8": of x and weights, with scales), bias, gated, launch."""


def skinny_gemm_excess(case: SkinnyGemmCase, device: str, summed_in: float = 2**-24) -> float:
    """Return :func:`excess` of two products that use the same counters."""
    rows, inputs, outputs, name, biased, gated, config = case
    dtype = torch.bfloat16 if name == "float8" else getattr(torch, name)
    x, weight, scale, bias = operands(rows, inputs, outputs, dtype, name == "float8", biased, device)
    x_scale = None
    if name == "float8":
        x = x.to(torch.float8_e4m3fn)
        x_scale = (torch.rand(rows, 1, generator=torch.Generator().manual_seed(rows)) + 0.5).to(device)
    counters = skinny_gemm.new_counters(weight)
    made = [skinny_gemm.linear(x, weight, counters, x_scale, scale, bias, gated, config) for _ in range(2)]
    assert torch.equal(*made)
    assert not counters.any()
    return excess(made[0], x, weight, scale, bias, gated, x_scale, summed_in)


def skinny_gemm_results(cases: list[SkinnyGemmCase]) -> list[float]:
    return [skinny_gemm_excess(case, "cpu") for case in cases]


def batch_invariant_results(cases: list[tuple[int, int, int, str, bool, int]]) -> list[tuple[float, int]]:
    """Return :func:`excess` of products of rows, inputs, outputs, a dtype, whether there is a bias, and SMs, and the
    number of parts."""
    found = []
    for rows, inputs, outputs, name, biased, sms in cases:
        x, weight, _, bias = operands(rows, inputs, outputs, getattr(torch, name), False, biased, "cpu")
        with mock.patch.object(batch_invariant_gemm, "num_sms", return_value=sms):
            made = batch_invariant_gemm.linear(x, weight, bias)
        config = skinny_gemm.choose_config(outputs, inputs, 2, 1, sms, shared_memory_per_sm(x.device))
        found.append((excess(made, x, weight, None, bias, False), config.split_k))
    return found
