"""Functions of the CUDA driver that PyTorch does not offer, or only in a slow form."""

from __future__ import annotations

import ctypes
import functools
from typing import Any


@functools.cache
def library() -> Any:
    """Return the driver's library, which every machine with a GPU has."""
    return ctypes.CDLL("libcuda.so.1")


def check(error: int, what: str) -> None:
    """Raise RuntimeError if a function of the driver returned an error; ``what`` names the operation."""
    if error:
        text = ctypes.c_char_p()
        library().cuGetErrorString(error, ctypes.byref(text))
        raise RuntimeError(f"{what} failed: {(text.value or b'unknown').decode()} (CUDA error {error})")
