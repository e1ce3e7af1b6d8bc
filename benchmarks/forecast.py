"""Predict the kept runs of the engine, and print measured beside predicted figures as a Markdown table.

    python benchmarks/forecast.py [--folder benchmarks/data/h200] [--part "NVIDIA H200"] [--cluster dgx-h200]

The constants are those of the calibration of PART, which no run of an engine was fitted to. ``--fill PAGE`` puts the
table into a document, between its markers.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

from shotcast.errors import ConfigError
from shotcast.hardware import cluster
from shotcast.planner.calibration import load
from shotcast.planner.collectives import CollectiveCosts
from shotcast.simulator.engine_runs import METRICS, error_bar, other_kernels, predict, runs

BEGIN, END = "<!-- benchmarks/forecast.py -->", "<!-- end of forecast -->"
TITLES = {
    "ttft_ms": "first token, ms",
    "tpot_ms": "each later token, ms",
    "itl_ms": "between tokens, median, ms",
    "tokens_per_s": "tokens/s",
}


def tables(folder: Path, part: str, cluster_name: str) -> str:
    """Return the table of runs, and that of the errors."""
    calibration = load(part)
    collectives = CollectiveCosts.on(cluster.load(cluster_name), calibration.link)
    lines = [
        "| model | layout | sequences | first token, ms | | each later token, ms | | error bar | tokens/s | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    errors: dict[str, list[float]] = {name: [] for name in METRICS}
    others: Counter[str] = Counter()
    for run in runs(folder):
        others.update(other_kernels(run, calibration))
        found = predict(run, calibration, collectives)
        for name in METRICS:
            errors[name].append(found[name] / run.values[name] - 1)
        cells = [f"{run.model.removeprefix('llama-3.1-')}{' FP8' if run.quantization else ''}"]
        cells += [str(run.layout), str(run.sequences)]
        for name, unit in (("ttft_ms", 1), ("tpot_ms", 2), ("tokens_per_s", 0)):
            cells += [f"{run.values[name]:.{unit}f}", f"{found[name]:.{unit}f} ({errors[name][-1]:+.0%})"]
            if name == "tpot_ms":
                cells.append(f"{error_bar(run, calibration, collectives):.0%}")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| | runs | mean error | largest |", "|---|---|---|---|"]
    for name in METRICS:
        sizes = [abs(error) for error in errors[name]]
        lines.append(f"| {TITLES[name]} | {len(sizes)} | {fmean(sizes):.0%} | {max(sizes):.0%} |")
    listed = ", ".join(f"`{name}` in {count}" for name, count in sorted(others.items()))
    lines += ["", f"Kernels that runs had in another version than the calibration: {listed or 'none'}."]
    return "\n".join(lines) + "\n"


def filled(page: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """Return a page with the table between its markers. Raises ConfigError if it has none."""
    pattern = re.compile(f"({re.escape(begin)}\n).*?({re.escape(end)})", re.DOTALL)
    if not pattern.search(page):
        raise ConfigError(f"the page has no {begin} with {end} after it")
    return pattern.sub(lambda found: found[1] + table + found[2], page)


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "data" / "h200")
    parser.add_argument("--part", default="NVIDIA H200")
    parser.add_argument("--cluster", default="dgx-h200")
    parser.add_argument("--fill", type=Path, default=None)
    options = parser.parse_args(None if arguments is None else list(arguments))
    table = tables(options.folder, options.part, options.cluster)
    if options.fill is None:
        print(table, end="")
    else:
        options.fill.write_text(filled(options.fill.read_text(), table))


if __name__ == "__main__":
    main()
