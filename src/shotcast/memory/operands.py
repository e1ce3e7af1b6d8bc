"""Tensors of a fused call beside its input."""

from __future__ import annotations

from typing import NamedTuple

import torch


class NormTensors(NamedTuple):
    """What the residual add and RMSNorm after a sum read and write.

    R rows end up on this rank: all of ``x``'s, or after a reduce-scatter its share. What a plan's
    :class:`~shotcast.wire.Norm` does not ask for is None.

    Attributes:
        residual: [R, hidden], dtype of the call.
        weight: [hidden], dtype of the call.
        eps: added to the mean square.
        new_residual: [R, hidden], written: sum + residual, rounded. May be ``residual`` itself.
        normed: [R, hidden] (all ranks' rows, where they are gathered), written.
        quantized: as ``normed``, float8_e4m3fn, written.
        scale: float32; one value, read (static), or [rows of quantized, 1], written (dynamic).
    """

    residual: torch.Tensor
    weight: torch.Tensor
    eps: float
    new_residual: torch.Tensor
    normed: torch.Tensor | None = None
    quantized: torch.Tensor | None = None
    scale: torch.Tensor | None = None
