"""Linear layers, divided between the ranks of a stage."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from shotcast.errors import ConfigError
from shotcast.kernels.activation import Activation
from shotcast.layers import quantized
from shotcast.layers.quantized import BlockRows, Float8Rows, GroupedRows
from shotcast.layers.weights import Matrix, Weights


class RowShard(NamedTuple):
    """A rank's rows of one of the matrices that a layer joins. ``name`` excludes ".weight"."""

    name: str
    rows: range


class Linear:
    """A linear layer: ``x @ weight.T + bias``.

    With FP8 weights (on CUDA), x is multiplied unquantized if it has few rows, and in FP8 otherwise.

    Args:
        weight: [outputs, inputs], in FP8 (on CUDA), or as a checkpoint stores it; on CPUs, rows in several formats too.
        bias: [outputs].
    """

    def __init__(self, weight: Matrix | list[BlockRows], bias: torch.Tensor | None = None):
        self._scale: torch.Tensor | None = None
        self._grouped = weight if isinstance(weight, GroupedRows) else None
        parts = [weight] if isinstance(weight, BlockRows) else weight if isinstance(weight, list) else []
        if isinstance(weight, GroupedRows):
            weight = weight.values
        elif isinstance(weight, BlockRows | list):
            weight = parts[0].stored
        elif isinstance(weight, Float8Rows):
            weight, self._scale = weight
        self.weight, self.bias = weight, bias
        self._on_cpu = _product_on_cpu(weight, parts, bias) if weight.device.type == "cpu" else None
        self._counters: torch.Tensor | None = None
        if weight.device.type == "cuda":
            from shotcast.kernels.triton import grouped_gemm, skinny_gemm

            self._counters = (skinny_gemm if self._grouped is None else grouped_gemm).new_counters(weight)
        if self._scale is not None and any(size % quantized.UNIT for size in self.weight.shape):
            raise ConfigError(
                f"FP8 needs matrices whose sides are multiples of {quantized.UNIT}; a rank's part of this one is "
                f"{list(self.weight.shape)}"
            )

    def takes_float8(self, rows: int) -> bool:
        """Return whether an x of ``rows`` rows is multiplied in FP8, so that a caller may pass it quantized."""
        if self._scale is None:
            return False
        from shotcast.kernels.triton import gemv

        return rows > gemv.MAX_ROWS

    def __call__(self, x: torch.Tensor | Float8Rows) -> torch.Tensor:
        """Multiply [rows, inputs] to [rows, outputs]."""
        if self._on_cpu is not None and isinstance(x, torch.Tensor):
            return self._on_cpu(x)
        x = self._as_taken(x)
        found = self._by_own_kernel(x, gated=False)
        return self._by_library(x) if found is None else found

    def gated(self, x: torch.Tensor | Float8Rows, activation: Activation = "silu") -> torch.Tensor | Float8Rows:
        """Return ``activation(first half of outputs) * second half``, in FP8 if a layer like this one accepts it."""
        if self.weight.device.type == "cpu":
            gate, up = self(x).chunk(2, dim=-1)
            return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
        from shotcast.kernels.triton import activations

        x = self._as_taken(x)
        fuses = activation == "silu"
        out = self._by_own_kernel(x, gated=True) if fuses else None
        if out is None:
            both = self._by_library(x) if fuses else self(x)
            if self.takes_float8(both.shape[0]):
                return Float8Rows(*activations.quantize(both, gated=True, activation=activation))
            return activations.gate(both, activation)
        return Float8Rows(*activations.quantize(out)) if self.takes_float8(out.shape[0]) else out

    def _as_taken(self, x: torch.Tensor | Float8Rows) -> torch.Tensor | Float8Rows:
        return x if isinstance(x, Float8Rows) or not self.takes_float8(x.shape[0]) else self._quantized(x)

    @staticmethod
    def _quantized(x: torch.Tensor) -> Float8Rows:
        from shotcast.kernels.triton import activations

        return Float8Rows(*activations.quantize(x.contiguous()))

    def _by_own_kernel(self, x: torch.Tensor | Float8Rows, gated: bool) -> torch.Tensor | None:
        """Multiply with a native kernel; return None if the library is faster."""
        from shotcast.kernels.triton import gemv, grouped_gemm, grouped_gemv, skinny_gemm

        values, x_scale = x if isinstance(x, Float8Rows) else (x, None)
        if self._grouped is not None:
            x, (weight, scales, zeros, group) = values.contiguous(), self._grouped
            if x.shape[0] == 1:
                return grouped_gemv.linear(x, weight, scales, zeros, group, self.bias, gated)
            if x.shape[0] > grouped_gemm.MAX_ROWS or self._counters is None:
                return None
            return grouped_gemm.linear(x, weight, self._counters, scales, zeros, group, self.bias, gated)
        if gemv.serves(values, self.weight):
            return gemv.linear(values, self.weight, self._scale, self.bias, gated)
        if self._counters is not None and skinny_gemm.serves(values, self.weight):
            return skinny_gemm.linear(values, self.weight, self._counters, x_scale, self._scale, self.bias, gated)
        return None

    def _by_library(self, x: torch.Tensor | Float8Rows) -> torch.Tensor:
        if self._scale is not None:
            if not isinstance(x, Float8Rows):
                x = self._quantized(x)
            return quantized.scaled_matmul(x, Float8Rows(self.weight, self._scale), self.bias)
        assert not isinstance(x, Float8Rows)
        weight = self.weight
        if self._grouped is not None:
            from shotcast.kernels.triton.dequantize import dequantize

            weight = dequantize(*self._grouped, x.dtype)
        return F.linear(x, weight, self.bias)


def _product_on_cpu(
    weight: torch.Tensor, parts: list[BlockRows], bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    from shotcast.kernels.cpu import blocks, gemv

    if len(parts) == 1:
        return partial(blocks.linear, stored=weight, kind=parts[0].kind, bias=bias)
    if parts:

        def multiply_parts(x: torch.Tensor) -> torch.Tensor:
            out = torch.cat([blocks.linear(x, *part) for part in parts], dim=1)
            return out if bias is None else out + bias

        return multiply_parts

    def multiply(x: torch.Tensor) -> torch.Tensor:
        if gemv.serves(x, weight):
            out = gemv.linear(x, weight)
            return (out if bias is None else out + bias).to(x.dtype)
        return F.linear(x, weight, bias)

    return multiply


def column_parallel(weights: Weights, parts: Sequence[RowShard], bias: bool = False) -> Linear:
    """Join several matrices, of which this rank holds some rows each, so that every rank computes different outputs."""
    slices = [slice(part.rows.start, part.rows.stop) for part in parts]
    matrices = [weights.load_matrix(f"{part.name}.weight", rows) for part, rows in zip(parts, slices, strict=True)]
    biases = [weights.load(f"{part.name}.bias", rows) for part, rows in zip(parts, slices, strict=True)] if bias else []
    return Linear(_joined(matrices, weights.dtype), torch.cat(biases) if bias else None)


def row_parallel(
    weights: Weights, name: str, columns: range, bias: bool = False, rank: int = 0, zeroed: bool = False
) -> Linear:
    """Take this rank's columns, or zeros in their place, so that every rank computes a part of each output's sum. Rank
    0 adds the bias."""
    matrix = weights.load_matrix(f"{name}.weight", None, slice(columns.start, columns.stop), zeroed)
    return Linear(matrix, weights.load(f"{name}.bias") if bias and rank == 0 else None)


def _joined(matrices: list[Matrix], dtype: torch.dtype) -> Matrix | list[BlockRows]:
    """Concatenate the rows of several matrices; if only some are in blocks, as values of ``dtype``. Raises ConfigError
    if they are stored in different formats.
    """
    blocks = [matrix for matrix in matrices if isinstance(matrix, BlockRows)]
    if len(blocks) == len(matrices):
        kinds = itertools.groupby(blocks, lambda each: each.kind)
        return [BlockRows(torch.cat([each.stored for each in group]), kind) for kind, group in kinds]
    matrices = [matrix.values(dtype) if isinstance(matrix, BlockRows) else matrix for matrix in matrices]
    if len({type(matrix) for matrix in matrices}) > 1:
        raise ConfigError("some matrices of a layer are quantized and others are not, which is not supported on GPUs")
    if isinstance(matrices[0], torch.Tensor):
        return torch.cat(matrices)  # type: ignore[arg-type]
    values, scales, *others = (list(parts) for parts in zip(*matrices, strict=True))
    if not others:
        return Float8Rows(torch.cat(values), torch.cat(scales))
    zeros, groups = others
    if len({(value.dtype, scale.dtype, group) for value, scale, group in zip(values, scales, groups, strict=True)}) > 1:
        raise ConfigError("matrices of one layer are quantized in different formats, which is not supported")
    return GroupedRows(
        torch.cat(values), torch.cat(scales, 1), None if zeros[0] is None else torch.cat(zeros, 1), groups[0]
    )
