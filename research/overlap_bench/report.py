"""The results of the benchmark of overlap as a table and as a picture of timelines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from overlap_bench.config import COMMUNICATION, COMPUTE, LIBRARY, LIBRARY_COMMUNICATION
from overlap_bench.result import Measured, OverlapRow
from shotcast.bench.plot import check_format
from shotcast.errors import ConfigError
from shotcast.overlap.policy import SEQUENTIAL
from shotcast.overlap.schedule import COMPUTE_LANE
from shotcast.units import format_size

_COLORS = ("#0072B2", "#D55E00", "#E69F00", "#CC79A7", "#009E73")
"""Computation and the lanes of communication, from Okabe and Ito's palette."""
_NOTHING_AT_ONCE = (COMPUTE, COMMUNICATION, LIBRARY_COMMUNICATION, SEQUENTIAL, LIBRARY)


def title(row: OverlapRow) -> str:
    """Return what was measured, in words."""
    products = f"{row.repeat} x " if row.repeat > 1 else ""
    hosts = f", {row.nodes} hosts at {row.delay_us / 1e3:g} ms one way" if row.nodes > 1 else ""
    lanes = f", {row.lanes} lanes" if row.lanes > 1 else ""
    whole = "a whole matrix, " if row.whole else ""
    return (
        f"{row.steps} steps of {products}{'x'.join(map(str, row.gemm))} and {row.op} of {whole}"
        f"{format_size(row.nbytes)} ({row.dtype}), {row.world_size} {row.device} ranks{hosts}{lanes}"
    )


COLUMNS = ("way", "ms", "/ sequential", "/ plain", "/ ideal", "hidden")
_BY_LIBRARY = "/ library plain"


def columns(measured: Measured) -> tuple[str, ...]:
    """Return the columns of the table of one configuration."""
    more = () if measured.rows[0].library_plain_us is None else (_BY_LIBRARY,)
    return (*COLUMNS[:4], *more, *COLUMNS[4:])


def table(measured: Measured) -> Table:
    """Return the table of one configuration."""
    found = Table(*columns(measured), title=title(measured.rows[0]))
    for cells in _cells(measured):
        found.add_row(*cells)
    return found


def sentences(measured: Measured) -> list[str]:
    """Return what is to be said of one configuration: what was not measured, and what was seen."""
    rows = measured.rows
    found = [f"{row.way}: not available: {row.reason}" for row in rows if row.time_us is None]
    return [*found, *(f"{row.way}: {row.evidence}" for row in rows if row.evidence)]


def markdown(measured: Sequence[Measured]) -> str:
    """Return a Markdown table of each configuration, under its title and above what ``auto`` decided."""
    parts = []
    for one in measured:
        names = columns(one)
        lines = [f"| {' | '.join(cells)} |" for cells in (names, ("---",) * len(names), *_cells(one))]
        parts += [f"{title(one.rows[0])}:", "\n".join(lines)]
        parts += ["\n".join(f"- {sentence}" for sentence in sentences(one))] if sentences(one) else []
        parts += [f"`auto` took {one.decision}."] if one.decision else []
    return "\n\n".join(parts)


def _cells(measured: Measured) -> Iterator[tuple[str, ...]]:
    for row in measured.rows:
        bases = [row.sequential_us, row.plain_us, row.library_plain_us, row.ideal_us]
        known = [base for base in bases if base is not None]
        if row.time_us is None:
            yield row.way, *["-"] * (1 + len(known)), ""
            continue
        hidden = f"{row.hidden:.0%}" if row.way not in _NOTHING_AT_ONCE else ""
        yield row.way, f"{row.time_us / 1e3:.2f}", *(f"{row.time_us / base:.2f}" for base in known), hidden


def plot(measured: Sequence[Measured], path: Path) -> None:
    """Draw the timelines of the ways of each configuration: computation and communication, from the times of steps.

    Raises:
        ConfigError: there is no timeline, or pictures have no such suffix.
    """
    import matplotlib.figure

    check_format(path)
    panels = [(one, [row for row in one.rows if row.spans]) for one in measured]
    if not any(rows for _, rows in panels):
        raise ConfigError("none of the results has a timeline")
    count = sum(len(rows) for _, rows in panels)
    figure = matplotlib.figure.Figure(
        figsize=(9, 0.5 + 0.6 * len(measured) + 0.9 * count), layout="constrained", facecolor="white"
    )
    axes = figure.subplots(count, squeeze=False)[:, 0]
    at = 0
    for one, rows in panels:
        longest = max((span["end_us"] for row in rows for span in row.spans), default=1.0)
        for row in rows:
            _timeline(axes[at], row, longest / 1e3)
            if row is rows[0]:
                axes[at].set_title(title(one.rows[0]), fontsize=9, loc="left", pad=18)
            at += 1
        axes[at - 1].set_xlabel("ms")
    figure.savefig(path, dpi=150)


def _timeline(axes: Any, row: OverlapRow, longest_ms: float) -> None:
    lanes = sorted({span["lane"] for span in row.spans})
    for lane in lanes:
        bars = [
            (span["begin_us"] / 1e3, max(span["end_us"] - span["begin_us"], 1.0) / 1e3)
            for span in row.spans
            if span["lane"] == lane
        ]
        color = _COLORS[lane % len(_COLORS)]
        edge = "white" if lane == COMPUTE_LANE else color  # a short message is still seen
        axes.broken_barh(bars, (-lane - 0.4, 0.8), facecolor=color, edgecolor=edge, linewidth=0.5)
    names = ["computation", *(["communication"] if len(lanes) < 3 else [f"lane {lane}" for lane in lanes[1:]])]
    axes.set_yticks([-lane for lane in lanes], names[: len(lanes)], fontsize=8)
    axes.set_xlim(0, 1.02 * longest_ms)
    hidden = f", {row.hidden:.0%} of the communication hidden" if row.way != SEQUENTIAL else ""
    axes.text(1.0, 1.02, f"{row.way}: median {(row.time_us or 0) / 1e3:.1f} ms{hidden}", transform=axes.transAxes,
              ha="right", va="bottom", fontsize=8)  # fmt: skip
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
