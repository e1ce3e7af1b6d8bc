"""Matrices as checkpoints store them: in GGUF blocks, in FP8, or in groups of codes that share a scale.

FP8 (e4m3) has one scale per output of the weights and per row of the other operand:

    row   ~ values * scale,   scale = max |row| / 448, at least 2^-126,   values = e4m3(row / scale)
    out   = round((x.values @ weight.values.T) * x.scale * weight.scale.T + bias)

Groups of inputs share a scale: value = (code - zero) * scale for 4-bit codes, or value = e4m3 * scale.

This is the only file that uses PyTorch's private ``_scaled_mm``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from shotcast.kernels.block_formats import BLOCKS


class BlockRows(NamedTuple):
    """A matrix [outputs, inputs] whose rows are sequences of blocks."""

    stored: torch.Tensor  # uint8 [outputs, bytes of the blocks of a row]
    kind: str  # the format, a key of ``BLOCKS``

    @property
    def shape(self) -> tuple[int, int]:
        values, nbytes = BLOCKS[self.kind]
        return self.stored.shape[0], self.stored.shape[1] // nbytes * values

    def values(self, dtype: torch.dtype, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values of ``rows`` [n], or of all rows, as [n, inputs]."""
        from shotcast.kernels.cpu.blocks import dequantize

        stored = self.stored if rows is None else self.stored[rows]
        return dequantize(stored, self.kind, self.shape[1]).to(dtype)


E4M3_MAX = 448.0
UNIT = 16
"""The numbers of inputs and outputs of a product must be multiples of this."""
_SMALLEST_SCALE = 2.0**-126
_AT_ONCE = 1 << 26
"""The number of values quantized at once, which bounds the float32 copies."""


class Float8Rows(NamedTuple):
    """Rows in FP8, approximately ``values * scale``."""

    values: torch.Tensor  # float8_e4m3fn [rows, columns]
    scale: torch.Tensor  # float32 [rows, 1]


def quantize(matrix: torch.Tensor) -> Float8Rows:
    """Quantize [rows, columns] to FP8 row by row, a slice at a time, on the device of ``matrix``."""
    rows, columns = matrix.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=matrix.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=matrix.device)
    step = max(1, _AT_ONCE // columns)
    for first in range(0, rows, step):
        part = matrix[first : first + step].float()
        row_scale = scale[first : first + step]
        torch.amax(part.abs(), 1, keepdim=True, out=row_scale)
        row_scale.div_(E4M3_MAX).clamp_(min=_SMALLEST_SCALE)
        # a quotient may be rounded to above 448, which the conversion would turn into NaN
        values[first : first + step] = (part / row_scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return Float8Rows(values, scale)


def scaled_matmul(x: Float8Rows, weight: Float8Rows, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` in bfloat16, accumulated in float32.

    Args:
        x: [rows, inputs].
        weight: [outputs, inputs]; both numbers are multiples of 16.
        bias: bfloat16 [outputs].
    """
    return torch._scaled_mm(
        x.values,
        weight.values.t(),
        scale_a=x.scale,
        scale_b=weight.scale.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )


LEAST_GROUP = 32
"""The smallest group size that kernels support."""
PER_WORD = 8
"""4-bit codes per word."""
_BLOCK = 128
"""The number of inputs whose codes share words."""


class GroupedRows(NamedTuple):
    """A matrix [outputs, inputs] in which each group of a row's inputs has a scale."""

    # int32 [outputs, words], as :func:`pack` makes it; or float8_e4m3fn [outputs, inputs]
    values: torch.Tensor
    scales: torch.Tensor  # [groups, outputs]
    zeros: torch.Tensor | None  # uint8 [groups, outputs]; None for FP8
    group: int  # the number of inputs of a group, which divides the inputs

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.scales.shape[0] * self.group


def common_group(group: int, columns: slice) -> int:
    """Return the largest group of a part's inputs that lies within a group of the matrix, wherever the part begins."""
    return math.gcd(group, columns.start, columns.stop)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit codes [outputs, inputs] into int32 words [outputs, 16 * blocks of 128 inputs], with zeros beyond the
    last input.

    Word w of a block has the codes of its inputs w, 16 + w, ..., 112 + w, the first in the lowest bits, so that 16
    words have 16 neighbors at each place, as tensor cores expect.
    """
    codes = torch.nn.functional.pad(codes.to(torch.int32), (0, -codes.shape[1] % _BLOCK))
    shifts = 4 * torch.arange(PER_WORD, dtype=torch.int32, device=codes.device)
    slices = codes.unflatten(1, (-1, PER_WORD, _BLOCK // PER_WORD))
    return (slices << shifts[:, None]).sum(2, dtype=torch.int32).flatten(1)
