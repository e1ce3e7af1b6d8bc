"""The summary picture: latency over message size, one curve for the fastest of each family::

    python research/summary_plot.py PICTURE --json FILE [--json FILE]

The families are those of the ``summary`` table (:data:`result_tables.FAMILIES`): shotcast's algorithms with
the bits of the numerics contract, NCCL in any of its forms (or Gloo), PyTorch's symmetric-memory kernels, and the own
ring. Both axes are logarithmic. There is one panel a world size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.figure
import matplotlib.patheffects
import matplotlib.ticker
import ring_speedup_plot
from call_modes.rows import CallRow
from result_tables import fastest, measured_families, size_name

from shotcast.bench.report import require_same

# The palette of Okabe and Ito, which readers with any colour vision can tell apart.
STYLES = {
    "shotcast": {"color": "#D55E00", "marker": "o", "linewidth": 2.8, "zorder": 5},
    "NCCL": {"color": "#009E73", "marker": "s", "linewidth": 1.8, "zorder": 4},
    "Gloo": {"color": "#009E73", "marker": "s", "linewidth": 1.8, "zorder": 4},
    "PyTorch": {"color": "#CC79A7", "marker": "^", "linewidth": 1.8, "zorder": 3},
    "our ring": {"color": "#0072B2", "marker": "D", "linewidth": 1.8, "zorder": 2},
}
NOTED = (8 << 10, 1 << 20, 128 << 20)
"""Message sizes at which the times of shotcast and of the library are written out."""


def curves(rows: Sequence[CallRow]) -> dict[str, list[tuple[int, float]]]:
    """Return each family's points (message size in bytes, microseconds), for rows of one world size."""
    points: dict[str, list[tuple[int, float]]] = {}
    for name, belongs in measured_families(rows).items():
        for nbytes in sorted({row.nbytes for row in rows}):
            best = fastest(rows, nbytes, belongs)
            if best is not None and best.time_us:
                points.setdefault(name, []).append((nbytes, best.time_us))
    return points


def figure(rows: Sequence[CallRow], caption: str = "") -> Any:
    """Draw the picture as a matplotlib figure; ``caption`` stands below it.

    Raises:
        ConfigError: the rows are not of one operation, dtype and device.
    """
    measure = "call" if any(row.measure == "call" for row in rows) else rows[0].measure
    rows = [row for row in rows if row.measure == measure]
    require_same(rows, "op", "dtype", "device", "hidden")
    world_sizes = sorted({row.world_size for row in rows})
    sheet = matplotlib.figure.Figure(
        figsize=(max(1.2 + 5.6 * len(world_sizes), 7.6), 4.9), layout="constrained", facecolor="white"
    )
    grid = sheet.subplots(1, len(world_sizes), sharey=True, squeeze=False)[0]
    unit = "GPUs" if rows[0].device == "cuda" else "CPU ranks"
    for axes, world_size in zip(grid, world_sizes, strict=True):
        _panel(axes, curves([row for row in rows if row.world_size == world_size]))
        if len(world_sizes) > 1:
            axes.set_title(f"{world_size} {unit}", fontsize=11)
    grid[0].set_ylabel("time of a call (µs)")
    only = f" on {world_sizes[0]} {unit}" if len(world_sizes) == 1 else ""
    operation = rows[0].op.replace("_", "-").capitalize()
    sheet.suptitle(f"{operation}{only}, {rows[0].dtype}: lower is better", fontweight="bold", fontsize=13)
    if caption:
        sheet.supxlabel(caption, fontsize=8, color="#555555")
    return sheet


def _panel(axes: Any, lines: dict[str, list[tuple[int, float]]]) -> None:
    for name, points in lines.items():
        sizes, times_us = [size for size, _ in points], [time_us for _, time_us in points]
        axes.plot(sizes, times_us, label=name, markersize=4.5, markeredgewidth=0, **STYLES[name])
    _note_times(axes, lines)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({size for points in lines.values() for size, _ in points})
    axes.set_xlim(sizes[0] / 1.5, sizes[-1] * 1.6)
    ticks = sizes[:: max(1, -(-len(sizes) // 9))]
    axes.set_xticks(ticks, [size_name(size) for size in ticks])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.grid(which="major", color="#e3e3e3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("message size")
    axes.legend(loc="upper left", frameon=False, fontsize=10.5, handlelength=2.2)


def _note_times(axes: Any, lines: dict[str, list[tuple[int, float]]]) -> None:
    """Write the times of shotcast below its curve, and those of the library above its own, at a few sizes."""
    halo = [matplotlib.patheffects.withStroke(linewidth=3, foreground="white")]
    for name, points in lines.items():
        if name not in ("shotcast", "NCCL", "Gloo"):
            continue
        below = name == "shotcast"
        for nbytes, time_us in points:
            if nbytes in NOTED:
                axes.annotate(
                    f"{time_us:.1f}" if time_us < 100 else f"{time_us:.0f}",
                    (nbytes, time_us),
                    xytext=(4, -15) if below else (0, 8),
                    textcoords="offset points",
                    ha="left" if below else "right",
                    fontsize=9.5,
                    fontweight="bold",
                    color=STYLES[name]["color"],
                    path_effects=halo,
                    zorder=6,
                )


def main(arguments: Sequence[str] | None = None) -> None:
    ring_speedup_plot.main(arguments, figure, __doc__)


if __name__ == "__main__":
    main()
