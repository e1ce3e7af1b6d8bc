"""Plots of benchmark results: time against message size and, below it, the speed-up over one of the curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shotcast import extras
from shotcast.bench.implementations import algorithms, is_own
from shotcast.bench.report import Row, require_same
from shotcast.errors import ConfigError
from shotcast.units import format_size

COLORS = {
    "auto": "#000000",
    "gloo": "#2ca02c",
    "nccl": "#2ca02c",
    "nccl_ring": "#98df8a",
    "nccl_tree": "#17becf",
    "nccl_ll": "#bcbd22",
    "nccl_ll128": "#8c564b",
    "nccl_simple": "#dbdb8d",
    "torch_one_shot": "#9467bd",
    "torch_two_shot": "#c5b0d5",
}
"""Colors of curves that are not registered algorithms, whose descriptions name their colors."""
_OTHER_COLOR = "#8c564b"

FORMATS = (".png", ".svg", ".pdf")
REFERENCES = ("ring", "nccl", "gloo")
"""Candidates for the base of a speed-up; the first one measured is used."""


def check_format(path: Path) -> None:
    """Raise ConfigError unless plots can be drawn in the format given by the suffix of ``path``."""
    extras.require("plots", "a picture")
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(
            f"{path} has {f'the suffix {path.suffix}' if path.suffix else 'no suffix'}, and that of a picture says its "
            f"format; accepted: {', '.join(FORMATS)}"
        )


def _reference(rows: Sequence[Row]) -> str:
    measured = {row.algorithm for row in rows}
    return next((name for name in REFERENCES if name in measured), rows[0].algorithm)


def speedups(rows: Sequence[Row], over: str) -> dict[str, list[tuple[int, float]]]:
    """Return the points of each algorithm: message size in bytes, and speed-up.

    The speed-up is the time of ``over`` at that size divided by the algorithm's time.
    """
    base = {row.nbytes: row.time_us for row in rows if row.algorithm == over and row.time_us is not None}
    result: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.time_us is not None and row.nbytes in base:
            result.setdefault(row.algorithm, []).append((row.nbytes, base[row.nbytes] / row.time_us))
    return {name: sorted(points) for name, points in result.items()}


def plot(rows: Sequence[Row], path: Path, caption: str = "") -> None:
    """Plot rows of one operation and dtype, in the format that the suffix of ``path`` names."""
    timed = [row for row in rows if row.time_us is not None]
    if not timed:
        raise ConfigError("there is nothing to plot: no point was timed")
    check_format(path)
    figure = _figure(timed, caption)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _figure(rows: Sequence[Row], caption: str) -> Any:
    """Draw latency above and speed-up below, with one column of axes for each world size."""
    import matplotlib.figure

    require_same(rows, "op", "dtype", "device")
    world_sizes = sorted({row.world_size for row in rows})
    figure = matplotlib.figure.Figure(figsize=(max(0.9 + 4.1 * len(world_sizes), 6.4), 6.6), layout="constrained")
    grid = figure.subplots(
        2, len(world_sizes), sharex=True, sharey="row", squeeze=False, gridspec_kw={"height_ratios": [3, 2]}
    )
    over = _reference(rows)
    for column, world_size in enumerate(world_sizes):
        panel = [row for row in rows if row.world_size == world_size]
        _latency(grid[0][column], panel, f"{world_size} ranks")
        _speedup(grid[1][column], panel, over)
    grid[0][0].set_ylabel("time of a call (µs)")
    grid[1][0].set_ylabel(f"speed-up over {over}")
    first = rows[0]
    title = f"{first.op.replace('_', '-')}, {first.dtype}, {first.device.upper()} ranks"
    figure.suptitle(title, fontweight="bold")
    handles, labels = grid[0][-1].get_legend_handles_labels()
    columns = min(2 + 2 * len(world_sizes), 6, len(labels))
    legend = figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False, title=caption, title_fontsize=8
    )
    legend.get_title().set_color("#555555")
    return figure


def color_of(name: str) -> str:
    """Return the color of a curve: strong for native algorithms, muted for libraries."""
    algorithm = algorithms().get(name)
    return (COLORS.get(name) if algorithm is None else algorithm.color) or _OTHER_COLOR


def _style(name: str) -> dict[str, Any]:
    own = is_own(name)
    return {
        "color": color_of(name),
        "linestyle": "-" if own else "--",
        "linewidth": 1.8 if own else 1.3,
        "marker": "o" if own else "s",
        "markersize": 4,
        "label": name,
    }


def _axis(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: format_size(int(value)))
    axes.grid(which="major", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _latency(axes: Any, rows: Sequence[Row], title: str) -> None:
    for name in dict.fromkeys(row.algorithm for row in rows):
        points = sorted((row.nbytes, row.time_us) for row in rows if row.algorithm == name)
        axes.plot([size for size, _ in points], [time for _, time in points], **_style(name))
    _axis(axes)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title(title)


def _speedup(axes: Any, rows: Sequence[Row], over: str) -> None:
    for name, points in speedups(rows, over).items():
        axes.plot([size for size, _ in points], [ratio for _, ratio in points], **_style(name))
    _axis(axes)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.set_xlabel("message size")
