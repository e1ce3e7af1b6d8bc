"""Least squares: fits find the constants that made the times, and refuse measurements that say too little."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from gpu_calibration.least_squares import FusedNormPoint, Measured, fit, fit_fused_norm, fit_kernel
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from predicted import predicted_us, work_of
from shotcast.cost.collective import NVLINK4, LinkCost
from shotcast.cost.inference import FusedNormCost, KernelCost, KernelWork, product
from shotcast.errors import ConfigError
from shotcast.planner.cpu_rows import KernelPoint

OWN = ("one_shot", "two_shot", "ring")
costs = st.builds(
    KernelCost,
    st.floats(0.5, 10),
    st.floats(500, 10_000),
    st.floats(1e4, 2e6),
)


def point(algorithm: str, nbytes: int, world_size: int, time_us: float) -> Measured:
    return Measured(work_of("all_reduce", algorithm, nbytes, world_size), time_us)


@settings(max_examples=30)
@given(costs, st.integers(0, 1))
def test_a_fit_finds_the_constants(cost: KernelCost, off: int) -> None:
    """Times of the model give its constants back; times that are 10% longer and shorter in turn, the residual."""
    # amounts around the corner of the roofline, where both bounds show, and far below, where the fixed cost does
    works = [
        KernelWork(first * cost.first_rate / 1e6, second * cost.second_rate / 1e6)
        for first in (0.1, 3, 30, 300)
        for second in (0.1, 4, 40, 400)
    ]
    points = [
        KernelPoint(work, cost.time_us(work) * (1.1 if number % 2 else 1 / 1.1) ** off)
        for number, work in enumerate(works)
    ]
    start = KernelCost(2.0, 4000.0, 3e5)
    found = fit_kernel(points, start)
    assert found.points == 16
    if not off:
        for name in ("fixed_us", "first_rate", "second_rate"):
            assert getattr(found.cost, name) == pytest.approx(getattr(cost, name), rel=1e-3)
        assert found.worst < 1e-3
    else:
        assert 0.05 < found.residual < 0.11


@settings(max_examples=30)
@given(st.floats(0.3, 3), st.floats(1, 6), st.floats(100, 400), st.floats(200, 450), st.integers(0, 1))
def test_a_fit_of_fused_norms_finds_the_constants(
    beyond_us: float, fixed_us: float, rate: float, sum_rate: float, off: int
) -> None:
    """Times of the model give its constants back where both bounds show, and others the residual."""
    cost = FusedNormCost(beyond_us, fixed_us, rate)
    points = []
    for number, power in enumerate(range(14, 28)):
        sum_us = fixed_us + (1 << power) / sum_rate / 1e3
        time_us = cost.time_us(1 << power, sum_us)
        points.append(FusedNormPoint(1 << power, sum_us, time_us * (1.05 if number % 2 else 1 / 1.05) ** off))
    bounded = [cost.time_us(nbytes, sum_us) == sum_us + beyond_us for nbytes, sum_us, _ in points]
    assume(2 <= sum(bounded) <= len(points) - 2)
    found = fit_fused_norm(points)
    assert found.points == len(points)
    if off:
        assert 0.02 < found.residual < 0.06
    else:
        assert found.worst < 0.01
        assert found.cost.rate == pytest.approx(rate, rel=0.01)
        assert found.cost.beyond_us == pytest.approx(beyond_us, rel=0.1)
        assert found.cost.fixed_us == pytest.approx(fixed_us, rel=0.1, abs=0.2)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([FusedNormPoint(1, 1.0, 2.0)] * 3, "3 measurements do not determine the 3 constants of a fused norm"),
        ([FusedNormPoint(nbytes, 1.0, 0.0) for nbytes in (1, 2, 3)], "more than 0 us"),
        ([FusedNormPoint(nbytes, 0.0, 1.0) for nbytes in (1, 2, 3)], "more than 0 us"),
        ([FusedNormPoint(nbytes, 1.0, 2.0) for nbytes in (0, 2, 3)], "and a message has bytes"),
    ],
)
def test_a_fit_of_fused_norms_to_too_little(points: list[FusedNormPoint], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_fused_norm(points)


def test_what_measurements_leave_open_stays() -> None:
    start = KernelCost(2.0, 4000.0, 3e5)
    alone = [KernelPoint(KernelWork(amount), 1 + amount * 1e6 / 3000) for amount in (0.001, 0.01, 0.1)]
    found = fit_kernel(alone, start).cost
    assert (found.first_rate, found.second_rate) == (pytest.approx(3000, rel=1e-4), 3e5)
    # 128 rows: always 128 operations a byte, so it is open which of the two bounds
    together = [KernelPoint(product(128, size, size, 2), 5 + size * size / 1e6) for size in (1024, 2048, 8192)]
    found = fit_kernel(together, start).cost
    assert found.first_rate == 4000.0
    assert fit_kernel(together, start).worst < 1e-3


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "0 measurements do not determine the 1 constants"),
        ([KernelPoint(KernelWork(1.0), 1.0)], "1 measurements do not determine the 2 constants"),
        ([KernelPoint(KernelWork(1.0), 0.0), KernelPoint(KernelWork(2.0), 1.0)], "more than 0 us"),
    ],
)
def test_a_fit_to_too_little(points: list[KernelPoint], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_kernel(points, KernelCost(2.0, 4000.0, 3e5))


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
        point(algorithm, nbytes, n, predicted_us("all_reduce", algorithm, nbytes, n, link))
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
        [point("ring", 1 << 20, 4, 10.0)] * 9,
        [point("one_shot", 1 << bits, 4, 5.0) for bits in range(10, 28)],
        [point(name, 1 << b, 4, 1e3 / (1 << b)) for name in OWN for b in range(10, 28)],
    ],
    ids=["nothing", "one size", "one algorithm", "larger is faster"],
)
def test_measurements_that_say_too_little_are_refused(points: list[Measured]) -> None:
    with pytest.raises(ConfigError, match=f"{len(points)} measurements do not determine the constants of the model"):
        fit(points)


def test_the_link_of_communicators_is_fitted_to_the_data() -> None:
    """``NVLINK4``, by which communicators choose."""
    data = Path(__file__).parents[2] / "benchmarks/data/h200"
    points = [
        point(row["algorithm"], row["nbytes"], row["world_size"], row["time_us"])
        for name in ("all_reduce_bf16_x4.json", "all_reduce_bf16_x2.json")
        for row in json.loads((data / name).read_text())["rows"]
        if row["algorithm"] in OWN and row["time_us"] is not None
    ]
    found = fit(points)
    for field in dataclasses.fields(LinkCost):
        if field.name == "sm_gbps":
            continue  # it is not fitted
        given_, fitted = getattr(NVLINK4, field.name), getattr(found, field.name)
        assert given_ == pytest.approx(fitted, rel=0.02), f"NVLINK4 should be {found}"
