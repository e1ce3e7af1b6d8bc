"""Sums and norms of the numerics contract, bit for bit, and bounds of lossy sums, in plain torch on one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shotcast import wire
from shotcast.hardware.nodes import NodeLayout, folded

SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def ordered_sum(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute ((+0.0 + x_0) + x_1) + ... in float32, rounded once to the dtype: one-shot and two-shot."""
    total = torch.zeros_like(xs[0], dtype=torch.float32)
    for x in xs:
        total = total + x.float()
    return total.to(xs[0].dtype)


def tree_sum(xs: Sequence[torch.Tensor], layout: NodeLayout) -> torch.Tensor:
    """Add each node's ranks in order in float32, add the nodes' sums in the tree over nodes, and round once.

    The tree comes from :func:`shotcast.hardware.nodes.folded`. On one node it is :func:`ordered_sum`.
    """
    sums = [ordered_sum([xs[rank].float() for rank in members]) for members in layout.members]
    pairs = folded(layout.nodes)
    leaves = [sums[2 * i] + sums[2 * i + 1] for i in range(pairs)] + sums[2 * pairs :]
    while len(leaves) > 1:
        leaves = [left + right for left, right in zip(leaves[::2], leaves[1::2], strict=True)]
    return leaves[0].to(xs[0].dtype)


def fp8_error_bound(xs: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the error bound of an FP8 sum of float64 ``xs``, beyond the rounding of the dtype.

    Each part, and their sum, is rounded to e4m3 with the scale of its block; ``docs/reference/numerics.md`` derives the
    bound, which is applied here with the overall largest value.
    """
    parts, total = torch.zeros((), device="cpu"), torch.zeros((), device="cpu")
    for x in xs:
        parts, total = parts + _e4m3_error(x.abs()), total + x
    return parts + _e4m3_error(total.abs() + parts)


def rounded_nodes_error_bound(xs: Iterable[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the error bound of a 16-bit NVRAR sum of float64 ``xs``, beyond the rounding of the dtype.

    It is the bound of ``docs/reference/numerics.md`` for any number of nodes. Without ``dtype`` it is the bound of
    bfloat16, which also covers float16.
    """
    unit = torch.finfo(torch.bfloat16 if dtype is None else dtype).eps / 2
    magnitude, ranks = torch.zeros((), device="cpu"), 0
    for x in xs:
        magnitude, ranks = magnitude + x.abs(), ranks + 1
    return (unit + ranks * 2.0**-23) * magnitude


def _e4m3_error(values: torch.Tensor) -> torch.Tensor:
    """Return the error of non-negative values after rounding to e4m3, scaled so that the largest is 448."""
    return 1.001 * torch.maximum(values / 16, values.max() / (448 * 1024))


def add_residual(total: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Add sum and residual in float32, rounded once: the new residual of the fused operations."""
    return (total.float() + residual.float()).to(total.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute the RMSNorm of each row in float32, rounded once. Kernels add squares in a different order."""
    value = x.float()
    scale = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return (value * scale * weight.float()).to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Compute the LayerNorm of each row in float32, rounded once. Kernels add in a different order."""
    value = x.float()
    value = value - value.mean(-1, keepdim=True)
    value = value - value.mean(-1, keepdim=True)  # what rounding left of the mean
    normed = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (normed if bias is None else normed + bias.float()).to(x.dtype)


def quantize(normed: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows, rounded to their dtype, to FP8 (float8_e4m3fn): ``normed`` is about ``quantized * scale``.

    ``quantized = e4m3(clamp(normed * (1 / scale), -448, 448))``, all in float32, to nearest even; NaN stays NaN.
    Without ``scale``, each row gets a scale: max |row| / 448 ignoring NaN, but at least 2^-126, the smallest with a
    finite inverse. So a row of zeros stays zeros.
    """
    value = normed.float()
    if scale is None:
        largest = torch.where(value.isnan(), 0.0, value.abs()).amax(-1, keepdim=True)
        # by a tensor: on a GPU, PyTorch divides by a number by multiplying with its inverse
        scale = (largest / torch.full_like(largest, wire.FP8_LARGEST)).clamp_min(SMALLEST_SCALE)
    return (value * (1.0 / scale)).clamp(-wire.FP8_LARGEST, wire.FP8_LARGEST).to(torch.float8_e4m3fn), scale
