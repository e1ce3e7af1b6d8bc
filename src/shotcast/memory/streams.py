"""The current CUDA device and stream, and captures, at little cost.

The only file that uses PyTorch's private functions for them. Their public forms check and wrap, which takes a
microsecond or so each, and an eager call needs several.
"""

from __future__ import annotations

import ctypes

import torch

from shotcast.memory import driver


def raw_stream(device_index: int) -> int:
    """Return the handle of the current stream of a GPU."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the current stream of a GPU, which can wait for others; this takes longer than its handle."""
    return torch.cuda.current_stream(device)


def current_device() -> int:
    """Return the index of the current GPU."""
    return torch._C._cuda_getDevice()


def capturing() -> bool:
    """Return whether the current stream is being captured in a graph."""
    return torch._C._cuda_isCurrentStreamCapturing()


def capture_id(stream: torch.cuda.Stream) -> int:
    """Return the number of the graph capture of ``stream``, 0 for none. PyTorch has no public function for it."""
    status, number = ctypes.c_int(0), ctypes.c_ulonglong(0)
    none = ctypes.c_void_p(None)
    error = driver.library().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream.cuda_stream), ctypes.byref(status), ctypes.byref(number), none, none, none
    )
    driver.check(error, "asking for the capture of a stream")
    return number.value if status.value == 1 else 0
