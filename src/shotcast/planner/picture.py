"""The Pareto plot of a plan: tokens/s per GPU over tokens/s per user, with one curve per layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shotcast.planner.plan import Plan, Point


def draw(plan: Plan, path: Path) -> None:
    """Plot the points of a plan to a file, in the format of its suffix."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    front = plan.pareto()
    leading = {(point.layout, point.engines) for point in front}
    others = "the others"

    def curve(points: list[Point], **style: Any) -> None:
        users = [point.tokens_per_s_per_user for point in points]
        axes.plot(users, [point.tokens_per_s_per_gpu for point in points], **style)

    for layout, engines in dict.fromkeys((point.layout, point.engines) for point in plan.points):
        points = [point for point in plan.points if (point.layout, point.engines) == (layout, engines)]
        leads = (layout, engines) in leading
        # colours and names for those alone that are on the front: plans have dozens of layouts
        style: dict[str, Any] = {"marker": "o", "zorder": 2.0} if leads else {"color": "lightgrey", "zorder": 1.0}
        label = f"{layout.label}{f' x {engines}' if engines > 1 else ''}" if leads else others
        curve(points, markersize=3, linewidth=1, label=label, **style)
        if not leads:
            others = ""  # named once
    curve(front, color="black", linewidth=3, alpha=0.25, label="Pareto")
    query = plan.query
    axes.set_xlabel("tokens/s of a user")
    axes.set_ylabel("tokens/s of a GPU")
    axes.set_title(f"{query.name} {plan.precision}, {query.gpus} x {query.cluster.gpu.name}, predicted")
    axes.legend(fontsize=7, ncols=2)
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
