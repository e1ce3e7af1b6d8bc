"""What CUDA device and stream are current, asked for at little cost. The only file that uses PyTorch's private ways.

Their public forms check and wrap, for a microsecond or so each; an eager call makes several such questions.
"""

from __future__ import annotations

import torch


def raw_stream(device_index: int) -> int:
    """Handle of the current stream of a GPU."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def current_device() -> int:
    """Index of the current GPU."""
    return torch._C._cuda_getDevice()


def capturing() -> bool:
    """Whether the current stream is being captured in a graph."""
    return torch._C._cuda_isCurrentStreamCapturing()
