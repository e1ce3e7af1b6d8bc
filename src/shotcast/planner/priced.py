"""The price of a kernel: its time, and how far off that may be."""

from __future__ import annotations

from typing import NamedTuple


class Priced(NamedTuple):
    """The time of a kernel, or of several that are off alike.

    Attributes:
        time_us: by the constants of its kind.
        residual: of the kind, as a part of the time.
    """

    time_us: float
    residual: float


def one_after_another(*prices: Priced) -> Priced:
    """Return the price of kernels one after another, which are off alike."""
    time_us = sum(price.time_us for price in prices)
    return Priced(time_us, sum(price.time_us * price.residual for price in prices) / time_us)
