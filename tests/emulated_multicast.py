"""Ranks in Triton's interpreter that have a multicast address, which no memory lies at."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shotcast.memory import arena, shm

UNMAPPED = itertools.count(1 << 52, 1 << 40)
"""Addresses beyond those that a process can map, one for each buffer."""


class EmulatedBuffer:
    """A SymmetricBuffer in shared memory that has a multicast address."""

    def __init__(self, group: Any, nbytes: int):
        from shotcast.transport.triton import multicast

        self._shared = _ShmBuffer(group, nbytes)
        self.multicast_address = next(UNMAPPED)
        self.traffic = multicast.emulate(self.multicast_address, self._shared.nbytes, self._shared.addresses)

    @property
    def nbytes(self) -> int:
        return self._shared.nbytes

    @property
    def addresses(self) -> tuple[int, ...]:
        return self._shared.addresses

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._shared.view(rank, offset, shape, dtype)

    def close(self) -> None:
        self._shared.close()


_ShmBuffer = shm.ShmBuffer


def with_multicast(fn: Callable[..., Any], *args: Any) -> Any:
    """Call ``fn(*args)`` in the interpreter, with communicators that have a multicast address."""
    os.environ["SHOTCAST_MULTICAST"] = "1"
    shm.ShmBuffer = EmulatedBuffer  # type: ignore[misc,assignment]
    arena._process = arena.Process()  # without blocks that have no such address
    return fn(*args)
