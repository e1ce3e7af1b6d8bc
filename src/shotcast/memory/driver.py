"""Functions of the CUDA driver that PyTorch does not offer, or only in a slow form."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch


@functools.cache
def library() -> Any:
    """Return the driver's library, which every machine with a GPU has."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _side_stream(device_index: int) -> ctypes.c_void_p:
    """Return a stream that waits for no other, not even for the default stream."""
    stream = ctypes.c_void_p()
    check(library().cuStreamCreate(ctypes.byref(stream), 1), "creating a stream")  # CU_STREAM_NON_BLOCKING
    return stream


def write_word(device: torch.device, address: int, word: int) -> None:
    """Store 64 bits in the memory of a GPU, beside kernels that may be running. Any thread may call it."""
    with torch.cuda.device(device):
        stream = _side_stream(torch.cuda.current_device())
        error = library().cuStreamWriteValue64_v2(stream, ctypes.c_uint64(address), ctypes.c_uint64(word), 0)
        check(error, "writing a word to a GPU")


def check(error: int, what: str) -> None:
    """Raise RuntimeError if a function of the driver returned an error; ``what`` names the operation."""
    if error:
        text = ctypes.c_char_p()
        library().cuGetErrorString(error, ctypes.byref(text))
        raise RuntimeError(f"{what} failed: {(text.value or b'unknown').decode()} (CUDA error {error})")
