"""The MultiShot claim as a picture: the speed-up of all-reduce in one or two steps over a ring, by message size::

    python research/ring_speedup_plot.py PICTURE --json FILE [--json FILE]

    speed-up = time(ring) / time(MultiShot)

The picture shows two rings, our own and NCCL's. MultiShot is the fastest of one-shot, two-shot and ``auto``'s choice.
There is one panel for each world size; sizes run from 4 KB to 1 MB, those of decoding, on an axis of powers of two.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure
import matplotlib.patheffects
import matplotlib.ticker
from call_modes.rows import CallRow, read
from result_tables import fastest, size_name

from shotcast.bench.report import require_same
from shotcast.errors import ConfigError

SMALLEST, LARGEST = 4 << 10, 1 << 20
MULTISHOT = ("one_shot", "two_shot", "auto")
RINGS = {"nccl_ring": ("NCCL's ring", "#D55E00", "s"), "ring": ("our ring", "#0072B2", "o")}
"""The name in the picture, the color (from Okabe and Ito's palette) and the marker of each ring."""
CLAIM = 3.0
"""The claim in the title of NVIDIA's article "3x Faster AllReduce with NVSwitch and TensorRT-LLM MultiShot" (2024)."""


def ratios(rows: Sequence[CallRow], ring: str) -> list[tuple[int, float]]:
    """Return message sizes in bytes with the time of ``ring`` divided by MultiShot's, for rows of one world size."""
    points = []
    for nbytes in sorted({row.nbytes for row in rows if SMALLEST <= row.nbytes <= LARGEST}):
        slow = fastest(rows, nbytes, lambda row: row.algorithm == ring)
        fast = fastest(rows, nbytes, lambda row: row.algorithm in MULTISHOT)
        if slow is not None and fast is not None and slow.time_us and fast.time_us:
            points.append((nbytes, slow.time_us / fast.time_us))
    return points


def figure(rows: Sequence[CallRow], caption: str = "") -> Any:
    """Draw the picture as a matplotlib figure, with ``caption`` below it.

    Raises:
        ConfigError: no all-reduce of 4 KB to 1 MB was timed with both a ring and MultiShot.
    """
    rows = [row for row in rows if row.measure == "call"]
    require_same(rows, "op", "dtype", "device")
    panels: dict[int, dict[str, list[tuple[int, float]]]] = {}
    for world_size in sorted({row.world_size for row in rows if row.op == "all_reduce"}):
        group = [row for row in rows if row.world_size == world_size]
        lines = {ring: points for ring in RINGS if (points := ratios(group, ring))}
        if lines:
            panels[world_size] = lines
    if not panels:
        raise ConfigError(
            f"this picture needs an all_reduce of {size_name(SMALLEST)} to {size_name(LARGEST)} timed by "
            f"{' or '.join(RINGS)}, and by one of {', '.join(MULTISHOT)}"
        )
    sheet = matplotlib.figure.Figure(
        figsize=(max(1.0 + 4.4 * len(panels), 6.4), 4.6), layout="constrained", facecolor="white"
    )
    grid = sheet.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    top = max(ratio for lines in panels.values() for points in lines.values() for _, ratio in points)
    unit = "GPUs" if rows[0].device == "cuda" else "CPU ranks"
    for axes, (world_size, lines) in zip(grid, panels.items(), strict=True):
        _panel(axes, lines, f"{world_size} {unit}: {2 * world_size - 2} ring steps")
        axes.set_ylim(0, 1.2 * max(top, CLAIM))
    grid[0].set_ylabel("time of the ring / time of MultiShot")
    sheet.suptitle(f"All-reduce in one or two steps, over a ring ({rows[0].dtype})", fontweight="bold", fontsize=13)
    if caption:
        sheet.supxlabel(caption, fontsize=8, color="#555555")
    return sheet


def _panel(axes: Any, lines: dict[str, list[tuple[int, float]]], title: str) -> None:
    axes.axhline(1.0, color="#444444", linewidth=1.0)
    axes.axhline(CLAIM, color="#999999", linewidth=1.0, linestyle=(0, (4, 3)))
    sizes = sorted({size for points in lines.values() for size, _ in points})
    by_height = sorted(lines, key=lambda ring: sum(ratio for _, ratio in lines[ring]) / len(lines[ring]))
    for lower, ring in enumerate(by_height, start=1):
        ceiling = lines[by_height[lower]] if lower < len(by_height) else []
        _line(axes, lines[ring], *RINGS[ring], ceiling)
    axes.text(sizes[0], 0.97, "as fast as the ring", ha="left", va="top", fontsize=8.5, color="#444444")
    axes.text(sizes[-1], CLAIM + 0.03, f"{CLAIM:g}x", ha="right", va="bottom", fontsize=8.5, color="#777777")
    axes.set_title(title, fontsize=11)
    axes.set_xscale("log", base=2)
    axes.set_xlim(sizes[0] / 1.5, sizes[-1] * 1.5)
    axes.set_xticks(sizes, [size_name(size) for size in sizes], rotation=40, ha="right", rotation_mode="anchor")
    axes.minorticks_off()
    axes.yaxis.set_major_locator(matplotlib.ticker.MultipleLocator(0.5))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("message size")


def _line(
    axes: Any, points: list[tuple[int, float]], name: str, color: str, marker: str, ceiling: list[tuple[int, float]]
) -> None:
    """Draw one ring with its name and figures, on the side with more room.

    ``ceiling`` is the next line above.
    """
    x, y = [size for size, _ in points], [ratio for _, ratio in points]
    axes.plot(x, y, color=color, marker=marker, markersize=5.5, linewidth=2.2, zorder=3)
    start = y[: max(1, len(y) // 2)]
    above = not ceiling or ceiling[0][1] - max(start) > min(start) - 1.0
    halo = [matplotlib.patheffects.withStroke(linewidth=3, foreground="white")]
    side: dict[str, Any] = {
        "textcoords": "offset points",
        "va": "bottom" if above else "top",
        "color": color,
        "zorder": 4,
    }
    side["path_effects"] = halo
    sign = 1 if above else -1
    peak = y.index(max(y))
    for position in {0, peak, len(points) - 1}:
        text = f"{y[position]:.1f}x"
        axes.annotate(text, points[position], xytext=(0, 7 * sign), ha="center", fontsize=9, **side)
    text = f"{name} / MultiShot"
    if not ceiling:
        # above the peak, but within the axes
        inner = min(max(peak, len(points) // 4), len(points) - 1 - len(points) // 4)
        at = (x[inner], max(y[max(inner - 1, 0) : inner + 2]))
        axes.annotate(text, at, xytext=(0, 20), ha="center", fontweight="bold", fontsize=10, **side)
    else:
        at = (x[0], max(start) if above else min(start))
        axes.annotate(text, at, xytext=(-10, 19 * sign), ha="left", fontweight="bold", fontsize=10, **side)


def options(description: str | None = __doc__) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="the file to write (png, svg, pdf)")
    parser.add_argument("--json", type=Path, action="append", required=True, help="results; repeat it for several")
    return parser


def main(
    arguments: Sequence[str] | None = None,
    draw: Callable[[Sequence[CallRow], str], Any] = figure,
    description: str | None = __doc__,
) -> None:
    asked = options(description).parse_args(arguments)
    results = [read(file) for file in asked.json]
    timed = [row for result in results for row in result.rows if row.time_us is not None]
    machines = "; ".join(dict.fromkeys(result.machine for result in results))
    draw(timed, machines).savefig(asked.picture, dpi=150)


if __name__ == "__main__":
    main()
