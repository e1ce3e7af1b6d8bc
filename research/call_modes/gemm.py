"""The matrix product that a GPU computes between two collectives, such as before an all-reduce in decoding."""

from __future__ import annotations

import itertools
import math

import torch

WORK_BETWEEN = ("gemm",)
_WEIGHT_BYTES = 256 << 20
_MOST_WEIGHTS = 16


class MeasuredGemm:
    """``out = a x w``, [tokens, inner] x [inner, hidden], into the tensor that the next collective reads.

    Several weight matrices take turns, so they are read from memory like the layers of a model, not from a cache. They
    hold 256 MiB in total, in at most 16 matrices. The default ``inner`` is hidden / ranks: the output projection of an
    attention whose heads are divided among the ranks.
    """

    def __init__(self, tokens: int, inner: int, hidden: int, dtype: torch.dtype, device: torch.device):
        self.name = f"gemm {inner}x{hidden}"
        self._shape = (tokens, hidden)
        generator = torch.Generator(device).manual_seed(1)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            values = torch.empty(rows, columns, dtype=torch.float32, device=device)
            return values.uniform_(-1.0, 1.0, generator=generator).to(dtype)

        self._a = matrix(tokens, inner)
        count = min(_MOST_WEIGHTS, max(1, math.ceil(_WEIGHT_BYTES / (inner * hidden * dtype.itemsize))))
        self._weights = itertools.cycle([matrix(inner, hidden) for _ in range(count)])

    def __call__(self, out: torch.Tensor) -> None:
        """Fill ``out``, a contiguous tensor of tokens x hidden elements. Allocates nothing."""
        torch.mm(self._a, next(self._weights), out=out.view(self._shape))
