"""Matrix products in FP8 (e4m3), with one scale for each output of the weights and for each row of the other operand.

    row   ~ values * scale,   scale = max |row| / 448, at least 2^-126,   values = e4m3(row / scale)
    out   = round((x.values @ weight.values.T) * x.scale * weight.scale.T + bias)

This is the only file that uses PyTorch's private ``_scaled_mm``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

E4M3_MAX = 448.0
UNIT = 16
"""The numbers of inputs and outputs of a product must be multiples of this."""
_SMALLEST_SCALE = 2.0**-126
_AT_ONCE = 1 << 26
"""The number of values that are quantized at once, which bounds the float32 copies."""


class Float8Rows(NamedTuple):
    """Rows in FP8, approximately ``values * scale``."""

    values: torch.Tensor  # float8_e4m3fn [rows, columns]
    scale: torch.Tensor  # float32 [rows, 1]

    def to(self, device: torch.device) -> Float8Rows:
        """Return the rows on a device."""
        return Float8Rows(self.values.to(device), self.scale.to(device))

    @property
    def nbytes(self) -> int:
        """The size of both tensors."""
        return self.values.nbytes + self.scale.nbytes


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
    """Return ``x @ weight.T + bias`` in bfloat16, summed in float32.

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
