"""The CUDA driver's own functions, where PyTorch has no way or a slow one."""

from __future__ import annotations

import ctypes
import functools
from typing import Any


@functools.cache
def library() -> Any:
    """The driver's library; it is there wherever a GPU is."""
    return ctypes.CDLL("libcuda.so.1")


def check(error: int, what: str) -> None:
    """Raise RuntimeError if a function of the driver, which was to do ``what``, returned an error."""
    if error:
        text = ctypes.c_char_p()
        library().cuGetErrorString(error, ctypes.byref(text))
        raise RuntimeError(f"{what} failed: {(text.value or b'unknown').decode()} (CUDA error {error})")
