"""Tensors of a fused call other than its input."""

from __future__ import annotations

from typing import NamedTuple

import torch


class NormTensors(NamedTuple):
    """The tensors that the residual add and the norm after a sum read and write.

    R rows end up on this rank: all rows of ``x`` or, after a reduce-scatter, its share. A tensor that a plan's
    :class:`~shotcast.wire.Norm` does not ask for is None.

    Attributes:
        residual: [R, hidden], of the call's dtype.
        weight: [hidden], of the dtype that the plan's norm says.
        eps: added to the mean square, or to the variance.
        new_residual: [R, hidden], written: sum + residual, rounded. It may be ``residual`` itself.
        normed: [R, hidden] (the rows of all ranks, if they are gathered), written.
        quantized: like ``normed`` in float8_e4m3fn, written.
        scale: float32; one value, read (static), or [rows of quantized, 1], written (dynamic).
        bias: like ``weight``, of a LayerNorm; None for no bias.
    """

    residual: torch.Tensor
    weight: torch.Tensor
    eps: float
    new_residual: torch.Tensor
    normed: torch.Tensor | None = None
    quantized: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
