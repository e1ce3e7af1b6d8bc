"""Words and their arithmetic, run by Triton's interpreter and compared with torch bit by bit."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import pytest

import word_targets as targets
from quick_interpreter import interpret
from shotcast import wire

HALVES = ["float16", "bfloat16"]
FLOATS = ["float32", *HALVES]


def run(fn: Callable[..., Any], *args: Any) -> Any:
    """Run ``fn`` in a process that interprets kernels."""
    return interpret(fn, 1, *args)[0]


@pytest.mark.parametrize("dtype", HALVES)
def test_unpack_knows_every_pattern(dtype: str) -> None:
    run(targets.unpacks_every_pattern, dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_pack_rounds_to_nearest_even(dtype: str) -> None:
    run(targets.packs, dtype)


def test_float32_words_are_their_values() -> None:
    run(targets.unpacks_float32)
    run(targets.packs_float32)


def test_fp8_is_what_torch_makes_of_it() -> None:
    run(targets.fp8_of_every_byte)
    run(targets.fp8_rounds)


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_add_in_order_and_round_once(dtype: str) -> None:
    run(targets.sums, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_start_at_plus_zero(dtype: str) -> None:
    assert run(targets.minus_zero, dtype) == [False, False]


@pytest.mark.parametrize("unit", [16, 4, 2, 1])
def test_every_tail_is_moved_and_nothing_beside(unit: int) -> None:
    assert run(targets.moves, unit) == 4 * (40 // unit + 1)


@pytest.mark.parametrize("dtype", FLOATS)
def test_sentinel_is_sent_as_nan(dtype: str) -> None:
    run(targets.guards, dtype)


@pytest.mark.parametrize(
    ("waited_s", "patient", "goes_on"),
    [(900, False, True), (1100, False, False), (1100, True, True), (1400, True, False)],
)
def test_patient_programs_wait_a_quarter_longer(waited_s: float, patient: bool, goes_on: bool) -> None:
    assert run(targets.patience, waited_s, patient) is goes_on


def test_a_mark_in_the_memory_of_the_host_ends_the_wait_for_that_rank_alone() -> None:
    """A store to the memory of the GPU could be queued behind the kernel that waits."""
    checks, fault = run(targets.marked, 0b01)
    assert checks == [True, False]
    assert (fault.kind, fault.ranks, fault.epoch32) == (wire.DEAD, (0,), 5)
    assert run(targets.marked, 0b10) == ([True] * 3, None), "it does not wait for rank 1"


def test_short_waits_do_not_look_into_the_memory_of_the_host() -> None:
    """A look takes so long that it makes other ranks wait as long, which then look, too."""
    not_yet_s = -100.0  # for interpreted kernels, two milliseconds are short
    assert run(targets.goes_on_though_marked, not_yet_s)
    assert not run(targets.goes_on_though_marked, 0.01)


def test_the_host_is_told_of_a_long_wait_before_the_deadline() -> None:
    assert run(targets.notices, 0) is None
    fault = run(targets.notices, 6)
    assert (fault.kind, fault.ranks, fault.epoch32) == (wire.TIMEOUT, (0,), 5)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="memory below 2^31 is asked for as x86-64 has it")
def test_small_addresses_are_addresses() -> None:
    address, epoch, copied = run(targets.small_addresses)
    assert address < 2**31
    assert epoch == [0, 7]
    assert copied == [1, 2, 3, 4, 5, 6, 7, 8]
