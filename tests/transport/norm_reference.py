"""The results of the fused operations in plain torch and NumPy, with the order of the sums written out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

LANES = 32


class Normed(NamedTuple):
    new_residual: torch.Tensor
    normed: torch.Tensor
    quantized: torch.Tensor | None
    scale: torch.Tensor | None


def sum_of(row: np.ndarray) -> np.float32:
    """Add column c to partial sum c % 32, one after the other, and then the partial sums, halves onto halves."""
    partial = np.zeros(LANES, np.float32)
    for start in range(0, len(row), LANES):
        columns = row[start : start + LANES]
        partial[: len(columns)] = partial[: len(columns)] + columns
    while len(partial) > 1:
        half = len(partial) // 2
        partial = partial[:half] + partial[half:]
    return partial[0]


def means(rows: np.ndarray) -> np.ndarray:
    """Return the mean of each row."""
    return np.array([sum_of(row) for row in rows], np.float32).reshape(-1, 1) / np.float32(rows.shape[1])


def rms_normed(values: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return values * (np.float32(1) / np.sqrt(means(values * values) + np.float32(eps))) * weight


def layer_normed(values: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, eps: float) -> np.ndarray:
    """Subtract the mean, and what its rounding has left; the variance is that of the differences."""
    differences = values - means(values)
    rest = means(differences)
    variance = means(differences * differences) - rest * rest
    variance = np.where(variance < 0, np.float32(0), variance)
    normed = (differences - rest) * (np.float32(1) / np.sqrt(variance + np.float32(eps))) * weight
    return normed if bias is None else normed + bias


def quantize(normed: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes, and the scale: the given one, or one for each row."""
    value = normed.float()
    if scale is None:
        largest = torch.where(value.isnan(), 0.0, value.abs()).amax(-1, keepdim=True)
        scale = (largest / 448.0).clamp_min(2.0**-126)
    scaled = (value * (1.0 / scale)).clamp(-448.0, 448.0)
    quantized = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(scaled.isnan(), torch.full_like(quantized, 0x7F), quantized), scale


def reference(
    total: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    quantization: str,
    scale: torch.Tensor,
    kind: str = "rms",
    bias: torch.Tensor | None = None,
) -> Normed:
    """Return the outputs for total and residual: [rows, hidden], with total as rounded to the dtype."""
    dtype = total.dtype
    new_residual = (total.float() + residual.float()).to(dtype)
    with np.errstate(all="ignore"):
        values = new_residual.float().numpy()
        gain, shift = weight.float().numpy(), None if bias is None else bias.float().numpy()
        result = rms_normed(values, gain, eps) if kind == "rms" else layer_normed(values, gain, shift, eps)
        normed = torch.from_numpy(result).to(dtype)
    if not quantization:
        return Normed(new_residual, normed, None, None)
    quantized, scale = quantize(normed, scale if quantization == "static" else None)
    return Normed(new_residual, normed, quantized, scale)
