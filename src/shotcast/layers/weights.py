"""Loading a rank's part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from shotcast.layers.quantized import BlockRows, Float8Rows, GroupedRows, quantize

Stored = Float8Rows | GroupedRows | BlockRows
"""A matrix in a checkpoint's storage format."""
Matrix = torch.Tensor | Stored
"""A linear layer's matrix [outputs, inputs]."""


class TensorSource(Protocol):
    """Named tensors that can be read in parts: as values, or in their storage format (None if layers cannot multiply
    with it)."""

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor: ...
    def read_stored(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Stored | None: ...


class Weights:
    """The source of the layers' parameters: reads parts of tensors, converts them and moves them to the device.

    Args:
        source: a checkpoint with everything that its configuration requires.
        on_read: called with the bytes of each loaded parameter, for a progress bar.
        quantization: the quantization of linear layers: "" for none, or "fp8".
        stored: the storage formats in which such a matrix is kept.
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
        """Load rows of a matrix also used for lookups, in blocks if it is stored that way and layers keep them."""
        if BlockRows in self._stored and isinstance(kept := self._source.read_stored(name, rows), BlockRows):
            self._on_read(kept.stored.nbytes)
            return kept
        return self.load(name, rows)

    def load_matrix(
        self, name: str, rows: slice | None = None, columns: slice | None = None, zeroed: bool = False
    ) -> Matrix:
        """Load a linear layer's matrix, or a part of it, in its storage format or quantized if requested; no other
        matrix is held in full meanwhile. With ``zeroed``, it holds zeros."""
        if self._stored and isinstance(kept := self._source.read_stored(name, rows, columns), self._stored):
            if zeroed:
                _factors(kept).zero_()
            self._on_read(sum(part.nbytes for part in kept if isinstance(part, torch.Tensor)))
            moved: list[Any] = [part.to(self.device) if isinstance(part, torch.Tensor) else part for part in kept]
            return type(kept)(*moved)
        part = self._read(name, rows, columns)
        if zeroed:
            part = torch.zeros_like(part)
        if not self._quantization:
            self._on_read(part.nbytes)
            return part
        quantized = quantize(part)
        self._on_read(sum(tensor.nbytes for tensor in quantized))
        return quantized

    def _read(self, name: str, rows: slice | None, columns: slice | None) -> torch.Tensor:
        return self._source.read(name, rows, columns).to(self.device, self.dtype).contiguous()


def _factors(matrix: Stored) -> torch.Tensor:
    """Return the tensor that makes all values zero if it is zero."""
    if isinstance(matrix, BlockRows):
        return matrix.stored
    return matrix.scale if isinstance(matrix, Float8Rows) else matrix.scales
