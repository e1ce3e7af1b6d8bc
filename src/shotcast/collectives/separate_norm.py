"""Residual add and norm after a separate sum: the reference that the fused operations match."""

from __future__ import annotations

import torch

from shotcast.collectives import reference
from shotcast.device.triton import tiles
from shotcast.memory.operands import NormTensors
from shotcast.wire import RMS, Norm


def norm_sum(total: torch.Tensor, tensors: NormTensors, norm: Norm, by_kernel: bool) -> None:
    """Normalize ``total`` [rows, hidden] into ``tensors``, which have as many rows.

    ``by_kernel`` selects a GPU kernel (``kernels/triton/norm.py``; tensors must be aligned to 16 bytes); otherwise
    compiled host code runs (``transport/cpu/norm_rows.py``). Both give the bits of the fused operations. Rows too long
    for a kernel use plain torch.
    """
    if total.numel() == 0:
        return
    row_bytes = norm.hidden * total.element_size()
    if by_kernel and row_bytes <= 4 * tiles.MAX_ROW_WORDS:
        from shotcast.kernels.triton.norm import launch_norm_sum

        launch_norm_sum(total, tensors, norm)
        return
    if not by_kernel:
        from shotcast.transport.cpu import norm_rows

        norm_rows.norm_sum(total, tensors, norm)
        return
    new_residual = reference.add_residual(total, tensors.residual)
    if norm.kind == RMS:
        normed = reference.rms_norm(new_residual, tensors.weight, tensors.eps)
    else:
        normed = reference.layer_norm(new_residual, tensors.weight, tensors.bias, tensors.eps)
    if norm.quantize:
        assert tensors.quantized is not None
        assert tensors.scale is not None
        given = tensors.scale if norm.quantize == "static" else None
        quantized, scale = reference.quantize(normed, given if given is None else given.view(()))
        tensors.quantized.view(torch.uint8).copy_(quantized.view(torch.uint8))
        if given is None:
            tensors.scale.copy_(scale)
    if tensors.normed is not None:
        tensors.normed.copy_(normed)
    tensors.new_residual.copy_(new_residual)
