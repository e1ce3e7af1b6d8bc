"""The current CUDA device and stream, at little cost. The only file that uses PyTorch's private functions for them.

Their public forms check and wrap, which takes a microsecond or so each, and an eager call needs several.
"""

from __future__ import annotations

import torch


def raw_stream(device_index: int) -> int:
    """Return the handle of the current stream of a GPU."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def current_device() -> int:
    """Return the index of the current GPU."""
    return torch._C._cuda_getDevice()


def capturing() -> bool:
    """Return whether the current stream is being captured in a graph."""
    return torch._C._cuda_isCurrentStreamCapturing()
