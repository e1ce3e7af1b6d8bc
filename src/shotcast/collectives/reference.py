"""What the own algorithms compute, bit for bit, in plain torch on one process: what tests compare with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shotcast import wire

E4M3_MAX = 448.0
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def ordered_sum(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """((+0.0 + x_0) + x_1) + ... in float32, rounded once to the dtype: one-shot and two-shot."""
    total = torch.zeros_like(xs[0], dtype=torch.float32)
    for x in xs:
        total = total + x.float()
    return total.to(xs[0].dtype)


def ring_sum(xs: Sequence[torch.Tensor], owner: int) -> torch.Tensor:
    """A slice that ends at ``owner``: x_{owner+1}, then each next rank's added, rounded to the dtype at each hop."""
    world_size = len(xs)
    total = ordered_sum([xs[(owner + 1) % world_size]])
    for step in range(2, world_size + 1):
        total = (total.float() + xs[(owner + step) % world_size].float()).to(total.dtype)
    return total


def through_fp8(x: torch.Tensor) -> torch.Tensor:
    """What becomes of float32 values [n] that travel as e4m3 with a scale a block (FP8 transport)."""
    rows = torch.nn.functional.pad(x, (0, -x.numel() % wire.FP8_BLOCK)).view(-1, wire.FP8_BLOCK)
    largest = rows.abs().amax(1, keepdim=True)
    size, limit = largest.clamp_min(2.0**-100), torch.full_like(largest, wire.FP8_LARGEST)
    scale = torch.where(largest.isfinite(), size / limit, torch.nan)
    return ((rows * (limit / size)).to(torch.float8_e4m3fn).float() * scale).view(-1)[: x.numel()]


def fp8_sum(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """A slice by ``two_shot_fp8``: quantised parts added in float32, in rank order, the sum quantised and rounded."""
    total = torch.zeros_like(xs[0], dtype=torch.float32)
    for x in xs:
        total = total + through_fp8(x.float())
    return through_fp8(total).to(xs[0].dtype)


def all_reduce(xs: Sequence[torch.Tensor], algorithm: str) -> torch.Tensor:
    """The all-reduce of every rank's tensor ``xs[r]`` by ``one_shot``, ``two_shot``, ``two_shot_fp8`` or ``ring``."""
    if algorithm not in ("ring", "two_shot_fp8"):
        return ordered_sum(xs)
    # on a CPU, where a division by a number is one
    flat = [x.reshape(-1).cpu() if algorithm == "two_shot_fp8" else x.reshape(-1) for x in xs]
    item = flat[0].element_size()
    width = wire.slice_bytes(flat[0].numel() * item, len(xs)) // item
    slices = [[x[j * width : (j + 1) * width] for x in flat] for j in range(len(xs))]
    parts = [fp8_sum(part) if algorithm == "two_shot_fp8" else ring_sum(part, j) for j, part in enumerate(slices)]
    return torch.cat(parts).reshape(xs[0].shape).to(xs[0].device)


def reduce_scatter(xs: Sequence[torch.Tensor], rank: int, algorithm: str) -> torch.Tensor:
    """Rank ``rank``'s part of the reduce-scatter of [N * k, ...] tensors by ``one_shot`` or ``ring``."""
    parts = [x.chunk(len(xs))[rank] if x.shape[0] else x for x in xs]
    return ring_sum(parts, rank) if algorithm == "ring" else ordered_sum(parts)


def add_residual(total: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Sum and residual in float32, rounded once: the new residual of the fused operations."""
    return (total.float() + residual.float()).to(total.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of each row in float32, rounded once. Kernels add squares in orders of their own: last bits differ."""
    value = x.float()
    scale = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return (value * scale * weight.float()).to(x.dtype)


def quantize(normed: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 (float8_e4m3fn) of rows as rounded to their dtype, and the scale: ``normed`` is about ``quantized * scale``.

    ``quantized = e4m3(clamp(normed * (1 / scale), -448, 448))``, all in float32, to nearest even; NaN stays NaN.
    Without ``scale``, each row has one of its own: max |row| / 448 over all that is no NaN, but at least 2^-126, the
    smallest whose inverse is finite; so a row of zeros is zeros.
    """
    value = normed.float()
    if scale is None:
        largest = torch.where(value.isnan(), 0.0, value.abs()).amax(-1, keepdim=True)
        # by a tensor: on a GPU, PyTorch divides by a number by multiplying with its inverse
        scale = (largest / torch.full_like(largest, E4M3_MAX)).clamp_min(SMALLEST_SCALE)
    return (value * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale
