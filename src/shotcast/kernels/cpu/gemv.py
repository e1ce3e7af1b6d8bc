"""Compiled matmuls of a few rows with a weight matrix: each weight is read once, at memory bandwidth.

They serve the decoding of small batches: BLAS libraries are built for large matrices and leave much of that bandwidth
unused. Each dot product is a single loop, which the compiler vectorizes.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import njit, types

from shotcast.device.cpu.compilation import keep_on_disk
from shotcast.device.cpu.threads import in_parallel

MAX_ROWS = {torch.float32: 4, torch.bfloat16: 2}
"""The largest number of rows of x for which this is clearly faster than PyTorch, by weight dtype."""
_THREADS_FROM_BYTES = 8 << 20
"""The smallest weight size for which a second thread saves more time than waking it costs."""

_X = types.Array(types.float32, 2, "C")
_BITS = types.Array(types.uint16, 2, "C")


FASTMATH = {"contract", "reassoc", "nsz"}


def _float32(x: Any, weight: Any, out: Any, first: int, stop: int) -> None:
    for output in range(first, stop):
        for row in range(x.shape[0]):
            total = np.float32(0.0)
            for i in range(weight.shape[1]):
                total += x[row, i] * weight[output, i]
            out[row, output] = total


def _bfloat16(x: Any, weight: Any, out: Any, first: int, stop: int) -> None:
    for output in range(first, stop):
        for row in range(x.shape[0]):
            total = np.float32(0.0)
            for i in range(weight.shape[1]):
                total += x[row, i] * np.uint32(np.uint32(weight[output, i]) << np.uint32(16)).view(np.float32)
            out[row, output] = total


_KINDS = {torch.float32: (_float32, _X), torch.bfloat16: (_bfloat16, _BITS)}


@functools.cache
def _compiled(dtype: torch.dtype) -> Any:
    function, weight = _KINDS[dtype]
    dispatcher = njit(nogil=True, error_model="numpy", fastmath=FASTMATH)(function)
    keep_on_disk(dispatcher)
    dispatcher.compile(types.void(_X, weight, _X, types.int64, types.int64))
    dispatcher.disable_compile()
    return dispatcher


def serves(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Check whether :func:`linear` supports these operands and is faster than PyTorch."""
    return x.device.type == "cpu" and x.shape[0] <= MAX_ROWS.get(weight.dtype, 0) and weight.is_contiguous()


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute ``x @ weight.T``, float32 [rows, outputs], summed in float32.

    Args:
        x: [rows, inputs], in the weight's dtype.
        weight: contiguous [outputs, inputs], float32 or bfloat16.
    """
    run = _compiled(weight.dtype)
    out = torch.empty(x.shape[0], weight.shape[0], device="cpu")
    bits = weight if weight.dtype == torch.float32 else weight.view(torch.uint16)
    arrays = x.float().contiguous().numpy(), bits.numpy(), out.numpy()
    parts = None if weight.numel() * weight.element_size() >= _THREADS_FROM_BYTES else 1
    in_parallel(lambda first, stop: run(*arrays, first, stop), weight.shape[0], parts)
    return out
