"""The model's constants come from the measurements in the repository, and choose well for them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predicted import predicted_us, work_of
from shotcast.cost.calibration import Measured, fit
from shotcast.cost.collective import NVLINK4, LinkCost
from shotcast.errors import ConfigError

DATA = Path(__file__).parents[2] / "benchmarks/data/h200"
FITTED = ("all_reduce_bf16_x4.json", "all_reduce_bf16_x2.json")
OWN = ("one_shot", "two_shot", "ring")


Row = tuple[str, str, int, int, float]
"""Operation, algorithm, bytes, ranks and microseconds of a measurement."""


def point(op: str, algorithm: str, nbytes: int, world_size: int, time_us: float) -> Measured:
    return Measured(work_of(op, algorithm, nbytes, world_size), time_us)


def measured(name: str) -> list[Row]:
    return [
        (row["op"], row["algorithm"], row["nbytes"], row["world_size"], row["time_us"])
        for row in json.loads((DATA / name).read_text())["rows"]
        if row["algorithm"] in OWN and row["time_us"] is not None
    ]


def test_constants_are_those_of_the_data() -> None:
    found = fit([point(*row) for name in FITTED for row in measured(name)])
    for field in dataclasses.fields(LinkCost):
        if field.name in ("sm_gbps", "engine_gbps"):
            continue  # these are not fitted
        given_, fitted = getattr(NVLINK4, field.name), getattr(found, field.name)
        assert given_ == pytest.approx(fitted, rel=0.02), f"NVLINK4 should be {found}"


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


@given(
    st.builds(
        LinkCost,
        fixed_us=st.floats(0.5, 10),
        step_us=st.floats(0.5, 10),
        bw_gbps=st.floats(10, 1000),
        local_gbps=st.floats(10, 1000),
    )
)
def test_a_machine_that_obeys_the_model_is_found(link: LinkCost) -> None:
    points = [
        point("all_reduce", algorithm, nbytes, n, predicted_us("all_reduce", algorithm, nbytes, n, link))
        for algorithm in OWN
        for nbytes in (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28)
        for n in (2, 4)
    ]
    found = fit(points)
    for field in dataclasses.fields(LinkCost):
        assert getattr(found, field.name) == pytest.approx(getattr(link, field.name), rel=1e-4)


@pytest.mark.parametrize(
    "points",
    [
        [],
        [point("all_reduce", "ring", 1 << 20, 4, 10.0)] * 9,
        [point("all_reduce", "one_shot", 1 << bits, 4, 5.0) for bits in range(10, 28)],
        [point("all_reduce", name, 1 << b, 4, 1e3 / (1 << b)) for name in OWN for b in range(10, 28)],
    ],
    ids=["nothing", "one size", "one algorithm", "larger is faster"],
)
def test_measurements_that_say_too_little_are_refused(points: list[Measured]) -> None:
    with pytest.raises(ConfigError, match=f"{len(points)} measurements do not determine the constants of the model"):
        fit(points)


def test_without_local_work_nothing_is_added() -> None:
    link = LinkCost(1.0, 2.0, 3.0)
    assert link.local_gbps == math.inf
    assert predicted_us("all_gather", "one_shot", 6000, 2, link) == pytest.approx(1 + 2 + 1)
