"""Fit the constants of the cost model to measurements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from shotcast.cost.collective import LinkCost, work
from shotcast.errors import ConfigError


class Measured(NamedTuple):
    """One measurement; the fields are those of :func:`shotcast.cost.collective.collective_us`."""

    op: str
    algorithm: str
    nbytes: int
    world_size: int
    time_us: float


def fit(points: Iterable[Measured]) -> LinkCost:
    r"""Fit the constants f, a, 1/b, 1/m, in which the model is linear, by least squares of the relative errors:

    .. math:: \min \sum_p (T_p / t_p - 1)^2

    Raises:
        ConfigError: the measurements do not determine all four (there are too few, or they are of one kind), or they
            contradict the model (a constant is negative).
    """
    rows = []
    for op, algorithm, nbytes, world_size, time_us in points:
        steps, sent, taken = work(op, algorithm, nbytes, world_size)
        rows.append([1 / time_us, steps / time_us, sent / time_us / 1e3, taken / time_us / 1e3])
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
