"""The emulated multicast address, on which tests run the kernels' multicast forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import multicast_word_targets as targets
import pytest
from word_targets import quietly

import shotcast


def interpreted(fn: Callable[..., Any], *args: Any) -> Any:
    return shotcast.spawn(quietly, 1, fn, *args, timeout_s=60, env={"TRITON_INTERPRET": "1"})[0]


def test_a_tile_is_taken_apart_into_quads() -> None:
    interpreted(targets.takes_quads_apart)


def test_a_store_reaches_every_rank_and_nothing_beside() -> None:
    assert interpreted(targets.stores) == 3 * 17 * 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_load_sums_every_rank(dtype: str) -> None:
    interpreted(targets.sums, dtype)


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
    said = interpreted(targets.outside, first_byte, count)
    assert (said == "") == right
    assert right or "no multicast memory is emulated" in said
