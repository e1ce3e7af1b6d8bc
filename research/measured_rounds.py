"""Calls followed rank by rank beside measured ones, and print them as a Markdown table.

    python research/measured_rounds.py [--fill research/reports/planner_accuracy.md]

Rings on 2 and 4 H200 are followed with the packaged calibration. Between hosts (simulated ones, 5 ms and 2 Gbit/s
apart, ``benchmarks/data/cpu/hosts_*_5ms_2gbit.json``) the time of a step and the bandwidth are fitted to 2 hosts, and 4
and 8 are predicted: our own forms of NVRAR, and Gloo's ring, whose steps each take a message there and one back.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import forecast
import numpy as np
from rounds.ranks import CollectiveCall, Fabric, end_times

from shotcast.cost.collective import LinkCost, NetworkCost
from shotcast.planner.calibration import load
from shotcast.wire import NodeShape

DATA = Path(__file__).parents[1] / "benchmarks" / "data"
MARK, END = "<!-- research/measured_rounds.py -->", "<!-- end of measured rounds -->"
FORMS = ("nvrar", "nvrar_halving", "nvrar_pairs", "nvrar_two_shot")
BUSY = 256 << 10
"""Beyond this 8 hosts keep the 2 cores of the machine busy, and wait for these."""


class Fitted(NamedTuple):
    """The network between two hosts, and the root mean square of the relative errors of the fit."""

    network: NetworkCost
    residual: float


class Followed(NamedTuple):
    """A measured call, and the time that it takes in the simulation."""

    algorithm: str
    nbytes: int
    time_us: float
    followed_us: float

    @property
    def error(self) -> float:
        return self.followed_us / self.time_us - 1


def hosts(number: int, gloo: bool) -> list[tuple[str, int, float]]:
    """Return the calls that were measured between so many hosts: algorithm, bytes and microseconds."""
    rows = json.loads((DATA / "cpu" / f"hosts_{number}_5ms_2gbit.json").read_text())["rows"]
    names = ("gloo",) if gloo else FORMS
    return [(row["algorithm"], row["nbytes"], row["time_us"]) for row in rows if row["algorithm"] in names]


def call_of(algorithm: str, nbytes: int, number: int) -> CollectiveCall:
    """Return the call of an algorithm between hosts of one rank each; Gloo's is a ring."""
    return CollectiveCall.all_reduce("ring" if algorithm == "gloo" else algorithm, nbytes, NodeShape(number, 1), 4)


def fitted(gloo: bool) -> Fitted:
    """Return the time of a step and the bandwidth by which two hosts are nearest to what was measured."""
    measured = hosts(2, gloo)
    rounds = [call_of(algorithm, nbytes, 2).rounds for algorithm, nbytes, _ in measured]
    matrix = np.array(
        [
            [len(each) / time_us, sum(one.nbytes for one in each) / 1e3 / time_us]
            for each, (_, _, time_us) in zip(rounds, measured, strict=True)
        ]
    )
    (step_us, per_bw), *_ = np.linalg.lstsq(matrix, np.ones(len(measured)), rcond=None)
    errors = matrix @ np.array([step_us, per_bw]) - 1
    return Fitted(NetworkCost(float(step_us), float(1 / per_bw)), float(np.sqrt(np.mean(errors**2))))


def between_hosts(number: int, gloo: bool) -> list[Followed]:
    """Return calls between so many hosts, followed with the constants of two."""
    fabric = Fabric(LinkCost(0.0, 0.0, np.inf), fitted(gloo).network)
    return [
        Followed(name, nbytes, time_us, max(end_times(call_of(name, nbytes, number), fabric)))
        for name, nbytes, time_us in hosts(number, gloo)
    ]


def rings(ranks: int) -> list[Followed]:
    """Return our rings on H200, followed with the packaged calibration."""
    fabric = Fabric(load("NVIDIA H200").link)
    rows = json.loads((DATA / "h200" / f"all_reduce_bf16_x{ranks}.json").read_text())["rows"]
    return [
        Followed(
            "ring",
            row["nbytes"],
            row["time_us"],
            max(end_times(CollectiveCall.all_reduce("ring", row["nbytes"], NodeShape(1, ranks)), fabric)),
        )
        for row in rows
        if row["algorithm"] == "ring"
    ]


def table() -> str:
    """Return the mean and the largest errors as a Markdown table."""
    lines = [
        "| calls | ranks | messages | mean error | largest | residual of the constants |",
        "|---|---|---|---|---|---|",
    ]

    def add(name: str, ranks: int, found: list[Followed], messages: str, residual: float) -> None:
        errors = [abs(each.error) for each in found]
        cells = [name, str(ranks), messages, f"{fmean(errors):.1%}", f"{max(errors):.1%}", f"{residual:.1%}"]
        lines.append(f"| {' | '.join(cells)} |")

    for ranks in (2, 4):
        add("our ring, H200", ranks, rings(ranks), "1 KiB to 256 MiB", load("NVIDIA H200").link_residual)
    for gloo, name in ((True, "Gloo's ring, hosts"), (False, "forms of NVRAR, hosts")):
        residual = fitted(gloo).residual
        for number in (2, 4, 8):
            found = between_hosts(number, gloo)
            if number == 8:
                add(name, number, [each for each in found if each.nbytes <= BUSY], "4 to 256 KiB", residual)
                add(name, number, [each for each in found if each.nbytes > BUSY], "1 MiB", residual)
            else:
                add(name, number, found, "4 KiB to 1 MiB", residual)
    return "\n".join(lines) + "\n"


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fill", type=Path, default=None)
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.fill is None:
        print(table(), end="")
    else:
        options.fill.write_text(forecast.filled(options.fill.read_text(), table(), MARK, END))


if __name__ == "__main__":
    main()
