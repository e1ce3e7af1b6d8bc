"""The price of a kernel: its time, and how far off that may be."""

from __future__ import annotations

from typing import NamedTuple

from shotcast.cost.inference import KernelWork, sustained_kind
from shotcast.planner.calibration import Calibration


class Priced(NamedTuple):
    """The time of a kernel, or of several that are off alike.

    Attributes:
        time_us: by the constants of its kind, where such kernels run without a pause.
        residual: of the kind, as a part of the time.
        saved_us: the part of ``time_us`` that a GPU saves at its full clock, which it has after a rest.
    """

    time_us: float
    residual: float
    saved_us: float = 0.0


def in_a_row(rested: Priced, calibration: Calibration, work: KernelWork, fp8: bool) -> Priced:
    r"""Return the price of a product of many rows among others like it.

    Arithmetic takes more power than a GPU may take for long, so the clock goes down, and the time is at least that of
    the arithmetic of products that were measured in a row, by constants of their own:

    .. math:: T = \max(T_{rested}, f + Y / y), \quad saved = T - T_{rested}

    Products that read more than they compute are not slower in a row, as memory has a separate clock. Without such
    measurements both are the same.

    Args:
        rested: the price where the GPU has rested before.
        calibration: constants of the kernels.
        work: of the product.
        fp8: the weights are in FP8.
    """
    sustained = calibration.kinds.get(sustained_kind(fp8))
    if sustained is None:
        return rested
    time_us = sustained.cost.time_us(KernelWork(0.0, work.second))
    if time_us <= rested.time_us:
        return rested
    return Priced(time_us, sustained.residual, time_us - rested.time_us)
