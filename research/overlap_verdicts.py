"""The thresholds of overlap on GPUs, and whether measured forms hold them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from overlap_bench.config import OWN, REDUCE_SCATTER_ALL_GATHER
from overlap_bench.result import Measured, OverlapRow

TORCH = "torch"
"""The set of PyTorch's forms."""
_BALANCED = 0.15
_OF_IDEAL = {"all_gather": 1.10, "all_to_all": 1.10, "reduce_scatter": 1.20, "all_reduce": 1.20,
             REDUCE_SCATTER_ALL_GATHER: 1.20}  # fmt: skip
"""The most that our best form may take of the ideal, where products and messages take about as long."""
_IDEAL_BELOW, _BELOW = 0.20, 0.15
"""Our best form is to be so far below the library's plain overlap, if the ideal is further below it than the first."""


def verdicts(measured: Measured) -> list[str]:
    """Return which of the thresholds hold, in sentences; none on CPU ranks, or without the library."""
    row = measured.rows[0]
    if row.device != "cuda" or row.library_us is None or row.library_plain_us is None:
        return []
    ratio = row.message_us / row.compute_us
    found = [
        f"alone: products {row.compute_us / 1e3:.2f} ms, our messages {row.communication_us / 1e3:.2f}, "
        f"the library's {row.library_us / 1e3:.2f}; the faster takes {ratio:.2f} of the products"
    ]
    own = _fastest(measured.rows, OWN)
    if own is None or own.time_us is None:
        return found
    if abs(ratio - 1) <= _BALANCED:
        limit = _OF_IDEAL[row.op]
        found.append(_said(f"{own.way} takes {own.time_us / row.ideal_us:.2f} of the ideal, {limit:.2f} or less",
                           own.time_us <= limit * row.ideal_us))  # fmt: skip
    if row.ideal_us <= (1 - _IDEAL_BELOW) * row.library_plain_us:
        below = 1 - own.time_us / row.library_plain_us
        found.append(_said(f"{own.way} is {below:.0%} below the library's plain overlap, {_BELOW:.0%} or more",
                           below >= _BELOW))  # fmt: skip
    torch = _fastest(measured.rows, TORCH)
    if row.whole and torch is not None and torch.time_us is not None:
        found.append(_said(f"{own.way} takes {own.time_us / torch.time_us:.2f} of {torch.way}, below 1",
                           own.time_us < torch.time_us))  # fmt: skip
    return found


def _said(claim: str, holds: bool) -> str:
    return f"{claim}: {'holds' if holds else 'does not hold'}"


def _fastest(rows: Iterable[OverlapRow], by: str) -> OverlapRow | None:
    timed = [row for row in rows if row.by == by and row.time_us is not None]
    return min(timed, key=lambda row: row.time_us or math.inf, default=None)
