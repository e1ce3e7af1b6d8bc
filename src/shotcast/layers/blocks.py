"""Matrices in the blocks of GGUF files, which CPUs multiply with as they are."""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCKS = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q6_K": (256, 210)}
"""The formats that products are made with: the values and the bytes of a block."""


class BlockRows(NamedTuple):
    """A matrix [outputs, inputs], each row of which is blocks."""

    stored: torch.Tensor  # uint8 [outputs, bytes of the blocks of a row]
    kind: str  # the format, a key of ``BLOCKS``

    def to(self, device: torch.device) -> BlockRows:
        """Return the matrix on a device."""
        return BlockRows(self.stored.to(device), self.kind)

    @property
    def nbytes(self) -> int:
        """The size of the blocks."""
        return self.stored.nbytes

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        values, nbytes = BLOCKS[self.kind]
        return self.stored.shape[0], self.stored.shape[1] // nbytes * values

    def values(self, dtype: torch.dtype, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values of ``rows`` [n], or of all, as [n, inputs]."""
        from shotcast.kernels.cpu.blocks import dequantize

        stored = self.stored if rows is None else self.stored[rows]
        return dequantize(stored, self.kind, self.shape[1]).to(dtype)
