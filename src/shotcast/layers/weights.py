"""Reading a rank's part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class TensorSource(Protocol):
    """Tensors by name, of which parts can be read."""

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor: ...


class Weights:
    """What layers take their parameters from: cut, converted and on the device.

    Args:
        source: a checkpoint that has all that its configuration asks for.
        dtype, device: of the parameters.
        on_read: called with the bytes of each parameter read, for a progress bar.
    """

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        on_read: Callable[[int], None] = lambda nbytes: None,
    ):
        self._source, self.dtype, self.device, self._on_read = source, dtype, device, on_read

    def take(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """The tensor ``name``, or the part of it that is asked for."""
        part = self._source.read(name, rows, columns).to(self.device, self.dtype).contiguous()
        self._on_read(part.numel() * part.element_size())
        return part
