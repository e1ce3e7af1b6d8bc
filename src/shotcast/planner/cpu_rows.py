r"""Constants of a CPU's kernels by number of rows, and step times based on them.

Libraries use different code for few and for many rows, and are faster for numbers of rows that fill their tiles. So
each number of rows n up to 128 has separate constants, and windows of larger numbers share their mean. With X the bytes
or operations of the table in :mod:`shotcast.cost.inference`,

.. math:: T_n = f_n + X / x_n

and the time between two windows is interpolated. A step adds the host's time, since a CPU rank computes in the engine's
loop.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shotcast.cost.inference import (
    HEAD_OF_PROMPTS,
    KernelCost,
    KernelWork,
    decode_attention,
    prompt_attention,
    rows_pass,
)
from shotcast.errors import ConfigError
from shotcast.models.config import ModelConfig
from shotcast.planner.calibration import LINK, Calibration, Fit
from shotcast.planner.collectives import CollectiveCosts
from shotcast.planner.step import BeyondKernels, Estimate, Layout, StepModel, StepWork

FEW = tuple(range(1, 21))
WINDOWS = (
    *((rows,) for rows in FEW),
    *((rows,) for rows in range(21, 129)),
    *(tuple(range(first, first + 8)) for first in range(129, 161, 8)),
    *((rows - 5, rows + 2) for rows in (192, 256, 320, 448, 640, 1024)),
)
"""Windows of row counts that share constants."""
LARGE_BYTES = 8 << 20
"""The weight size from which products of few rows use several threads, as in ``kernels/cpu/gemv.py``."""
SUM_NORM = "sum_norm"
"""The kind of a sum over the ranks that share a machine, with residual and norm."""
_LEAST_US = 0.1


def product_kind(nbytes: int) -> str:
    """Return the kind of a product with ``nbytes`` bytes of weights, which are read by one thread or several."""
    return "large_product" if nbytes >= LARGE_BYTES else "product"


class KernelPoint(NamedTuple):
    """A kernel's work and measured microseconds."""

    work: KernelWork
    time_us: float


class RowsPoint(NamedTuple):
    """A measurement of a kind of kernel with this many rows."""

    kind: str
    rows: int
    point: KernelPoint


def fit_rows(points: Iterable[RowsPoint]) -> dict[str, Fit[KernelCost]]:
    """Fit the constants of each kind and window, with names such as ``product@24``. Raises ConfigError if a measurement
    has a number of rows in no window, or takes no time.
    """
    windows = {rows: round(sum(window) / len(window)) for window in WINDOWS for rows in window}
    grouped: dict[str, list[KernelPoint]] = {}
    for kind, rows, point in points:
        if not point.time_us > 0:
            raise ConfigError(f"a {kind} of {rows} rows takes more than {point.time_us:g} us; measure it again")
        # heads and attention are of sequences, which have numbers of their own
        grouped.setdefault(f"{kind}@{windows.get(rows, rows)}", []).append(point)
    return {name: _line(measured) for name, measured in grouped.items()}


def _line(points: Sequence[KernelPoint]) -> Fit[KernelCost]:
    """Fit non-negative f and x by least squares of the relative errors."""
    firsts, times = (np.array(column) for column in zip(*((p.work.first, p.time_us) for p in points), strict=True))
    scale = firsts.max()
    columns = np.stack([1 / times, firsts / scale / times], axis=1)
    fixed, slope = (float(value) for value in np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)[0])
    if fixed < 0 or len(set(firsts.tolist())) == 1:
        fixed, slope = 0.0, float(1 / np.mean(firsts / scale / times))
    elif slope <= 0:
        fixed, slope = float(np.mean(times)), _LEAST_US
    relative = (fixed + slope * firsts / scale) / times - 1
    cost = KernelCost(fixed, 1e6 * scale / slope)
    return Fit(cost, float(np.sqrt(np.mean(relative**2))), float(np.abs(relative).max()), len(points))


class RowsCosts:
    """The constants of a machine share, by kind and rows."""

    def __init__(self, kinds: Mapping[str, Fit[KernelCost]]):
        self._curves: dict[str, dict[int, Fit[KernelCost]]] = {}
        for name, known in kinds.items():
            kind, _, rows = name.partition("@")
            if rows:
                self._curves.setdefault(kind, {})[int(rows)] = known
        self._rows = {kind: sorted(curve) for kind, curve in self._curves.items()}

    def __contains__(self, kind: str) -> bool:
        return kind in self._curves

    def time_us(self, kind: str, rows: int, work: KernelWork) -> tuple[float, float]:
        """Return the microseconds of a kernel with this many rows, and the residual of the nearest measurement."""
        curve, known = self._curves[kind], self._rows[kind]
        first = KernelWork(work.first)
        at = bisect.bisect_left(known, rows)
        if at == len(known):
            last = curve[known[-1]]
            # the work of all others has the rows in it
            longer = rows / known[-1] if kind.endswith(("product", "head")) else 1.0
            return longer * last.cost.time_us(first), last.residual
        above = curve[known[at]]
        if known[at] == rows or at == 0:
            return above.cost.time_us(first), above.residual
        below = curve[known[at - 1]]
        part = (rows - known[at - 1]) / (known[at] - known[at - 1])
        time_us = (1 - part) * below.cost.time_us(first) + part * above.cost.time_us(first)
        return time_us, max(below.residual, above.residual)


class CpuStepModel(StepModel):
    """Predicts steps on CPU ranks that share a machine: a :class:`StepModel` with constants by rows.

    Attention computes all decoding sequences in one call, and prompts one after the other. The constants assume that
    this many ranks work at once.
    """

    beyond_kernels = BeyondKernels(0.0, 0.0)  # not measured

    def _stages(self, work: StepWork) -> list[Estimate]:
        costs = self._costs
        rows, hidden, item = work.rows, self.model.hidden, self.itemsize
        layer = Estimate()
        for name, (outputs, inputs) in self._sides.items():
            nbytes = outputs * inputs * item
            layer.add(name, *costs.time_us(product_kind(nbytes), rows, rows_pass(nbytes)))
        self._add_attention(layer, costs, work)
        activated = rows_pass(rows * 3 * self.share.columns * item)
        layer.add("activation", *costs.time_us("activation", rows, activated))
        norm = self._norm_of_rows(costs, rows)
        stages = []
        for number, layers in enumerate(self._layers):
            parts = {name: layers * time_us for name, time_us in layer.parts.items()}
            stage = Estimate(parts, layers**2 * layer.variance)
            last = number == len(self._layers) - 1
            stage.add("norm", (2 * layers + last) * norm[0], norm[1])
            if number == 0:
                stage.add("embedding", *costs.time_us("embedding", rows, rows_pass(rows * hidden * item)))
            if last and work.sampled:
                head = rows_pass(self.share.words * hidden * item)
                stage.add("head", *costs.time_us(HEAD_OF_PROMPTS if work.prompts else "head", work.sampled, head))
            stages.append(stage)
        return stages

    @functools.cached_property
    def _costs(self) -> RowsCosts:
        return RowsCosts(self._calibration.kinds)

    def _add_attention(self, layer: Estimate, costs: RowsCosts, work: StepWork) -> None:
        share, head_dim = self.share, self.model.head_dim
        window = self.model.longest_window or math.inf
        if work.decoding:
            context = min(work.context + 1, window)
            read = decode_attention(work.decoding, context, share.kv_heads, head_dim, self.itemsize, beginning=0)
            layer.add("attention", *costs.time_us("decode_attention", work.decoding, read))
        for tokens, before in work.prompts:
            seen = prompt_attention([(tokens, int(min(before, window)))], share.heads, head_dim, beginning=0)
            layer.add("attention", *costs.time_us("prompt_attention", tokens, seen))

    def _norm_of_rows(self, costs: RowsCosts, rows: int) -> tuple[float, float]:
        nbytes = rows * self.model.hidden * self.itemsize
        ranks = self.layout.tensor_parallel
        if ranks == 1:
            return costs.time_us("norm", rows, rows_pass(nbytes))
        if SUM_NORM in costs and self._algorithm == "auto":
            return costs.time_us(SUM_NORM, rows, rows_pass(nbytes))
        time_us, residual = costs.time_us("norm", rows, rows_pass(nbytes))
        summed = self._collectives.all_reduce(nbytes, ranks, self.itemsize, self._algorithm)
        return time_us + summed.time_us, max(residual, self._calibration.residual(LINK))


def step_model(
    model: ModelConfig,
    layout: Layout,
    calibration: Calibration,
    collectives: CollectiveCosts,
    quantization: str = "",
    algorithm: str = "auto",
    kv_item: float | None = None,
) -> StepModel:
    """Return the step model for a calibration's device; the arguments are the same as for :class:`StepModel`."""
    kind = CpuStepModel if calibration.device == "cpu" else StepModel
    return kind(model, layout, calibration, collectives, quantization, algorithm, kv_item=kv_item)
