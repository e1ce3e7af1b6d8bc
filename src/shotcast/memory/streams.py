"""The current CUDA stream, asked for at little cost. The only file that uses PyTorch's private way to it."""

from __future__ import annotations

import torch


def raw_stream(device_index: int) -> int:
    """Handle of the current stream of a GPU; a ``torch.cuda.Stream`` takes ten times as long to make."""
    return torch._C._cuda_getCurrentRawStream(device_index)
