"""The emulated multicast address, on which tests run the multicast forms of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import multicast_word_targets as targets
import pytest

from quick_interpreter import interpret


def run(fn: Callable[..., Any], *args: Any) -> Any:
    return interpret(fn, 1, *args)[0]


def test_a_tile_is_taken_apart_into_quads() -> None:
    run(targets.takes_quads_apart)


def test_a_store_reaches_every_rank_and_nothing_beside() -> None:
    assert run(targets.stores) == 3 * 17 * 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_load_sums_every_rank(dtype: str) -> None:
    run(targets.sums, dtype)


@pytest.mark.parametrize(
    ("first_byte", "count", "right"),
    [
        (0, 64, True),
        (16 * 17, 64, True),
        (16 * 18, 64, False),
        (16 * 18, 60, True),
        (-16, 4, False),
        (1 << 30, 4, False),
    ],
)
def test_other_addresses_are_errors(first_byte: int, count: int, right: bool) -> None:
    said = run(targets.outside, first_byte, count)
    assert (said == "") == right
    assert right or "no multicast memory is emulated" in said
