"""The multicast forms of the kernels, run by Triton's interpreter over an emulated multicast address.

Each test counts the words that went by multicast, so it fails if a kernel falls back to peer stores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import test_interpreter
from fused_targets import Case
from interpreter_targets import with_late_programs
from multicast_targets import (
    changing_sizes_by_multicast,
    every_form,
    explained,
    fused_forms,
    reset_by_multicast,
    silent_after_its_header,
    sums_of_sentinels,
)
from workers import SIGNALS, killed

import shotcast
from emulated_multicast import with_multicast
from shotcast.wire import Op

pytestmark = pytest.mark.long

COUNTS = [0, 1, 5, 333, 2048]


def interpreted(fn: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
    """Run ranks that have a multicast address."""
    return test_interpreter.interpreted(with_multicast, world_size, fn, *args, **kwargs)


@pytest.mark.full
@pytest.mark.parametrize(
    "world_size",
    [
        2,
        *(pytest.param(n, marks=pytest.mark.full) for n in (3, 4)),
        pytest.param(8, marks=[pytest.mark.full, pytest.mark.timeout(600)]),
    ],
)
def test_every_form(world_size: int) -> None:
    """Sums and copies have the right bits, and as many words go by multicast as the sizes require."""
    limit_s = 500 if world_size == 8 else 100
    done = interpreted(with_late_programs, world_size, every_form, COUNTS, 1, timeout_s=limit_s)
    assert done == [3 * len(COUNTS)] * world_size


@pytest.mark.full
def test_fused_forms() -> None:
    """Some rows have FP8 of no multiple of 16 bytes."""
    listed = [Case("bfloat16", 5, 72), Case("float32", 3, 1000)]
    assert min(interpreted(fused_forms, 2, listed, Op.ALL_REDUCE_RMS_NORM)) > 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "calls", "largest"),
    [
        pytest.param(2, 120, 60, marks=pytest.mark.full),
        (3, 20, 1000),
        pytest.param(3, 40, 3000, marks=pytest.mark.full),
        pytest.param(4, 20, 500, marks=pytest.mark.full),
    ],
)
def test_calls_of_changing_size_with_stragglers(world_size: int, calls: int, largest: int) -> None:
    """Words that multimem leaves in a generation, staging included, are cleared before the generation is used again."""
    interpreted(with_late_programs, world_size, changing_sizes_by_multicast, calls, largest, 3)


@pytest.mark.full
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_sums_that_are_sentinels_arrive_as_nan(world_size: int) -> None:
    assert interpreted(sums_of_sentinels, world_size, 50) == [[True] * 3] * world_size


def test_multimem_is_chosen_only_by_name() -> None:
    for outcome in interpreted(explained, 2):
        assert outcome["candidates"] == ["one_shot", "two_shot", "two_shot_fp8", "multimem", "ring", "vendor"]
        assert outcome["auto"] in ("one_shot", "two_shot")
        assert "multimem" not in outcome["candidates of a gather"]


# -- faults -----------------------------------------------------------------------------------------------------------


SOON_S = 60.0
"""Far more than a fault takes to be seen, where the deadline is later by far."""


def expect_timeout(outcome: dict[str, Any], missing: int, timeout_s: float, reason: str = "late") -> None:
    assert isinstance(outcome["error"], shotcast.CollectiveTimeout), outcome
    assert (outcome["error"].missing, outcome["error"].reason) == ((missing,), reason)
    earliest, deadline = (timeout_s * 0.9, timeout_s) if reason == "late" else (0, 0)
    assert earliest < outcome["took"] < deadline + SOON_S
    assert outcome["nan"]


@pytest.mark.every(3)
@pytest.mark.timing
@pytest.mark.parametrize(
    ("world_size", "fault", "algorithm"),
    [(3, "killed", "multimem"), (2, "stopped", "multimem"), (2, "killed", "two_shot")],
)
def test_killed_or_stopped_rank(world_size: int, fault: str, algorithm: str) -> None:
    victim, timeout_s = world_size - 1, 600.0 if fault == "killed" else 2.0
    results = interpreted(
        killed,
        world_size,
        "cpu",
        algorithm,
        victim,
        SIGNALS[fault],
        timeout_s,
        timeout_s=300,
        fresh=True,
        return_exceptions=True,
    )
    assert isinstance(results[victim], shotcast.RankFailed)
    for outcome in results[:victim]:
        assert isinstance(outcome, dict), outcome
        expect_timeout(outcome, victim, timeout_s, "dead" if fault == "killed" else "late")
        assert isinstance(outcome["again"], shotcast.CollectiveTimeout)
        assert outcome["again_s"] < SOON_S


@pytest.mark.timing
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_a_rank_that_stops_after_its_header_is_named(world_size: int) -> None:
    victim, timeout_s = 0, 4.0
    results = interpreted(silent_after_its_header, world_size, victim, timeout_s)
    for rank, outcome in enumerate(results):
        if rank != victim:
            expect_timeout(outcome, victim, timeout_s)


@pytest.mark.timing
@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 3])
def test_reset_after_a_late_rank(world_size: int) -> None:
    timeout_s = 2.0
    results = interpreted(reset_by_multicast, world_size, 1, timeout_s)
    for rank, outcome in enumerate(results):
        if rank == 1:
            assert outcome["error"].missing == (1,)
        else:
            expect_timeout(outcome, 1, timeout_s)
