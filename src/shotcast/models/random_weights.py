"""Random weights in a model's shape, for measurements that do not depend on the text."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from shotcast.models.checkpoint import Checkpoint
from shotcast.models.config import ModelConfig

_STANDARD_DEVIATION = 0.02
"""The standard deviation of matrices, as used to initialize models of this kind."""
_TABLE_SIZE = 1 << 20


class RandomWeights(Checkpoint):
    """A checkpoint whose tensors depend only on their names and ``seed``, in whichever parts they are read.

    Every row is a window into one table of normally distributed numbers, at an offset derived from the tensor's name
    and the row number. A read is therefore little more than a copy.
    """

    def __init__(self, config: ModelConfig, seed: int = 0, device: torch.device | str = "cpu"):
        super().__init__(config, config.tensors())
        self._seed = seed
        longest = max(shape[-1] for shape in self.shapes.values())
        # made on the CPU, since the generator of a GPU gives other numbers
        table = (
            torch.randn(_TABLE_SIZE + longest, generator=torch.Generator().manual_seed(seed), device="cpu")
            * _STANDARD_DEVIATION
        )
        self._table = table.to(device, getattr(torch, config.dtype))

    def _read(self, name: str, rows: slice, columns: slice) -> torch.Tensor:
        if len(self.shapes[name]) == 1:
            start = int(self._offsets(name, 0, 1)[0])
            vector = self._table[start + rows.start : start + rows.stop]
            # norms scale by about one, biases add about nothing
            return vector + 1 if name.endswith(".weight") else vector.clone()
        if columns.start == columns.stop:
            return self._table.new_empty(rows.stop - rows.start, 0)
        offsets = torch.from_numpy(self._offsets(name, rows.start, rows.stop) + columns.start).to(self._table.device)
        return self._table.unfold(0, columns.stop - columns.start, 1)[offsets]

    def close(self) -> None:
        self._table = self._table.new_empty(0)

    def _offsets(self, name: str, first: int, last: int) -> np.ndarray:
        """Return the offsets of rows in the table: a hash of name, seed and row (splitmix64)."""
        key = int.from_bytes(hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest(), "little")
        mixed = np.arange(first, last, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(_TABLE_SIZE)).astype(np.int64)
