"""What a benchmark says: one row a point, as a table to read and as JSON to keep."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.table import Table

from shotcast import wire
from shotcast.errors import ConfigError
from shotcast.units import format_size

OPS = ("all_reduce", "reduce_scatter", "all_gather")


def busbw_factor(op: str, world_size: int) -> float:
    r"""What turns algorithm bandwidth into the load of a link, as nccl-tests defines it.

    .. math:: busbw = algbw \cdot \begin{cases} 2(n-1)/n & \text{all-reduce} \\ (n-1)/n & \text{otherwise} \end{cases}
    """
    return (2 if op == "all_reduce" else 1) * (world_size - 1) / world_size


@dataclass(frozen=True, slots=True)
class Row:
    """One measured point.

    ``nbytes`` is the whole tensor: the input of all_reduce and reduce_scatter, the output of all_gather. Times are of
    one call: ``time_us`` the slowest rank's median, ``p99_us`` the slowest rank's 99th percentile, ``skew_us`` the
    slowest rank's median less the fastest's. Bandwidths are in GB/s (1e9). ``errors`` counts wrong elements on all
    ranks, None if they were not compared. A wrong result is not timed: times and bandwidths are None.
    """

    op: str
    device: str
    world_size: int
    dtype: str
    algorithm: str
    nbytes: int
    time_us: float | None
    p99_us: float | None
    skew_us: float | None
    algbw_gbps: float | None
    busbw_gbps: float | None
    errors: int | None

    @classmethod
    def of(
        cls,
        *,
        op: str,
        device: str,
        world_size: int,
        dtype: str,
        algorithm: str,
        nbytes: int,
        medians_us: Sequence[float],
        p99s_us: Sequence[float],
        errors: int | None,
    ) -> Row:
        """From each rank's median and 99th percentile; both empty for a result that was wrong."""
        if not medians_us:
            return cls(op, device, world_size, dtype, algorithm, nbytes, None, None, None, None, None, errors)
        time_us = max(medians_us)
        algbw_gbps = nbytes / time_us / 1e3
        return cls(
            op=op,
            device=device,
            world_size=world_size,
            dtype=dtype,
            algorithm=algorithm,
            nbytes=nbytes,
            time_us=time_us,
            p99_us=max(p99s_us),
            skew_us=time_us - min(medians_us),
            algbw_gbps=algbw_gbps,
            busbw_gbps=algbw_gbps * busbw_factor(op, world_size),
            errors=errors,
        )

    @property
    def count(self) -> int:
        """Elements as nccl-tests counts them: of the tensor, or of one rank's part where there are parts."""
        elements = self.nbytes // wire.DTYPES[self.dtype]
        return elements if self.op == "all_reduce" else elements // self.world_size


def table(rows: Sequence[Row]) -> Table:
    """The columns of nccl-tests, with p99 and skew; the fastest of each size stands out."""
    first = rows[0]
    # Both all_reduce and reduce_scatter add up; nothing else is measured.
    redop = "none" if first.op == "all_gather" else "sum"
    view = Table(title=f"{first.op}, {first.world_size} {first.device} ranks", title_justify="left", box=None)
    for name, unit in (
        ("size", "B"), ("count", ""), ("type", ""), ("redop", ""), ("algorithm", ""), ("time", "us"), ("algbw", "GB/s"),
        ("busbw", "GB/s"), ("#wrong", ""), ("p99", "us"), ("skew", "us"),
    ):  # fmt: skip
        left = name in ("type", "redop", "algorithm")
        view.add_column(f"{name}\n({unit})" if unit else name, justify="left" if left else "right", no_wrap=True)
    for nbytes in sorted({row.nbytes for row in rows}):
        same = [row for row in rows if row.nbytes == nbytes]
        times = [row.time_us for row in same if row.time_us is not None]
        for row in same:
            wrong = "N/A" if row.errors is None else str(row.errors)
            cells = (row.time_us, row.algbw_gbps, row.busbw_gbps, row.p99_us, row.skew_us)
            time, algbw, busbw, p99, skew = ("-" if v is None else _three_digits(v) for v in cells)
            style = "bold red" if row.errors else "bold" if times and row.time_us == min(times) else ""
            view.add_row(
                str(nbytes), str(row.count), row.dtype, redop, row.algorithm, time, algbw, busbw, wrong, p99, skew,
                style=style, end_section=row is same[-1],
            )  # fmt: skip
    return view


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def write_json(path: Path, rows: Iterable[Row], *, environment: dict[str, Any], command: str) -> None:
    """A file that says what was measured, how, where and when."""
    document = {
        "environment": environment,
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rows": [asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def read_json(path: Path) -> list[Row]:
    """The rows of a file that :func:`write_json` wrote."""
    try:
        rows = json.loads(path.read_text())["rows"]
        for row in rows:
            if unknown := row.keys() ^ {field.name for field in fields(Row)}:
                raise ConfigError(f"{path}: a row has unknown keys, or lacks some: {', '.join(sorted(unknown))}")
        return [Row(**row) for row in rows]
    except (OSError, json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} is not a benchmark result: {error}") from error


def headline(rows: Sequence[Row], over: str = "ring") -> str:
    """One sentence: where one-shot or two-shot gains most on ``over``; empty when neither gains 5%."""
    best: tuple[float, str, int] | None = None
    for base in rows:
        if base.algorithm != over or base.time_us is None:
            continue
        for row in rows:
            if row.nbytes == base.nbytes and row.algorithm in ("one_shot", "two_shot") and row.time_us is not None:
                ratio = base.time_us / row.time_us
                if best is None or ratio > best[0]:
                    best = (ratio, row.algorithm, row.nbytes)
    if best is None or best[0] < 1.05:
        return ""
    ratio, algorithm, nbytes = best
    return f"{rows[0].world_size} ranks: {algorithm} is {ratio:.1f} times as fast as {over} at {format_size(nbytes)}"
