"""Fit the constants of the cost model to measurements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from shotcast.cost.collective import LinkCost, Work
from shotcast.errors import ConfigError


class Measured(NamedTuple):
    """The work of a call, and the microseconds that it took."""

    work: Work
    time_us: float


def fit(points: Iterable[Measured]) -> LinkCost:
    r"""Fit the constants f, a, 1/b, 1/m, in which the model is linear, by least squares of the relative errors:

    .. math:: \min \sum_p (T_p / t_p - 1)^2

    Raises:
        ConfigError: the measurements do not determine all four (there are too few, or they are of one kind), or they
            contradict the model (a constant is negative).
    """
    rows = [
        [1 / time_us, work.steps / time_us, work.sent / time_us / 1e3, work.taken / time_us / 1e3]
        for work, time_us in points
    ]
    matrix = np.array(rows).reshape(-1, 4)
    scale = np.maximum(np.abs(matrix).max(axis=0, initial=0.0), 1e-300)
    solution, _, rank, _ = np.linalg.lstsq(matrix / scale, np.ones(len(rows)), rcond=None)
    fixed_us, step_us, per_bw, per_local = (float(value) for value in solution / scale)
    if rank < 4 or min(fixed_us, step_us, per_bw, per_local) <= 0:
        raise ConfigError(
            f"{len(rows)} measurements do not determine the constants of the model; use several algorithms, sizes "
            f"and world sizes, measured while nothing else runs (f {fixed_us:.3g}, a {step_us:.3g} us, "
            f"1/b {per_bw:.3g}, 1/m {per_local:.3g} ns a byte)"
        )
    return LinkCost(fixed_us, step_us, 1 / per_bw, 1 / per_local)
