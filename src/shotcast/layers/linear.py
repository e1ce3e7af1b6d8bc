"""Linear layers, divided between the ranks of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from shotcast.layers.weights import Weights

_TURNED_FROM = 16
"""Rows of x from which, on a CPU in float32, ``weight @ x.T`` takes less time than ``x @ weight.T`` (MKL)."""


class Rows(NamedTuple):
    """A rank's rows of one of the matrices that a layer joins, whose ``name`` is without ".weight"."""

    name: str
    rows: range


class Linear:
    """``x @ weight.T + bias``; weight [outputs, inputs]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu":
            from shotcast.cpu import matvec

            if matvec.serves(x, self.weight):
                out = matvec.linear(x, self.weight)
                return (out if self.bias is None else out + self.bias).to(x.dtype)
            if x.shape[0] >= _TURNED_FROM and x.dtype == torch.float32:
                out = torch.mm(self.weight, x.t().contiguous()).t().contiguous()
                return out if self.bias is None else out.add_(self.bias)
        return F.linear(x, self.weight, self.bias)


def column_parallel(weights: Weights, parts: Sequence[Rows], bias: bool = False) -> Linear:
    """Several matrices as one, of which this rank has some rows each: every rank computes other outputs."""
    rows = [slice(part.rows.start, part.rows.stop) for part in parts]

    def joined(kind: str) -> torch.Tensor:
        return torch.cat([weights.take(f"{part.name}.{kind}", cut) for part, cut in zip(parts, rows, strict=True)])

    return Linear(joined("weight"), joined("bias") if bias else None)


def row_parallel(weights: Weights, name: str, columns: range, bias: bool = False, rank: int = 0) -> Linear:
    """This rank's columns: every rank computes a part of each output's sum. Rank 0 adds the bias."""
    matrix = weights.take(f"{name}.weight", None, slice(columns.start, columns.stop))
    return Linear(matrix, weights.take(f"{name}.bias") if bias and rank == 0 else None)
