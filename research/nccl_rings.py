"""The constants of NCCL's rings on one node, fitted to measured ones; ``nccl_model.py`` has the result."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from shotcast.cost.collective import LinkCost
from shotcast.errors import ConfigError


def fit_rings(points: Iterable[tuple[int, int, float]]) -> LinkCost:
    """Return f, a and b of rings on one node, by least squares of the relative errors.

    Args:
        points: for each measured ring its ranks, its bytes and its microseconds.

    Raises:
        ConfigError: the measurements do not determine them.
    """
    measured = list(points)
    rows = [
        [1 / time_us, 2 * (ranks - 1) / time_us, 2 * (ranks - 1) / ranks * nbytes / time_us / 1e3]
        for ranks, nbytes, time_us in measured
    ]
    matrix = np.array(rows).reshape(-1, 3)
    solution, _, rank, _ = np.linalg.lstsq(matrix, np.ones(len(rows)), rcond=None)
    fixed_us, step_us, per_bw = (float(value) for value in solution)
    if rank < 3 or min(fixed_us, step_us, per_bw) <= 0:
        raise ConfigError(
            f"{len(rows)} rings do not determine NCCL's constants; use several sizes and numbers of ranks"
        )
    return LinkCost(fixed_us, step_us, 1 / per_bw)
