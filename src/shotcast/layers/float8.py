"""Products in FP8 (e4m3), with a scale for each output of the weights, and for each row that they are multiplied with.

    row   ~ values * scale,   scale = max |row| / 448, at least 2^-126,   values = e4m3(row / scale)
    out   = round((x.values @ weight.values.T) * x.scale * weight.scale.T + bias)

The only file that knows PyTorch's private ``_scaled_mm``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

E4M3_MAX = 448.0
UNIT = 16
"""Inputs and outputs of a product are multiples of this."""
_SMALLEST_SCALE = 2.0**-126
_AT_ONCE = 1 << 26
"""Values that are quantised at once, which bounds the float32 copies."""


class Float8Rows(NamedTuple):
    """Rows in FP8, about ``values * scale``.

    Attributes:
        values: float8_e4m3fn [rows, columns].
        scale: float32 [rows, 1].
    """

    values: torch.Tensor
    scale: torch.Tensor


def quantize(matrix: torch.Tensor) -> Float8Rows:
    """Rows of [rows, columns] in FP8, a slice at a time; where ``matrix`` is."""
    rows, columns = matrix.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=matrix.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=matrix.device)
    step = max(1, _AT_ONCE // columns)
    for first in range(0, rows, step):
        part = matrix[first : first + step].float()
        mine = scale[first : first + step]
        torch.amax(part.abs(), 1, keepdim=True, out=mine)
        mine.div_(E4M3_MAX).clamp_(min=_SMALLEST_SCALE)
        # a quotient may be rounded to above 448, which the conversion would make NaN
        values[first : first + step] = (part / mine).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return Float8Rows(values, scale)


def product(x: Float8Rows, weight: Float8Rows, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` in bfloat16, summed in float32.

    Args:
        x: [rows, inputs].
        weight: [outputs, inputs]; both are multiples of 16.
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
