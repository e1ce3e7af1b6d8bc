"""Fit the constants of a GPU's kernels and collectives to measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from shotcast.cost.collective import LinkCost, Work
from shotcast.cost.inference import ORDER, FusedNormCost, KernelCost
from shotcast.errors import ConfigError
from shotcast.planner.calibration import Fit
from shotcast.planner.cpu_rows import KernelPoint


class Measured(NamedTuple):
    """The work of a call, and the microseconds that it took."""

    work: Work
    time_us: float


def fit(points: Iterable[Measured], bw_gbps: float | None = None) -> LinkCost:
    r"""Fit the constants f, a, 1/b, 1/m, in which the model is linear, by least squares of the relative errors:

    .. math:: \min \sum_p (T_p / t_p - 1)^2

    Args:
        points: the measurements.
        bw_gbps: b, where it is known. Measurements of two ranks alone do not tell it from m.

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
    free = [0, 1, 2, 3] if bw_gbps is None else [0, 1, 3]
    found = np.array([0.0, 0.0, 1 / bw_gbps if bw_gbps else 0.0, 0.0])
    solution, _, rank, _ = np.linalg.lstsq((matrix / scale)[:, free], 1 - matrix @ found, rcond=None)
    found[free] = solution / scale[free]
    fixed_us, step_us, per_bw, per_local = (float(value) for value in found)
    if rank < len(free) or min(fixed_us, step_us, per_bw, per_local) <= 0:
        raise ConfigError(
            f"{len(rows)} measurements do not determine the constants of the model; use several algorithms, sizes "
            f"and world sizes, measured while nothing else runs (f {fixed_us:.3g}, a {step_us:.3g} us, "
            f"1/b {per_bw:.3g}, 1/m {per_local:.3g} ns a byte)"
        )
    return LinkCost(fixed_us, step_us, 1 / per_bw, 1 / per_local)


_RANGE = math.log(1e3)
"""Constants are sought within a factor of this around where the fit begins, so that those that measurements leave open
stay finite."""
_MOST_STEPS = 200
_EDGES = 3


def fit_kernel(points: Sequence[KernelPoint], start: KernelCost) -> Fit[KernelCost]:
    r"""Fit f, x and y of a kind of kernel, by least squares of the logarithms' differences:

    .. math:: \min \sum_p (\log T_p - \log t_p)^2

    by the method of Levenberg and Marquardt, on the logarithms of the constants. A constant whose amount is 0 in all
    measurements stays as it is in ``start``, and so does x where both amounts are in the same ratio in all of them:
    such measurements do not tell which of the two bounds a kernel.

    Raises:
        ConfigError: there are fewer measurements than constants, or one of no positive time.
    """
    firsts, seconds, times = (
        (
            np.array(column, dtype=float)
            for column in zip(*((*point.work, point.time_us) for point in points), strict=True)
        )
        if points
        else (np.zeros(0),) * 3
    )
    begin = np.log([start.fixed_us, start.first_rate, start.second_rate])
    free = [0, *(number for number, amounts in ((1, firsts), (2, seconds)) if amounts.any())]
    if len(free) == 3 and np.allclose(firsts * seconds[0], seconds * firsts[0], rtol=1e-6, atol=0.0):
        free.remove(1)
    if len(points) < len(free):
        raise ConfigError(f"{len(points)} measurements do not determine the {len(free)} constants of a kernel")
    if not np.all(times > 0):
        raise ConfigError("a kernel takes more than 0 us; measure it again")

    def errors(constants: np.ndarray) -> np.ndarray:
        fixed, first, second = np.exp(constants)
        bound = ((1e6 * firsts / first) ** ORDER + (1e6 * seconds / second) ** ORDER) ** (1 / ORDER)
        return np.log((fixed + bound) / times)

    now, wrong = _least_squares(errors, begin, free)
    constants = [start.fixed_us, start.first_rate, start.second_rate]
    for number in free:
        constants[number] = float(np.exp(now[number]))
    return Fit(KernelCost(*constants), *_spread(wrong), len(points))


class FusedNormPoint(NamedTuple):
    """A message, and the microseconds of its sum alone and with residual and norm in the kernel."""

    nbytes: int
    sum_us: float
    time_us: float


def fit_fused_norm(points: Sequence[FusedNormPoint]) -> Fit[FusedNormCost]:
    """Fit d, f and x of all-reduces with residual and norm, as :func:`fit_kernel` fits those of kernels.

    Where the sum bounds no message, d is the largest that the messages allow.

    Raises:
        ConfigError: there are fewer measurements than constants, or one of no positive time.
    """
    if len({point.nbytes for point in points}) < 3:
        raise ConfigError(
            f"{len(points)} measurements do not determine the 3 constants of a fused norm: it takes 3 sizes"
        )
    nbytes, sums, times = (np.array(column, dtype=float) for column in zip(*sorted(points), strict=True))
    if not (np.all(times > 0) and np.all(sums > 0) and np.all(nbytes > 0)):
        raise ConfigError("a fused norm takes more than 0 us, and a message has bytes; measure it again")

    def errors(constants: np.ndarray, tied: int | None = None) -> np.ndarray:
        beyond, fixed, rate = np.exp(constants)
        if tied is not None:
            beyond = fixed + nbytes[tied] / rate - sums[tied]
        return np.log(np.maximum(sums + beyond, fixed + nbytes / rate) / times)

    # a constant that bounds no message does not move, so the search begins once for each number of small messages that
    # the sum may bound
    found = []
    for bounded in range(1, len(points)):
        beyond = np.median((times - sums)[:bounded])
        rate = np.median((nbytes / times)[bounded:])
        fixed = np.median((times - nbytes / rate)[:bounded])
        begin = np.log(np.maximum([beyond, fixed, rate], 1e-2))
        found.append(_least_squares(errors, begin, [0, 1, 2]))
    # where both bounds of a message are the same, the errors have an edge, on the way to which a search stops wherever
    # rounding leads it; so the best one goes on along the edges around it
    best, _ = min(found, key=lambda each: float(each[1] @ each[1]))
    beyond, fixed, rate = np.exp(best)
    for tied in np.argsort(np.abs(fixed + nbytes / rate - sums - beyond), kind="stable")[:_EDGES]:
        along, wrong = _least_squares(partial(errors, tied=tied), best, [1, 2])
        _, fixed, rate = np.exp(along)
        if (beyond := fixed + nbytes[tied] / rate - sums[tied]) > 0:
            found.append((np.log([beyond, fixed, rate]), wrong))
    # where no sum bounds a message, all d up to an edge are as good
    least = min(float(wrong @ wrong) for _, wrong in found)
    constants, wrong = max(
        (each for each in found if each[1] @ each[1] <= least * (1 + 1e-9)), key=lambda each: each[0][0]
    )
    beyond, fixed, rate = (float(np.exp(constant)) for constant in constants)
    return Fit(FusedNormCost(beyond, fixed, rate / 1e3), *_spread(wrong), len(points))


def _spread(wrong: np.ndarray) -> tuple[float, float]:
    """Return the root mean square and the largest of relative errors, by their logarithms."""
    relative = np.exp(wrong) - 1
    return float(np.sqrt(np.mean(relative**2))), float(np.abs(relative).max())


def _least_squares(
    errors: Callable[[np.ndarray], np.ndarray], begin: np.ndarray, free: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the constants whose errors have the least sum of squares, and these errors.

    Args:
        errors: of all measurements, by the logarithms of the constants.
        begin: where to begin.
        free: the numbers of the constants that are sought; others stay.
    """
    now, damping = begin.copy(), 1e-2
    wrong = errors(now)
    for _ in range(_MOST_STEPS):
        slopes = np.stack([(errors(now + _nudge(number)) - wrong) / _NUDGE for number in free], axis=1)
        normal = slopes.T @ slopes
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -slopes.T @ wrong)
        moved = now.copy()
        moved[free] = np.clip(now[free] + step, begin[free] - _RANGE, begin[free] + _RANGE)
        moved_wrong = errors(moved)
        if moved_wrong @ moved_wrong < wrong @ wrong:
            done = wrong @ wrong - moved_wrong @ moved_wrong < 1e-12
            now, wrong, damping = moved, moved_wrong, damping / 3
            if done:
                break
        elif damping > 1e9:
            break
        else:
            damping *= 3
    return now, wrong


_NUDGE = 1e-6


def _nudge(number: int) -> np.ndarray:
    step = np.zeros(3)
    step[number] = _NUDGE
    return step
