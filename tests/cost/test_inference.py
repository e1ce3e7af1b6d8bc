"""The roofline of kernels: the equation, its limits, and that a fit finds the constants that made the times."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shotcast.cost.calibration import FusedNormPoint, KernelPoint, fit_fused_norm, fit_kernel
from shotcast.cost.inference import (
    FusedNormCost,
    HostCost,
    KernelCost,
    KernelWork,
    decode_attention,
    decode_splits,
    product,
    product_kind,
    prompt_attention,
)
from shotcast.errors import ConfigError

costs = st.builds(
    KernelCost,
    st.floats(0.5, 10),
    st.floats(500, 10_000),
    st.floats(1e4, 2e6),
)
amounts = st.floats(0, 1e3)


@given(costs, amounts, amounts)
def test_the_equation(cost: KernelCost, first: float, second: float) -> None:
    """A kernel takes at least its slower bound, at most both one after the other."""
    bounds = 1e6 * first / cost.first_rate, 1e6 * second / cost.second_rate
    time_us = cost.time_us(KernelWork(first, second)) - cost.fixed_us
    assert max(bounds) * (1 - 1e-9) - 1e-9 <= time_us <= sum(bounds) * (1 + 1e-9) + 1e-9
    assert max(bounds) * 2**0.25 * (1 + 1e-9) + 1e-9 >= time_us


@given(costs)
def test_few_rows_take_the_time_of_reading_weights(cost: KernelCost) -> None:
    one, few = (cost.time_us(product(rows, 8192, 8192, 2)) for rows in (1, 2))
    assert one == pytest.approx(cost.fixed_us + 8192 * 8192 * 2 / cost.first_rate / 1e3)
    assert few >= one


def test_operations_of_attention_counted_one_by_one() -> None:
    """A token of a prompt begins in the time of 192 keys more, a sequence that decodes in that of 96."""
    parts, heads, head_dim = [(5, 3), (2, 0)], 3, 4
    operations = sum(
        2 * 2 * head_dim for tokens, before in parts for token in range(tokens) for _ in range(before + token + 1 + 192)
    )
    work = prompt_attention(parts, heads, head_dim)
    assert work.first * 1e9 == pytest.approx(operations * heads)
    assert work.second * 1e3 == 8
    assert decode_attention(3, 100, 2, 64, 2).first * 1e9 == pytest.approx(3 * 196 * 2 * 2 * 64 * 2)
    assert decode_attention(3, 100, 2, 64, 2, beginning=0).first * 1e9 == pytest.approx(3 * 100 * 2 * 2 * 64 * 2)


@pytest.mark.parametrize(("sequences", "splits"), [(1, 64), (4, 32), (8, 16), (16, 8), (64, 2), (128, 1), (1024, 1)])
def test_parts_of_a_context_are_those_that_were_measured(sequences: int, splits: int) -> None:
    assert decode_splits(sequences, 2) == splits


def test_kinds_of_products() -> None:
    assert [product_kind(rows, False) for rows in (1, 2, 64, 65)] == [
        "product_one_row",
        "product_few_rows",
        "product_few_rows",
        "product_many_rows",
    ]
    assert product_kind(1, True) == "product_one_row_fp8"


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


def test_the_host_of_a_gpu() -> None:
    host = HostCost(100.0, 3.0, 0.1, True, "x", per_layer_us=50.0, per_request_us=200.0, client_us=400.0)
    assert host.time_us(4, 20) == 100 + 12 + 2
    assert host.time_us(4, 20, requests=2, layers=3) == 100 + 12 + 2 + 400 + 150
