"""The roofline of kernels: the equation, and its limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotcast.cost.inference import (
    HostCost,
    KernelCost,
    KernelWork,
    decode_attention,
    decode_splits,
    product,
    product_kind,
    prompt_attention,
)

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


def test_the_host_of_a_gpu() -> None:
    host = HostCost(100.0, 3.0, 0.1, True, "x", per_layer_us=50.0, per_request_us=200.0, client_us=400.0)
    assert host.time_us(4, 20) == 100 + 12 + 2
    assert host.time_us(4, 20, requests=2, layers=3) == 100 + 12 + 2 + 400 + 150
