"""Reading a rank's part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from shotcast.layers.quantized import BlockRows, Float8Rows, GroupedRows, quantize

Stored = Float8Rows | GroupedRows | BlockRows
"""A matrix as checkpoints store it."""
Matrix = torch.Tensor | Stored
"""A matrix [outputs, inputs] of a linear layer."""


class TensorSource(Protocol):
    """Named tensors, of which parts can be read: as values, or as they are stored (None if they have no format that
    layers multiply with)."""

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor: ...
    def read_stored(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Stored | None: ...


class Weights:
    """The source of the layers' parameters: reads parts of tensors, converts them and moves them to the device.

    Args:
        source: a checkpoint that has everything its configuration asks for.
        on_read: called with the bytes of each parameter that is kept, for a progress bar.
        quantization: how matrices of linear layers are quantized: "" for not at all, or "fp8".
        stored: the formats in which such a matrix is kept if it is stored so.
    """

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        on_read: Callable[[int], None] = lambda nbytes: None,
        quantization: str = "",
        stored: tuple[type[Stored], ...] = (),
    ):
        self._source, self.dtype, self.device, self._on_read = source, dtype, device, on_read
        self._quantization, self._stored = quantization, stored

    def load(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """Load the tensor ``name``, or a part of it."""
        part = self._read(name, rows, columns)
        self._on_read(part.nbytes)
        return part

    def load_table(self, name: str, rows: slice) -> torch.Tensor | BlockRows:
        """Load rows of a matrix that is also looked up in, in blocks if it is stored so and layers keep these."""
        if BlockRows in self._stored and isinstance(kept := self._source.read_stored(name, rows), BlockRows):
            self._on_read(kept.nbytes)
            return kept
        return self.load(name, rows)

    def load_matrix(
        self, name: str, rows: slice | None = None, columns: slice | None = None, zeroed: bool = False
    ) -> Matrix:
        """Load a linear layer's matrix, or a part of it, as it is stored or quantized if that was asked for; no other
        one is held in full meanwhile. With ``zeroed``, it holds zeros."""
        if self._stored and isinstance(kept := self._source.read_stored(name, rows, columns), self._stored):
            if zeroed:
                _factors(kept).zero_()
            self._on_read(kept.nbytes)
            return kept.to(self.device)
        part = self._read(name, rows, columns)
        if zeroed:
            part = torch.zeros_like(part)
        if not self._quantization:
            self._on_read(part.nbytes)
            return part
        quantized = quantize(part)
        self._on_read(quantized.nbytes)
        return quantized

    def _read(self, name: str, rows: slice | None, columns: slice | None) -> torch.Tensor:
        return self._source.read(name, rows, columns).to(self.device, self.dtype).contiguous()


def _factors(matrix: Stored) -> torch.Tensor:
    """Return what makes all values zero if it is."""
    if isinstance(matrix, BlockRows):
        return matrix.stored
    return matrix.scale if isinstance(matrix, Float8Rows) else matrix.scales
