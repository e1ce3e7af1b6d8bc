"""Pictures of the strong-scaling study: data first, then one way to draw them.

A picture's data are made of the rows of which the tables are made, are all that is drawn, and are kept in the file
itself, as its description, so that a test can hold a committed picture against the page's tables.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from published_layouts import PUBLISHED_LAYOUTS, LayoutRow, name_of
from published_stages import StageRow, curves
from scaling_over_nodes import HYBRID, MODELS, PP, SEQUENCES, TP, TP_NCCL, WORK, ScalingRow, case
from sums_over_nodes import CLUSTERS, PUBLISHED_GAIN, SIZES, NodeSumRow

from shotcast.bench.plot import COLORS
from shotcast.planner.plan import Plan
from shotcast.units import format_size

GREY, BLUE, ORANGE, PURPLE, RED = "#7f7f7f", "#1f77b4", "#ff7f0e", "#9467bd", "#d62728"
OTHERS = "#d9d9d9"
"""Curves of this color have no name in the legend."""
GREEN = COLORS["nccl"]
SHORT = {"h200-x4-ndr": "H200, InfiniBand NDR", "a100-x4-slingshot": "A100, Slingshot-11"}
_DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one name; a dashed line is what others published, answered or sum by."""

    name: str
    color: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves in one pair of axes, or bars side by side where the places on the x axis have names.

    Attributes:
        places: names of x = 0, 1, ...
        band: what is published, a range of y.
        log: the axes that are logarithmic, "", "x" or "xy".
    """

    title: str
    x: str
    y: str
    curves: tuple[Curve, ...]
    places: tuple[str, ...] = ()
    band: tuple[float, float] | None = None
    log: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """A file of panels, so many beside each other."""

    name: str
    title: str
    columns: int
    panels: tuple[Panel, ...]

    def data(self) -> dict[str, Any]:
        """Return all that is drawn, in JSON's types and five digits."""
        rounded: dict[str, Any] = json.loads(
            json.dumps(asdict(self)), parse_float=lambda text: float(f"{float(text):.5g}")
        )
        return rounded


def layouts_picture(rows: Sequence[LayoutRow]) -> Picture:
    """Return tokens/s of 405B by layout, of one sequence and of many."""
    panels = []
    for number, title in enumerate(("one sequence", "most tokens/s")):
        ours = [row.most.tokens_per_s if number else row.alone for row in rows]
        published = [(place, PUBLISHED_LAYOUTS[row.layout][number]) for place, row in enumerate(rows) if row.published]
        curves = (
            Curve("published", GREY, tuple(published), dashed=True),
            Curve("predicted", BLUE, tuple(enumerate(ours))),
            Curve("AIConfigurator", ORANGE, tuple((place, row.external[number]) for place, row in enumerate(rows))),
        )
        panels.append(Panel(title, "", "tokens/s", curves, tuple(name_of(row.layout) for row in rows)))
    return Picture("layouts_405b", "405B FP8 on 8 H200, 2048 tokens in, 128 out", 2, tuple(panels))


def pareto_picture(planned: Plan) -> Picture:
    """Return tokens/s of a GPU over tokens/s of a user: layouts that lead somewhere, the others in grey."""
    leading = list(dict.fromkeys((point.layout, point.engines) for point in planned.pareto()))
    colors = dict(zip(leading, (BLUE, ORANGE, GREEN, PURPLE, RED, "#8c564b", "#e377c2", "#17becf"), strict=False))
    curves = []
    for layout, engines in dict.fromkeys((point.layout, point.engines) for point in planned.points):
        points = [point for point in planned.points if (point.layout, point.engines) == (layout, engines)]
        label = name_of(layout) + (f" x {engines} engines" if engines > 1 else "")
        at = tuple((point.tokens_per_s_per_user, point.tokens_per_s_per_gpu) for point in points)
        curves.append(Curve(label, colors.get((layout, engines), OTHERS), at))
    panel = Panel("", "tokens/s of a user", "tokens/s of a GPU", tuple(curves))
    return Picture("pareto_405b", "405B FP8 on 8 H200, 2048 tokens in, 128 out, predicted", 1, (panel,))


def stages_picture(rows: Sequence[StageRow]) -> Picture:
    """Return throughput over that of as many single stages."""
    colors = (GREY, "#b0b0b0", ORANGE, "#ffbb78", BLUE, PURPLE, RED)
    found = []
    for color, (name, values) in zip(colors, curves(rows).items(), strict=True):
        points = tuple((row.stages, value / row.stages) for row, value in zip(rows, values, strict=True))
        found.append(Curve(name, color, points, dashed=not name.startswith(("predicted", "simulated"))))
    panel = Panel("", "stages", "throughput, part of ideal", tuple(found), log="x")
    return Picture("stages_70b", "70B, 2048 tokens in, 128 out, by stages", 1, (panel,))


def gains_picture(rows: Sequence[NodeSumRow]) -> Picture:
    """Return NCCL's time over ours by nodes, a curve for each size."""
    panels = []
    for name in CLUSTERS:
        found = []
        for color, nbytes in zip((BLUE, PURPLE, RED), SIZES, strict=True):
            of_size = [row for row in rows if (row.cluster, row.nbytes) == (name, nbytes)]
            found.append(Curve(format_size(nbytes), color, tuple((row.nodes, row.gain) for row in of_size)))
            narrow = tuple((row.nodes, row.narrow_gain) for row in of_size)
            found.append(Curve(f"{format_size(nbytes)}, sums in 16 bits", color, narrow, dashed=True))
        panel = Panel(SHORT[name], "nodes of 4 GPUs", "NCCL over ours", tuple(found), band=PUBLISHED_GAIN, log="x")
        panels.append(panel)
    return Picture("nvrar_gain", "An all-reduce over nodes: gain over NCCL, predicted", 2, tuple(panels))


def scaling_picture(rows: Sequence[ScalingRow], name: str) -> Picture:
    """Return seconds of a batch by nodes on one cluster: both models, both kinds of work."""
    styles = {TP_NCCL: (GREEN, True), TP: (BLUE, False), HYBRID: (PURPLE, False), PP: (ORANGE, False)}
    panels = []
    for model in MODELS:
        for work, (prompt, output) in WORK.items():
            found = case(rows, name, model, work)
            lines = []
            for form, (color, dashed) in styles.items():
                points = tuple((row.nodes, row.seconds[form]) for row in found if form in row.seconds)
                lines.append(Curve(form if dashed else f"{form}, ours", color, points, dashed))
            title = f"{model.removeprefix('llama-3.1-').upper()}, {prompt} in, {output} out ({work})"
            panels.append(Panel(title, "nodes of 4 GPUs", f"seconds of {SEQUENCES} requests", tuple(lines), log="xy"))
    file = f"strong_scaling_{name.rpartition('-')[2]}"
    return Picture(file, f"Strong scaling on {SHORT[name]}, predicted", 2, tuple(panels))


def figure(picture: Picture) -> Any:
    """Return the matplotlib figure of a picture."""
    import matplotlib.figure

    rows = -(-len(picture.panels) // picture.columns)
    drawn = matplotlib.figure.Figure(figsize=(4.6 * max(picture.columns, 1.5), 3.4 * rows + 1.2), layout="constrained")
    grid = drawn.subplots(rows, picture.columns, squeeze=False)
    for axes, panel in zip(grid.flat, picture.panels, strict=True):
        (_bars if panel.places else _curves)(axes, panel)
        axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        axes.grid(which="major", color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    drawn.suptitle(picture.title, fontweight="bold")
    handles, labels = grid[0][0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3), frameon=False, fontsize=9)
    return drawn


def _bars(axes: Any, panel: Panel) -> None:
    width = 0.8 / len(panel.curves)
    for number, curve in enumerate(panel.curves):
        shift = (number - (len(panel.curves) - 1) / 2) * width
        bars = axes.bar([x + shift for x, _ in curve.points], [y for _, y in curve.points], width, color=curve.color)
        bars.set_label(curve.name)
        axes.bar_label(bars, fmt="{:.0f}", fontsize=8)
    axes.set_xticks(range(len(panel.places)), panel.places)


def _curves(axes: Any, panel: Panel) -> None:
    import matplotlib.ticker

    if panel.band is not None:
        axes.axhspan(*panel.band, color="#eeeeee", label="{} to {} published".format(*panel.band))
    for curve in panel.curves:
        xs, ys = [x for x, _ in curve.points], [y for _, y in curve.points]
        style, name = "--o" if curve.dashed else "-o", curve.name if curve.color != OTHERS else ""
        axes.plot(xs, ys, style, color=curve.color, label=name, markersize=3, linewidth=1.5)
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        if name in panel.log:
            axes.set(**{f"{name}scale": "log"})
            axis.set_major_locator(matplotlib.ticker.LogLocator(base=2, subs=(1.0,) if name == "x" else (1.0, 1.5)))
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_locator(matplotlib.ticker.NullLocator())


def write(pictures: Mapping[str, Picture], folder: Path) -> None:
    """Write every picture as an SVG of its name, with its data as the description."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "shotcast"}):
        for name, picture in pictures.items():
            metadata = {"Date": None, "Title": picture.title, "Description": json.dumps(picture.data())}
            figure(picture).savefig(folder / f"{name}.svg", metadata=metadata)


def kept_data(path: Path) -> dict[str, Any]:
    """Return the data of a written picture."""
    (description,) = xml.etree.ElementTree.parse(path).iter(_DESCRIPTION)
    found: dict[str, Any] = json.loads(description.text or "")
    return found
