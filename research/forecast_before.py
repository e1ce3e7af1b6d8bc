"""Predict the engine's runs of four or eight GPUs before they are made, and print measured beside predicted afterwards.

    python research/forecast_before.py --gpus 4 --json benchmarks/data/h200/forecast_before_x4.json
    python research/forecast_before.py --beside FOLDER --json benchmarks/data/h200/forecast_before_x4.json

Rows are those of the parts ``engine_*`` of ``research/measure.sh``. The first command writes what the planner
expects, with one standard deviation (``bars``: by the residuals of kernels and by the kept runs of other models), the
date and the commit. The second prints a Markdown table of the results in FOLDER that are younger than the forecast.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forecast
from engine_runs import ALGORITHMS, BARRED, METRICS, EngineRun, forecasts, systematic
from gpu_timing import write
from nccl_costs import NcclCosts

from shotcast.errors import ConfigError
from shotcast.hardware import cluster
from shotcast.planner.calibration import load
from shotcast.planner.step import Layout

RESULTS = Path(__file__).parents[1] / "benchmarks" / "data" / "h200"
PART, CLUSTER = "NVIDIA H200", "dgx-h200"
KEY = ("model", "quantization", "layout", "algorithm", "sequences", "most_sequences", "prompt", "output")
"""The fields that say which run a row is of."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The runs of a part: each algorithm on each layout with each number of sequences."""

    model: str
    layouts: tuple[str, ...]
    sequences: tuple[int, ...]
    algorithms: tuple[str, ...] = ("auto",)
    quantization: str = ""
    prompt: int = 512
    output: int = 128

    def runs(self) -> Iterator[EngineRun]:
        """Yield the runs, without values."""
        for layout in self.layouts:
            tensor, stages = map(int, layout.split("x"))
            for algorithm in self.algorithms:
                of = self.model, self.quantization, Layout(tensor, stages), ALGORITHMS[algorithm]
                for count in self.sequences:
                    yield EngineRun(*of, count, max(self.sequences), self.prompt, self.output, {}, {})


_8B, _70B, _405B = "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"
_BOTH, _COUNTS = ("auto", "nccl"), (1, 64, 256, 512)
PLANNED = {
    4: {
        "engine_8b": Planned(_8B, ("4x1",), (1, 64), _BOTH),
        "engine_70b": Planned(_70B, ("4x1",), (1, 64, 256), _BOTH),
        "engine_405b": Planned(_405B, ("4x1",), (1, 64), _BOTH, "fp8"),
        "engine_8b_x4": Planned(_8B, ("4x1", "2x2", "1x4"), _COUNTS),
        "engine_70b_x4": Planned(_70B, ("4x1", "2x2", "1x4"), _COUNTS),
        **{
            f"engine_405b_{layout}": Planned(_405B, (layout,), _COUNTS, quantization="fp8")
            for layout in ("4x1", "2x2", "1x4")
        },
    },
    8: {
        "engine_8b_x8": Planned(_8B, ("8x1",), _COUNTS),
        "engine_70b_x8": Planned(_70B, ("8x1",), _COUNTS),
        **{
            f"engine_405b_{layout}": Planned(_405B, (layout,), (1, 64, 512), quantization="fp8", prompt=2048)
            for layout in ("8x1", "4x2", "2x4", "1x8")
        },
    },
}
"""The runs of each part, by the number of GPUs."""


def predicted(gpus: int) -> list[dict[str, Any]]:
    """Return a row for each run of so many GPUs."""
    calibration = load(PART)
    collectives = NcclCosts.on(cluster.load(CLUSTER), calibration.link)
    kept = forecast.all_forecasts(RESULTS, PART, CLUSTER)
    planned = {run_key(run): run for part in PLANNED[gpus].values() for run in part.runs()}
    rows = []
    for each in forecasts(planned.values(), calibration, collectives, {}):
        others = [one for one in kept if one.run.family != each.run.family]
        bars = {metric: math.hypot(each.kernel_errors[metric], systematic(others, metric)) for metric in BARRED}
        rows.append(dict(zip(KEY, run_key(each.run), strict=True)) | dict(each.values) | {"bars": bars})
    return rows


def run_key(run: EngineRun) -> tuple[Any, ...]:
    """Return what says which run it is, as a row has it."""
    algorithm = next(name for name, of in ALGORITHMS.items() if of == run.algorithm)
    counts = run.sequences, run.most_sequences, run.prompt, run.output
    return run.model, run.quantization, str(run.layout), algorithm, *counts


def measured(folder: Path, since: str) -> dict[tuple[Any, ...], Mapping[str, float]]:
    """Return the rows of the results in a folder that are younger than ``since``, by what says which run they are.

    Raises:
        ConfigError: a file is no result.
    """
    found: dict[tuple[Any, ...], Mapping[str, float]] = {}
    for file in sorted(folder.glob("engine*.json")):
        try:
            result = json.loads(file.read_text())
            if datetime.datetime.fromisoformat(result["date"]) <= datetime.datetime.fromisoformat(since):
                continue
            most = max(row["batch"] for row in result["rows"])
            for row in result["rows"]:
                of = row["model"].removeprefix("random:"), row["quantization"], row["layout"], row["algorithm"]
                found[*of, row["batch"], most, row["prompt"], row["output"]] = row
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file} is no result of shotcast bench engine: {error!r}") from error
    return found


def table(before: Mapping[str, Any], folder: Path) -> str:
    """Return a Markdown table of a forecast and, where there are any, the measured values of a folder."""
    values = measured(folder, before["date"])
    titles = [
        "model",
        "layout",
        "sums",
        "sequences",
        *(f"{forecast.TITLES[name]}{', ms' * name.endswith('_ms')}" for name in METRICS),
    ]
    lines = [f"Expected at commit {before['environment']['commit'][:10]} on {before['date']}; measured (error).", ""]
    lines += [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for row in before["rows"]:
        found = values.get(tuple(row[name] for name in KEY))
        cells = [row["model"].removeprefix("llama-3.1-"), row["layout"], row["algorithm"], str(row["sequences"])]
        for name in METRICS:
            cell = f"{row[name]:.4g}"
            if name in row["bars"]:
                cell += f" ± {row['bars'][name]:.0%}"
            if found is not None:
                cell += f"; {found[name]:.4g} ({row[name] / found[name] - 1:+.0%})"
            cells.append(cell)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def commit() -> str:
    """Return the last commit of src and research.

    Raises:
        ConfigError: files differ from the repository's, or are in none.
    """
    git = ("git", "-C", str(Path(__file__).parents[1]))
    try:
        changes, head = (
            subprocess.run([*git, *of], capture_output=True, text=True, check=True).stdout.strip()
            for of in (
                ("status", "--porcelain", "--untracked-files=no"),
                ("log", "-1", "--format=%H", "--", "src", "research"),
            )
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(f"a forecast names its commit, and git does not: {error}") from error
    if changes or not head:
        raise ConfigError(f"a forecast names its commit, which lacks these changes: {changes}")
    return head


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, choices=tuple(PLANNED), default=4)
    parser.add_argument("--json", type=Path, required=True, help="the file of the forecast")
    parser.add_argument("--beside", type=Path, help="print the forecast beside the results in this folder")
    return parser


def main(arguments: Iterable[str] | None = None) -> None:
    asked = options().parse_args(None if arguments is None else list(arguments))
    if asked.beside is not None:
        print(table(json.loads(asked.json.read_text()), asked.beside), end="")
        return
    known = dict(load(PART).kernels)
    facts: dict[str, Any] = {"commit": commit(), "part": PART, "cluster": CLUSTER}
    write(asked.json, predicted(asked.gpus), known, **facts)


if __name__ == "__main__":
    main()
