"""Random weights in the shape of a model, for measurements that do not look at the text."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import numpy as np
import torch

from shotcast.models.checkpoint import part_of, require
from shotcast.models.config import ModelConfig

_STANDARD_DEVIATION = 0.02
"""Of matrices, as models of this family are initialised."""
_TABLE = 1 << 20


class RandomWeights:
    """A checkpoint whose tensors depend on their names and on ``seed`` alone, whichever part of them is read.

    Every row is a window, at a place that its name and number give, into one table of normally distributed numbers. So
    a read is little more than a copy, and only of the part that is asked for.

    Args:
        config: of the model.
        device: where tensors are made.
    """

    def __init__(self, config: ModelConfig, seed: int = 0, device: torch.device | str = "cpu"):
        self._config, self._seed = config, seed
        self._shapes = config.tensors()
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        longest = max(shape[-1] for shape in self._shapes.values())
        # made on the CPU, for a GPU's generator draws other numbers
        table = torch.randn(_TABLE + longest, generator=torch.Generator().manual_seed(seed)) * _STANDARD_DEVIATION
        self._table = table.to(device, self._dtype)

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def nbytes(self) -> int:
        return self._config.parameters * self._dtype.itemsize

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        require(self, name)
        return self._shapes[name]

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        shape = self.shape(name)
        (first, last), (left, right) = part_of(shape, rows, columns, name)
        if len(shape) == 1:
            start = int(self._places(name, 0, 1)[0])
            vector = self._table[start + first : start + last]
            # norms scale by about one, biases add about nothing
            return vector + 1 if name.endswith("norm.weight") else vector.clone()
        if left == right:
            return self._table.new_empty(last - first, 0)
        places = torch.from_numpy(self._places(name, first, last) + left).to(self._table.device)
        return self._table.unfold(0, right - left, 1)[places]

    def close(self) -> None:
        self._table = self._table.new_empty(0)

    def _places(self, name: str, first: int, last: int) -> np.ndarray:
        """Where in the table rows begin: the top bits of a hash of name, seed and row (splitmix64)."""
        key = int.from_bytes(hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest(), "little")
        mixed = np.arange(first, last, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(_TABLE)).astype(np.int64)
