"""Benchmark results: one row per point, as a table for a terminal and as JSON to store."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from shotcast import wire
from shotcast.bench.operations import OPERATIONS
from shotcast.errors import ConfigError
from shotcast.wire import NodeShape


def busbw_factor(op: str, world_size: int) -> float:
    r"""Return the factor from algorithm bandwidth to bus bandwidth (the load of a link), as defined by nccl-tests.

    It is :math:`2(n-1)/n` for an all-reduce, 1 for a broadcast and a reduce, and :math:`(n-1)/n` otherwise.
    """
    return OPERATIONS[op].links(world_size)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured point.

    ``nbytes`` is the size of the whole tensor: the input of all_reduce and reduce_scatter, the output of all_gather.
    ``reduction`` is set for operations that reduce. ``chosen`` is the algorithm that ``auto`` selected. Times are for
    one call: ``time_us`` is the slowest rank's median, ``p99_us`` the slowest rank's 99th percentile, and ``skew_us``
    the slowest rank's median minus the fastest's. Bandwidths are in GB/s (1e9). ``errors`` counts wrong elements on all
    ranks; it is None if they were not compared. A wrong result is not timed: its times and bandwidths are None.

    ``lowest_us`` and ``highest_us`` are the times of the fastest and the slowest round. They are None if rounds were
    not recorded separately.

    ``nodes`` is the number of equal nodes that the ranks are on. ``predicted_us`` is the cost model's time if ranks are
    on several nodes.
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
    nodes: int = 1
    predicted_us: float | None = None
    lowest_us: float | None = None
    highest_us: float | None = None
    reduction: str = "sum"
    chosen: str = ""

    @classmethod
    def from_ranks(
        cls,
        medians_us: Sequence[float],
        p99s_us: Sequence[float],
        rounds_us: Sequence[Sequence[float]] = (),
        **facts: Any,
    ) -> Row:
        """Build a row from each rank's median and 99th percentile; both are empty for a wrong result.

        Args:
            rounds_us: each rank's median of each round.
            facts: the fields that are neither times nor bandwidths.
        """
        time_us = max(medians_us) if medians_us else None
        of_rounds = [max(of_ranks) for of_ranks in zip(*rounds_us, strict=True)]
        algbw_gbps = facts["nbytes"] / time_us / 1e3 if time_us else None
        busbw = busbw_factor(facts["op"], facts["world_size"])
        return cls(
            time_us=time_us,
            p99_us=max(p99s_us) if p99s_us else None,
            skew_us=None if time_us is None else time_us - min(medians_us),
            algbw_gbps=algbw_gbps,
            busbw_gbps=None if algbw_gbps is None else algbw_gbps * busbw,
            lowest_us=min(of_rounds, default=None),
            highest_us=max(of_rounds, default=None),
            **facts,
        )

    @property
    def implementation(self) -> str:
        """The implementation as one word for tables: ``auto`` includes the algorithm it selected."""
        return f"{self.algorithm}:{self.chosen}" if self.chosen else self.algorithm

    @property
    def shape(self) -> NodeShape:
        """The nodes and the ranks of each."""
        return NodeShape(self.nodes, self.world_size // self.nodes)

    @property
    def count(self) -> int:
        """The number of elements as nccl-tests counts them: the tensor, or one rank's part if it is divided."""
        elements = self.nbytes // wire.DTYPES[self.dtype]
        return elements // self.world_size if OPERATIONS[self.op].divided else elements


@dataclass(frozen=True, slots=True)
class Result:
    """A file of measurements: its rows, environment, command, date and kernels.

    ``kernels`` maps the names of :mod:`shotcast.bench.kernels` to fingerprints; None if they were not recorded.
    """

    environment: dict[str, Any]
    command: str
    date: str
    rows: tuple[Row, ...]
    kernels: dict[str, str] | None = None

    @classmethod
    def now(cls, rows: Iterable[Row], *, environment: dict[str, Any], command: str, kernels: dict[str, str]) -> Result:
        """Build a result from rows that were just measured."""
        return cls(rows=tuple(rows), **stamped(environment, command, kernels))

    @property
    def machine(self) -> str:
        """The hardware and versions as caption text; empty if the file does not say."""
        gpus = [gpu["name"] for gpu in self.environment.get("gpus", ())]
        parts = [", ".join(dict.fromkeys(gpus)) or self.environment.get("cpu_model", "")]
        versions = self.environment.get("versions", {})
        names = {"torch": "PyTorch", "triton": "Triton", "nccl": "NCCL"} if gpus else {"torch": "PyTorch"}
        parts += [f"{name} {versions[key].split('+')[0]}" for key, name in names.items() if versions.get(key)]
        return ", ".join(part for part in (*parts, self.date[:10]) if part)


def table(rows: Sequence[Row]) -> Table:
    """Format rows as a table with the columns of nccl-tests, p99 and skew.

    The fastest implementation of each size is highlighted.
    """
    first = rows[0]
    hosts = f" on {first.nodes} hosts" if first.nodes > 1 else ""
    title = f"{first.op}, {first.world_size} {first.device} ranks{hosts}"
    reduces = OPERATIONS[first.op].reduces
    same_size: dict[int, list[Row]] = {nbytes: [] for nbytes in sorted({row.nbytes for row in rows})}
    for row in rows:
        same_size[row.nbytes].append(row)
    listed: list[tuple[bool, str, Callable[[Row], str]]] = [
        (True, "size\n(B)", lambda row: str(row.nbytes)),
        (True, "count", lambda row: str(row.count)),
        (True, "type", lambda row: row.dtype),
        (True, "redop", lambda row: row.reduction if reduces else "none"),
        (True, "algorithm", lambda row: row.implementation),
        (True, "time\n(us)", lambda row: _cell(row.time_us)),
        (True, "algbw\n(GB/s)", lambda row: _cell(row.algbw_gbps)),
        (True, "busbw\n(GB/s)", lambda row: _cell(row.busbw_gbps)),
        (True, "#wrong", lambda row: "N/A" if row.errors is None else str(row.errors)),
        (True, "p99\n(us)", lambda row: _cell(row.p99_us)),
        (True, "skew\n(us)", lambda row: _cell(row.skew_us)),
        (any(row.predicted_us is not None for row in rows), "model\n(us)", lambda row: _cell(row.predicted_us)),
    ]
    view = Table(title=title, title_justify="left", box=None)
    shown = [(name, text) for is_shown, name, text in listed if is_shown]
    for name, _ in shown:
        view.add_column(name, justify="left" if name in ("type", "redop", "algorithm") else "right", no_wrap=True)
    for alike in same_size.values():
        best = _fastest_us(alike)
        for row in alike:
            style = "bold red" if row.errors else "bold" if best and row.time_us == best else ""
            view.add_row(*(text(row) for _, text in shown), style=style, end_section=row is alike[-1])
    return view


def _fastest_us(rows: Iterable[Row]) -> float | None:
    return min((row.time_us for row in rows if row.time_us is not None), default=None)


def mean_bandwidths(rows: Sequence[Row]) -> str:
    """Return the mean bus bandwidth of each implementation that served every size, as nccl-tests prints it; or ""."""
    sizes, by_name = {row.nbytes for row in rows}, dict[str, list[float]]()
    for row in rows:
        if row.busbw_gbps is not None:
            by_name.setdefault(row.algorithm, []).append(row.busbw_gbps)
    means = {name: sum(found) / len(found) for name, found in by_name.items() if len(found) == len(sizes) > 1}
    return ", ".join(f"{name} {_cell(mean)}" for name, mean in means.items())


def require_same(rows: Sequence[Row], *facts: str) -> None:
    """Raise ConfigError unless all rows agree on each of these fields."""
    for fact in facts:
        values = sorted({getattr(row, fact) for row in rows})
        if len(values) > 1:
            raise ConfigError(
                f"one table or picture shows only one {fact}; these rows have {', '.join(map(str, values))}"
            )


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def stamped(environment: dict[str, Any], command: str, kernels: dict[str, str]) -> dict[str, Any]:
    """Return the environment, date, command and kernels of a measurement, as result files store them."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"environment": environment, "command": command, "date": date, "kernels": kernels}


def write(path: Path, result: Result) -> None:
    """Write a result file: what was measured, how, where and when."""
    document = asdict(result)
    rows, kernels = document.pop("rows"), document.pop("kernels")
    document |= ({} if kernels is None else {"kernels": kernels}) | {"rows": rows}
    path.write_text(json.dumps(document, indent=1) + "\n")
