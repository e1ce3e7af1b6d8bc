"""Results of collectives as files keep them: those of ``shotcast bench`` and those of ``research/bench_modes.py``."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from call_modes import names
from shotcast import wire
from shotcast.bench import implementations, kernels, report
from shotcast.errors import ConfigError
from shotcast.transport.registry import usual
from shotcast.wire import Op

MEASURES = ("call", "between", "host")
"""Kinds of times.

``call``: calls back to back. ``between``: a call with work between the calls, minus the work. ``host``: host time.
"""
_NORM = {"cuda": "kernels.triton.norm", "cpu": "transport.cpu.norm_rows"}


@dataclass(frozen=True)
class CallRow(report.Row):
    """One measured point.

    ``measure`` is one of :data:`MEASURES`; only calls back to back have bandwidths. For ``between``, the time is for a
    call and the work before it, minus the work; ``work`` names the work and ``work_us`` is its time. For ``host``, it
    is the time the host takes to enqueue a call; ``allocations`` is how often all ranks together allocated GPU memory
    in the timed calls, None if not counted. ``hidden`` is the number of elements of a row where the operation works by
    rows, else 0. ``delay_us`` is the one-way delay of the network between simulated hosts.
    """

    measure: str = "call"
    hidden: int = 0
    work: str = ""
    work_us: float | None = None
    allocations: int | None = None
    delay_us: float = 0.0

    @classmethod
    def from_ranks(
        cls, medians_us: Sequence[float], p99s_us: Sequence[float], works_us: Sequence[float] = (), **facts: Any
    ) -> CallRow:
        """Build a row as :meth:`shotcast.bench.report.Row.from_ranks` does.

        Args:
            works_us: each rank's median for the work.
        """
        plain = facts | {"op": names.plain_operation(facts["op"])}
        row = super().from_ranks(medians_us, p99s_us, **plain)
        if row.measure != "call":
            row = dataclasses.replace(row, algbw_gbps=None, busbw_gbps=None)
        return dataclasses.replace(row, op=facts["op"], work_us=max(works_us) if works_us else None)

    @property
    def tokens(self) -> int:
        """The rows of the tensor if the operation works by rows; else 0."""
        return self.nbytes // (wire.DTYPES[self.dtype] * self.hidden) if self.hidden else 0


def above_plain_us(row: CallRow, same_size: Iterable[CallRow]) -> float | None:
    """Return the time of a fused call minus the fastest plain native all-reduce of the same size and measure."""
    plain = [
        other.time_us
        for other in same_size
        if other.algorithm in names.PLAIN and other.time_us and _conditions(row) == _conditions(other)
    ]
    if not plain or row.time_us is None or row.algorithm in names.PLAIN:
        return None
    return row.time_us - min(plain)


_conditions = operator.attrgetter(
    "op", "device", "world_size", "dtype", "nbytes", "measure", "hidden", "work", "nodes", "delay_us", "reduction"
)


def kernels_of(rows: Sequence[CallRow]) -> dict[str, str]:
    """Return the fingerprints of our kernels behind rows of one device and number of nodes."""
    behind = dict.fromkeys(name for row in rows for name in _behind(row))
    return kernels.now(behind, usual(rows[0].device, rows[0].nodes)) if rows else {}


def _behind(row: CallRow) -> tuple[str, ...]:
    """Return the names of our kernels that produced a row; none if a library did."""
    op, name = Op[row.op.upper()], row.algorithm
    with_norm = row.op in names.FUSED_OPS and (name == "unfused" or names.is_library(name))
    norm = (_NORM[row.device],) if with_norm else ()
    if name in names.PLAIN:
        return kernels.of_call(Op.ALL_REDUCE, names.PLAIN[name], row.shape)
    if name == "unfused":
        return (*kernels.of_call(Op.ALL_REDUCE, implementations.AUTO, row.shape), *norm)
    if name in names.FP8:
        return kernels.of_call(op, implementations.AUTO, row.shape)
    return (*kernels.of_call(op, name, row.shape), *norm) if implementations.is_own(name) else norm


def read(path: Path) -> report.Result:
    """Read a result of collectives, whose rows are :class:`CallRow`.

    Rows of earlier versions may lack fields that have a default.

    Raises:
        ConfigError: the file is not such a result.
    """
    known = {field.name for field in fields(CallRow)}
    needed = {field.name for field in fields(CallRow) if field.default is MISSING}
    try:
        document = json.loads(path.read_text())
        rows = document["rows"]
        for row in rows:
            if mismatched := (row.keys() - known) | (needed - row.keys()):
                raise ConfigError(f"{path}: a row has unknown keys or lacks some: {', '.join(sorted(mismatched))}")
        return report.Result(
            document.get("environment", {}),
            document.get("command", ""),
            document.get("date", ""),
            tuple(CallRow(**row) for row in rows),
            document.get("kernels"),
        )
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} is not a benchmark result: {error}") from error
