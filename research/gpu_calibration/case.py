"""A kernel that is measured alone, and what all of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

BYTES_BETWEEN = 200_000_000
"""Bytes that other calls read between two uses of the same data: several times the L2 cache."""


class Case(NamedTuple):
    """A kernel on some data.

    Attributes:
        row: what it is, as results have it, without its time.
        turns: the number of sets of data.
        call: runs the kernel on the set of that number.
        check: raises ArithmeticError if the kernel gives wrong results.
    """

    row: dict[str, Any]
    turns: int
    call: Callable[[int], Any]
    check: Callable[[], None]


class Cases(Protocol):
    """Kernels on data of one shape. They can be pickled."""

    def cases(self, device: torch.device, filled: bool) -> Iterator[Case]: ...


def copies_beyond_caches(nbytes: int) -> int:
    """Return how many sets of data of this many bytes take turns, so that caches hold none of them."""
    return max(2, -(-BYTES_BETWEEN // max(1, nbytes)))


def off_by(name: str, found: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor | float, rounding: float) -> None:
    """Raise ArithmeticError if results are off by more than ``allowed`` and the rounding of the result."""
    off = float(((found.float() - exact).abs() / (exact.abs() * rounding + allowed + 1e-6)).max())
    if not off <= 1:
        raise ArithmeticError(f"{name}: the error is {off:.3g} times the allowed one, so nothing was measured")
