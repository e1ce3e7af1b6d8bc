"""Ranks of test_activations.py: rows gated and quantised by the kernel under the interpreter."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from shotcast.kernels.activation import Activation
from shotcast.kernels.triton import activations

E4M3_MAX = 448.0


def both(
    shapes: list[tuple[int, int]], dtype_name: str, size: float, activation: Activation
) -> tuple[float, float, float]:
    """Return the errors of ``gate``, ``quantize`` and the two together, each relative to its bound."""
    dtype = getattr(torch, dtype_name)
    worst = torch.zeros(3, dtype=torch.float64)
    for rows, width in shapes:
        x = (torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(rows * width)) * size).to(dtype)
        gate, other = x.double().chunk(2, 1)
        exact = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * other
        bound = exact.abs() * (torch.finfo(dtype).eps / 2 + 2**-20) + torch.finfo(dtype).tiny
        if activation == "gelu_tanh":  # 1 + tanh cancels for negative gates
            bound += (gate * other).abs() * 2**-22
        off_by = [((activations.gate(x, activation).double() - exact).abs() / bound).max()]
        for gated, wanted in ((False, x.double()), (True, exact)):
            quantized, scale = activations.quantize(x, gated, activation)
            assert quantized.dtype == torch.float8_e4m3fn
            assert scale.shape == (rows, 1)
            largest = wanted.abs().amax(1, keepdim=True)
            torch.testing.assert_close(scale.double(), (largest / E4M3_MAX).clamp(min=2**-126), rtol=2**-20, atol=0.0)
            off = (quantized.double() * scale.double() - wanted).abs()
            # half a unit in the last of four binary places, or half the smallest number
            bound = (wanted.abs() / 16).maximum(scale.double() * 2**-10) * (1 + 2**-10)
            off_by.append((off / bound).max())
        worst = torch.maximum(worst, torch.stack(off_by))  # NaN where either has one; max() would skip it
    gate_off, quantized_off, both_off = worst.tolist()
    return gate_off, quantized_off, both_off


def edges() -> list[list[float]]:
    """Quantise to FP8 and back rows of zeros, with the largest and the least value, with a NaN; and gates beyond exp's
    range."""
    x = torch.tensor([[0.0, -0.0, 0.0, 0.0], [448.0, -448.0, 1.0, 2.0**-9], [float("nan"), 448.0, 0.0, 7.0]])
    quantized, scale = activations.quantize(x)
    steep = activations.gate(torch.tensor([[-200.0, 200.0, 1.0, 1.0]]))
    return [*(quantized.float() * scale).tolist(), steep[0].tolist()]
