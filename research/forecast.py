"""Predict the kept runs of the engine and kept tables of collectives, and print what was measured and predicted.

    python research/forecast.py [--fill PAGE]

The constants are those of the packaged calibrations, which no run of an engine was fitted to. ``--fill`` puts the
tables into a document, between their markers.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from engine_runs import BARRED, METRICS, Forecast, error_bars, forecasts, runs
from nccl_costs import NcclCosts

from shotcast.collectives.registry import registered
from shotcast.cost.collective import time_us
from shotcast.errors import ConfigError
from shotcast.hardware import cluster
from shotcast.planner.calibration import FUSED_NORM, Calibration, load
from shotcast.wire import DTYPES, NodeShape, Op

TITLES = {
    "ttft_ms": "first token",
    "tpot_ms": "each later token",
    "itl_ms": "between tokens, median",
    "tokens_per_s": "tokens/s",
}
HELD_OUT = (
    "all_reduce_f32_x2.json",
    "all_reduce_f32_x4.json",
    "all_reduce_f16_x2.json",
    "all_reduce_f16_x4.json",
    "exploration/reduce_scatter_8_warps_x2.json",
    "reduce_scatter_bf16_x4.json",
    "all_gather_bf16_x2.json",
    "all_gather_bf16_x4.json",
    "fused_bf16_x4.json",
)
"""Tables of collectives that the link's constants were not fitted to; of fused sums, those of the norm were."""
DATA = Path(__file__).parents[1] / "benchmarks" / "data"
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
FOLDERS = {H100: "h100", H200: "h200"}
OWN = ("one_shot", "two_shot", "ring")
SAME, OTHER_SUMS, OTHER = "same", "other sums", "other"
_FUSED = "all_reduce_rms_norm"


class CallError(NamedTuple):
    """A measured call: its table, operation, ranks and bytes, and the relative error of the prediction."""

    table: str
    op: str
    dtype: str
    ranks: int
    nbytes: int
    error: float


def call_errors(folder: Path, calibration: Calibration, tables: Iterable[str] = HELD_OUT) -> list[CallError]:
    """Return the errors of all calls of our kernels in tables of collectives."""
    found = []
    for table in tables:
        for row in json.loads((folder / table).read_text())["rows"]:
            if row["algorithm"] in OWN and row["measure"] == "call":
                predicted_us = _call_us(row, calibration)
                of = row["op"], row["dtype"], row["world_size"], row["nbytes"]
                found.append(CallError(table, *of, predicted_us / row["time_us"] - 1))
    return found


def _call_us(row: Mapping[str, object], calibration: Calibration) -> float:
    fused = row["op"] == _FUSED
    form = registered()[str(row["algorithm"])].forms[Op.ALL_REDUCE if fused else Op[str(row["op"]).upper()]]
    nbytes = int(str(row["nbytes"]))
    work = form.work(nbytes, NodeShape(1, int(str(row["world_size"]))), DTYPES[str(row["dtype"])])
    sum_us = time_us(work, calibration.link)
    return calibration.fused_norms[FUSED_NORM].cost.time_us(nbytes, sum_us) if fused else sum_us


def known_kernels(folder: Path, calibration: Calibration) -> dict[str, set[str]]:
    """Return the fingerprints of each kernel in the results that a calibration was fitted to."""
    known: dict[str, set[str]] = {}
    for source in calibration.sources:
        file = folder / source
        kernels = json.loads(file.read_text()).get("kernels", {}) if file.suffix == ".json" and file.is_file() else {}
        for name, version in kernels.items():
            known.setdefault(name, set()).add(version)
    return known


@cache
def all_forecasts(folder: Path, part: str, cluster_name: str, algorithm: str = "auto") -> list[Forecast]:
    """Return the predictions of all kept runs by the calibration of ``part``, scaled to the cluster's GPU."""
    described = cluster.load(cluster_name)
    calibration = load(part).scaled_to(described.gpu)
    collectives = NcclCosts.on(described, calibration.link)
    return forecasts(
        runs(folder, algorithm), calibration, collectives, known_kernels(DATA / FOLDERS[part], calibration)
    )


def tables() -> dict[str, str]:
    """Return all tables by the names of their markers."""
    folder = DATA / FOLDERS[H200]
    own, library = (all_forecasts(folder, H200, "dgx-h200", algorithm) for algorithm in ("auto", "nccl"))
    elsewhere = {
        "its own": all_forecasts(DATA / FOLDERS[H100], H100, "dgx-h100"),
        "the H200's, by data sheets": all_forecasts(DATA / FOLDERS[H100], H200, "dgx-h100"),
    }
    return tables_of(own, library, call_errors(folder, load(H200)), elsewhere)


def tables_of(
    own: Sequence[Forecast],
    library: Sequence[Forecast],
    calls: Sequence[CallError],
    elsewhere: Mapping[str, Sequence[Forecast]],
) -> dict[str, str]:
    """Return all tables.

    Args:
        own, library: runs with our sums, and with the library's.
        calls: of collectives.
        elsewhere: the predictions of runs on another GPU, by the name of the constants.
    """
    return {
        "runs": runs_table(own, {metric: error_bars(own, metric) for metric in BARRED}),
        "errors": errors_table(own, library),
        "bars": bars_table(own),
        "collectives": collectives_table(calls),
        "H100": elsewhere_table(elsewhere),
    }


def runs_table(found: Sequence[Forecast], bars: Mapping[str, Sequence[float]]) -> str:
    """Return a row for each run, with measured and predicted times and error bars."""
    titles = ["model", "layout", "sequences", "first token, ms", "", "bar", "each later token, ms", "", "bar"]
    titles += ["tokens/s", "", "kernels"]
    lines = [f"| {' | '.join(titles)} |".replace("  ", " "), f"|{'---|' * len(titles)}"]
    for number, each in enumerate(found):
        run = each.run
        cells = [f"{run.model.removeprefix('llama-3.1-')}{' FP8' if run.quantization else ''}"]
        cells += [str(run.layout), str(run.sequences)]
        for name, digits in (("ttft_ms", 1), ("tpot_ms", 2), ("tokens_per_s", 0)):
            cells += [f"{run.values[name]:.{digits}f}", f"{each.values[name]:.{digits}f} ({each.error(name):+.0%})"]
            cells += [f"{bars[name][number]:.0%}"] if name in bars else []
        lines.append(f"| {' | '.join([*cells, kernels_of(each)])} |")
    counts = Counter(name for each in found for name in each.others)
    listed = ", ".join(f"`{name}` in {count}" for name, count in sorted(counts.items()))
    return "\n".join([*lines, "", f"Kernels in another version: {listed or 'none'}."]) + "\n"


def kernels_of(each: Forecast) -> str:
    """Return whether a run had the kernels that the constants were measured with, or all of them but sums."""
    if all("/" in name for name in each.others):
        return OTHER_SUMS if each.others else SAME
    return OTHER


def errors_table(own: Sequence[Forecast], library: Sequence[Forecast]) -> str:
    """Return mean and largest errors of groups of runs."""
    groups: dict[str, Callable[[Forecast], bool]] = {
        "all": lambda each: True,
        "one GPU": lambda each: each.run.layout.ranks == 1,
        "several GPUs": lambda each: each.run.layout.ranks > 1,
        "one sequence": lambda each: each.run.sequences == 1,
        "8B": lambda each: each.run.family.endswith("8b"),
        "70B": lambda each: each.run.family.endswith("70b"),
        "405B": lambda each: each.run.family.endswith("405b"),
        "the same kernels": lambda each: kernels_of(each) == SAME,
        "the same but for sums": lambda each: kernels_of(each) == OTHER_SUMS,
        "other kernels": lambda each: kernels_of(each) == OTHER,
    }
    titles = [f"{title}: mean, largest" for title in TITLES.values()]
    lines = [f"| runs | | {' | '.join(titles)} |", f"|---|---|{'---|' * len(titles)}"]
    for title, belongs in groups.items():
        lines += _errors_row(title, [each for each in own if belongs(each)])
    lines += _errors_row("sums by NCCL", library)
    return "\n".join(lines) + "\n"


def elsewhere_table(found: Mapping[str, Sequence[Forecast]]) -> str:
    """Return mean and largest errors of the same runs by other constants."""
    titles = [f"{title}: mean, largest" for title in TITLES.values()]
    lines = [f"| constants | runs | {' | '.join(titles)} |", f"|---|---|{'---|' * len(titles)}"]
    for constants, own in found.items():
        lines += _errors_row(constants, own)
    return "\n".join(lines) + "\n"


def _errors_row(title: str, found: Sequence[Forecast]) -> list[str]:
    if not found:
        return []
    cells = []
    for name in METRICS:
        sizes = [abs(each.error(name)) for each in found]
        cells.append(f"{fmean(sizes):.0%}, {max(sizes):.0%}")
    return [f"| {title} | {len(found)} | {' | '.join(cells)} |"]


def bars_table(found: Sequence[Forecast]) -> str:
    """Return how many runs lie within one and two error bars, for each model, which had no part in its bars."""
    families = sorted({each.run.family for each in found}, key=lambda name: (len(name), name))
    lines = ["| model | | first token: within 1 bar | 2 bars | each later token: within 1 bar | 2 bars |"]
    lines.append("|---|---|---|---|---|---|")
    bars = {metric: error_bars(found, metric) for metric in BARRED}
    for family in (*families, ""):
        members = [number for number, each in enumerate(found) if not family or each.run.family == family]
        cells = [
            str(sum(abs(found[number].error(metric)) <= width * bars[metric][number] for number in members))
            for metric in BARRED
            for width in (1, 2)
        ]
        title = family.removeprefix("llama-3.1-") or "all"
        lines.append(f"| {title} | {len(members)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def collectives_table(found: Sequence[CallError]) -> str:
    """Return mean and largest errors of each table of collectives."""
    grouped: dict[tuple[str, str, int], list[float]] = {}
    for each in found:
        grouped.setdefault((each.op, each.dtype, each.ranks), []).append(each.error)
    lines = ["| operation | dtype | ranks | calls | mean error | largest |", "|---|---|---|---|---|---|"]
    for (op, dtype, ranks), errors in grouped.items():
        sizes = [abs(error) for error in errors]
        cells = [op.replace("_", "-"), dtype, str(ranks), str(len(sizes)), f"{fmean(sizes):.1%}", f"{max(sizes):.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def filled(page: str, table: str, begin: str, end: str) -> str:
    """Return a page with the table between its markers. Raises ConfigError if it has none."""
    pattern = re.compile(f"({re.escape(begin)}\n).*?({re.escape(end)})", re.DOTALL)
    if not pattern.search(page):
        raise ConfigError(f"the page has no {begin} with {end} after it")
    return pattern.sub(lambda found: found[1] + table + found[2], page)


def with_tables(page: str, made: Mapping[str, str]) -> str:
    """Return a page with all tables between their markers. Raises ConfigError if it lacks any."""
    for name, table in made.items():
        page = filled(page, table, f"<!-- research/forecast.py {name} -->", f"<!-- end of {name} -->")
    return page


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fill", type=Path, default=None, metavar="PAGE")
    options = parser.parse_args(None if arguments is None else list(arguments))
    made = tables()
    if options.fill is None:
        print("\n".join(made.values()), end="")
    else:
        options.fill.write_text(with_tables(options.fill.read_text(), made))


if __name__ == "__main__":
    main()
