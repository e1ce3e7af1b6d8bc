"""The model's constants choose well for the measurements in the repository."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path

import pytest

from predicted import predicted_us
from shotcast.cost.collective import NVLINK4, LinkCost

DATA = Path(__file__).parents[2] / "benchmarks/data/h200"
OWN = ("one_shot", "two_shot", "ring")


Row = tuple[str, str, int, int, float]
"""Operation, algorithm, bytes, ranks and microseconds of a measurement."""


def measured(name: str) -> list[Row]:
    return [
        (row["op"], row["algorithm"], row["nbytes"], row["world_size"], row["time_us"])
        for row in json.loads((DATA / name).read_text())["rows"]
        if row["algorithm"] in OWN and row["time_us"] is not None
    ]


@pytest.mark.parametrize("name", sorted(file.name for file in DATA.glob("all_reduce_*_x?.json")))
def test_a_choice_by_the_model_costs_little_more_than_the_best(name: str) -> None:
    by_size: dict[int, dict[str, float]] = defaultdict(dict)
    for op, algorithm, nbytes, world_size, time_us in measured(name):
        if algorithm != "ring" or world_size == 2 or op == "all_gather":  # others have other bits: auto takes none
            by_size[nbytes][algorithm] = time_us
    assert by_size
    for nbytes, times in by_size.items():
        op, _, _, world_size, _ = measured(name)[0]
        taken = min(times, key=lambda algorithm: predicted_us(op, algorithm, nbytes, world_size, NVLINK4))
        assert times[taken] <= 1.15 * min(times.values()), f"{nbytes} bytes: {taken} of {times}"


def test_without_local_work_nothing_is_added() -> None:
    link = LinkCost(1.0, 2.0, 3.0)
    assert link.local_gbps == math.inf
    assert predicted_us("all_gather", "one_shot", 6000, 2, link) == pytest.approx(1 + 2 + 1)
