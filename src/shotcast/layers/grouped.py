"""Matrices as checkpoints store them: codes of 4 bits, or FP8 in blocks, with a scale for each group of inputs.

value = (code - zero) * scale        or        value = e4m3 * scale
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shotcast.errors import ConfigError

LEAST_GROUP = 32
"""The smallest group that kernels multiply with."""
PER_WORD = 8
"""Codes of 4 bits in a word."""


class GroupedRows(NamedTuple):
    """A matrix [outputs, inputs], of whose rows each group of inputs has a scale."""

    # int32 [outputs, inputs / 8], eight codes a word, the first in the lowest bits; or float8_e4m3fn [outputs, inputs]
    values: torch.Tensor
    scales: torch.Tensor  # [groups, outputs]
    zeros: torch.Tensor | None  # uint8 [groups, outputs]; None for FP8
    group: int  # the number of inputs of a group, which divides the inputs

    def to(self, device: torch.device) -> GroupedRows:
        """Return the matrix on a device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return GroupedRows(self.values.to(device), self.scales.to(device), zeros, self.group)

    @property
    def nbytes(self) -> int:
        """The size of all tensors."""
        return self.values.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        return self.values.shape[0], self.values.shape[1] * (1 if self.zeros is None else PER_WORD)


def common_group(group: int, columns: slice) -> int:
    """Return the largest group of inputs of a part that lies within a group of the matrix, wherever the part begins."""
    return math.gcd(group, columns.start, columns.stop)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes of 4 bits [outputs, inputs] into words [outputs, inputs / 8]."""
    shifts = 4 * torch.arange(PER_WORD, dtype=torch.int32, device=codes.device)
    return (codes.to(torch.int32).unflatten(1, (-1, PER_WORD)) << shifts).sum(-1, dtype=torch.int32)


def join(matrices: Sequence[GroupedRows]) -> GroupedRows:
    """Concatenate the rows of matrices. Raises ConfigError if they are stored in different formats."""
    if len({(matrix.values.dtype, matrix.scales.dtype, matrix.group) for matrix in matrices}) > 1:
        raise ConfigError("matrices of one layer are quantized in different formats, which is not supported")
    zeros = [matrix.zeros for matrix in matrices if matrix.zeros is not None]
    return GroupedRows(
        torch.cat([matrix.values for matrix in matrices]),
        torch.cat([matrix.scales for matrix in matrices], 1),
        torch.cat(zeros, 1) if zeros else None,
        matrices[0].group,
    )
