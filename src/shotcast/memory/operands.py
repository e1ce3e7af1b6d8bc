"""Tensors of a fused call other than its input."""

from __future__ import annotations

from typing import NamedTuple

import torch


class NormTensors(NamedTuple):
    """The tensors that the residual add and the norm after a sum read and write.

    ``x`` has R rows. Tensors that a plan's :class:`~shotcast.wire.Norm` does not request are None.
    """

    residual: torch.Tensor  # [R, hidden], of the call's dtype
    weight: torch.Tensor  # [hidden], of the dtype that the plan's norm says
    eps: float  # added to the mean square, or to the variance
    new_residual: torch.Tensor  # [R, hidden], written: sum + residual, rounded. It may be `residual` itself
    normed: torch.Tensor | None = None  # [R, hidden], written
    quantized: torch.Tensor | None = None  # like `normed` in float8_e4m3fn, written
    scale: torch.Tensor | None = None  # float32; one value, read (static), or [R, 1], written (dynamic)
    bias: torch.Tensor | None = None  # like `weight`, of a LayerNorm; None for no bias
