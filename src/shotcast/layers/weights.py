"""Reading a rank's part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from shotcast.layers.float8 import Float8Rows, quantize


class TensorSource(Protocol):
    """Named tensors, of which parts can be read."""

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor: ...


class Weights:
    """The source of the layers' parameters: reads parts of tensors, converts them and moves them to the device.

    Args:
        source: a checkpoint that has everything its configuration asks for.
        dtype, device: the type and the device of the parameters.
        on_read: called with the bytes of each parameter that is kept, for a progress bar.
        quantization: how matrices of linear layers are quantized: "" for not at all, or "fp8".
    """

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        on_read: Callable[[int], None] = lambda nbytes: None,
        quantization: str = "",
    ):
        self._source, self.dtype, self.device, self._on_read = source, dtype, device, on_read
        self._quantization = quantization

    def load(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """Load the tensor ``name``, or a part of it."""
        part = self._read(name, rows, columns)
        self._on_read(part.nbytes)
        return part

    def load_matrix(
        self, name: str, rows: slice | None = None, columns: slice | None = None, zeroed: bool = False
    ) -> torch.Tensor | Float8Rows:
        """Load a linear layer's matrix, or a part of it, quantized if that was asked for; no other one is held in full
        meanwhile. With ``zeroed``, it holds zeros."""
        part = self._read(name, rows, columns)
        if zeroed:
            part = torch.zeros_like(part)
        if not self._quantization:
            self._on_read(part.nbytes)
            return part
        quantized = quantize(part)
        self._on_read(quantized.values.nbytes + quantized.scale.nbytes)
        return quantized

    def _read(self, name: str, rows: slice | None, columns: slice | None) -> torch.Tensor:
        return self._source.read(name, rows, columns).to(self.device, self.dtype).contiguous()
