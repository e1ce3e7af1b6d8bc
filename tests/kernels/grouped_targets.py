"""Ranks of test_grouped_gemm.py: matrices in groups, multiplied and dequantized under the interpreter."""

from __future__ import annotations

from typing import NamedTuple

import torch

from shotcast.kernels.triton import grouped_gemm, grouped_gemv
from shotcast.kernels.triton.dequantize import dequantize
from shotcast.kernels.triton.grouped_gemm import GroupedGemmConfig
from shotcast.kernels.triton.grouped_gemv import GroupedGemvConfig
from shotcast.layers.linear import Linear
from shotcast.layers.quantized import GroupedRows, pack


class Case(NamedTuple):
    """A product: its sizes, the inputs of a group, whether weights are of 4 bits (else FP8), and how it is launched."""

    rows: int
    inputs: int
    outputs: int
    group: int
    int4: bool
    dtype: str
    biased: bool
    config: GroupedGemmConfig | GroupedGemvConfig | None = None
    gated: bool = False
    dead: bool = False  # all codes are those of zero


def made(case: Case) -> tuple[GroupedRows, torch.Tensor]:
    """Return a random matrix, and its values in float64."""
    numbers = torch.Generator().manual_seed(case.inputs + case.outputs)
    groups = case.inputs // case.group
    scales = torch.rand(groups, case.outputs, generator=numbers) * 0.1 + 0.01
    if not case.int4:
        stored = torch.randn(case.outputs, case.inputs, generator=numbers).to(torch.float8_e4m3fn)
        exact = stored.double() * scales.double().t().repeat_interleave(case.group, 1)
        return GroupedRows(stored, scales, None, case.group), exact
    codes = torch.randint(16, (case.outputs, case.inputs), generator=numbers)
    zeros = torch.randint(17, (groups, case.outputs), generator=numbers, dtype=torch.uint8)
    if case.dead:
        codes = (zeros.clamp_(max=15)).long().t().repeat_interleave(case.group, 1)
    scales = scales.half()
    exact = (codes - zeros.long().t().repeat_interleave(case.group, 1)).double()
    exact *= scales.double().t().repeat_interleave(case.group, 1)
    return GroupedRows(pack(codes), scales, zeros, case.group), exact


def excess(case: Case, device: str = "cpu") -> tuple[float, float]:
    """Return the largest errors of a product and of the dequantized matrix, relative to their bounds."""
    dtype: torch.dtype = getattr(torch, case.dtype)
    matrix, exact = made(case)
    matrix = matrix._make(part.to(device) if isinstance(part, torch.Tensor) else part for part in matrix)
    numbers = torch.Generator().manual_seed(case.rows)
    x = torch.randn(case.rows, case.inputs, generator=numbers).to(dtype)
    bias = torch.randn(case.outputs, generator=numbers).to(dtype) if case.biased else None
    counters = grouped_gemm.new_counters(matrix.values)
    weight, *others = matrix
    there = None if bias is None else bias.to(device)

    def multiply() -> torch.Tensor:
        given = *others, there, case.gated, case.config
        if case.rows == 1 and not isinstance(case.config, GroupedGemmConfig):
            return grouped_gemv.linear(x.to(device), weight, *given)
        return grouped_gemm.linear(x.to(device), weight, counters, *given)

    found = [multiply() for _ in range(2)]
    assert torch.equal(*found)
    assert not counters.any()
    wanted, size = x.double() @ exact.t(), x.double().abs() @ exact.abs().t()
    if case.dead:  # docs/reference/numerics.md
        size = x.double().abs() @ (64 * matrix.scales.cpu().double().t().repeat_interleave(case.group, 1)).t()
    if bias is not None:
        wanted += bias.double()
    half = torch.finfo(dtype).eps / 2
    if case.gated:
        gate, up = wanted.chunk(2, 1)
        wanted = gate * gate.sigmoid() * up
        size = size[:, : case.outputs // 2] * (1 + up.abs()) + size[:, case.outputs // 2 :] * (1 + gate.abs())
    bound = size * (case.inputs * 2**-24) + wanted.abs() * half + 1e-7
    product = ((found[0].cpu().double() - wanted).abs() / bound).nan_to_num(nan=torch.inf).max()
    whole = dequantize(*matrix, dtype).cpu().double()
    off = (whole - exact).abs() / (exact.abs() * (half + 2**-22) + torch.finfo(dtype).tiny)
    return float(product), float(off.nan_to_num(nan=torch.inf).max())


def excesses(cases: list[Case]) -> list[tuple[float, float]]:
    return [excess(case) for case in cases]


def layers(cases: list[Case]) -> list[tuple[float, bool]]:
    """Return how far a GPU's layer is off relative to its largest output, and whether the kernel multiplied."""
    found = []
    for case in cases:
        matrix, exact = made(case)
        layer = Linear(matrix)
        layer._counters = grouped_gemm.new_counters(matrix.values)
        assert not layer.takes_float8(case.rows)
        x = torch.randn(case.rows, case.inputs, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        wanted = x.double() @ exact.t()
        out = layer._by_own_kernel(x, gated=False)
        by_kernel = out is not None
        assert (layer._by_own_kernel(x, gated=True) is not None) == by_kernel
        out = layer._by_library(x) if out is None else out
        found.append((float((out.double() - wanted).abs().max() / wanted.abs().max()), by_kernel))
    return found
