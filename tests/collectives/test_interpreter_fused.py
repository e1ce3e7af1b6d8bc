"""The fused kernels in Triton's interpreter: values, generations, stragglers, faults (see test_interpreter.py)."""

from __future__ import annotations

import itertools

import fused_targets as targets
import pytest
from fused_targets import Case, Stopped
from interpreter_targets import in_turn, several_tiles_a_program, with_late_programs
from test_interpreter import interpreted
from workers import SIGNALS

import shotcast
from shotcast.wire import ALL_REDUCE_NORMS, Op

pytestmark = pytest.mark.long

DTYPES = ["float32", "float16", "bfloat16"]
LENGTHS = [64, 576, 1000, 2048]
"""Elements of a row: a power of two and another number; FP8 rows of no multiple of 16 bytes; several warps."""
CASES = {
    2: [
        Case("bfloat16", 5, 64),
        Case("float32", 1, 1000, shift=1),
        Case("float16", 9, 576),
        Case("float32", 0, 64),
        Case("bfloat16", 2, 2048),
        Case("bfloat16", 2, 576, 1, "float32"),
        Case("float32", 2, 64, 0, "bfloat16"),
        Case("float16", 1, 1000, 0, "bfloat16"),
    ],
    3: [Case("float16", 4, 64), Case("bfloat16", 1, 1000), Case("float32", 3, 2048)],
    4: [Case("float32", 2, 576), Case("float16", 1, 2048), Case("bfloat16", 7, 576, shift=1)],
    5: [Case("float16", 3, 1000)],
}
"""Cases by world size."""


def test_cases_cover_all_dtypes_lengths_and_shifts() -> None:
    listed = [case for cases in CASES.values() for case in cases]
    assert {(case.dtype, case.hidden) for case in listed} == set(itertools.product(DTYPES, LENGTHS))
    assert {0, 1, 9} < {case.rows for case in listed}
    assert {case.shift for case in listed} == {0, 1}


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.full) for n in CASES if n > 2)])
def test_values(world_size: int) -> None:
    listed = CASES[world_size]
    done = interpreted(targets.cases, world_size, "cpu", listed, [Op.ALL_REDUCE_RMS_NORM], 1 << 18, 2)
    assert done == [5 * len(listed)] * world_size, "two forms by each algorithm, and an unfused call"


LAYER_CASES = [
    Case("bfloat16", 5, 64, 0, "float32"),
    Case("float32", 2, 1000, 1),
    Case("float16", 2, 576, 0, "bfloat16"),
    Case("bfloat16", 1, 2048),
]


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, pytest.param(5, marks=pytest.mark.full)])
def test_layer_norms(world_size: int) -> None:
    done = interpreted(targets.cases, world_size, "cpu", LAYER_CASES, [Op.ALL_REDUCE_LAYER_NORM], 1 << 18, 2)
    assert done == [5 * len(LAYER_CASES)] * world_size, "two forms by each algorithm, and an unfused call"


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value(dtype: str, world_size: int) -> None:
    listed = [Case(dtype, rows, hidden, rows % 2) for rows, hidden in itertools.product(range(10), LENGTHS)]
    interpreted(targets.cases, world_size, "cpu", listed, list(ALL_REDUCE_NORMS), 1 << 20, timeout_s=1700)


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_bits_do_not_depend_on_algorithm_or_batch(world_size: int) -> None:
    results = interpreted(targets.bits_of_every_algorithm, world_size, "cpu", [64, 1000])
    assert all(result == results[0] for result in results)


@pytest.mark.full
def test_results_in_given_tensors() -> None:
    calls = [("cpu", "bfloat16", 5, 72, shift) for shift in (0, 1)]
    assert interpreted(in_turn, 2, targets.into_given_tensors, calls) == [[12, 12]] * 2


@pytest.mark.full
def test_programs_with_several_tiles_give_the_same_bits() -> None:
    assert interpreted(several_tiles_a_program, 2) == [18, 18]


@pytest.mark.full
def test_sentinels_arrive_as_nan() -> None:
    """A peer may also compute sentinels: the norm of such words is one on a processor that keeps a NaN's payload."""
    assert interpreted(targets.sentinels, 2, "cpu") == [18, 18]


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "calls"),
    [(2, 60), pytest.param(3, 16, marks=pytest.mark.full), pytest.param(4, 300, marks=pytest.mark.full)],
)
@pytest.mark.timeout(400)
def test_changing_calls_over_all_generations(world_size: int, calls: int) -> None:
    """Calls find sentinels where fused calls left sums, norms, FP8 and scales."""
    args = ("cpu", calls, 5, [8, 64, 200], 7)
    interpreted(with_late_programs, world_size, targets.changing_calls, *args, timeout_s=380)


# -- faults -----------------------------------------------------------------------------------------------------------


def expect_timeout(outcome: Stopped, missing: int, timeout_s: float, op: Op, reason: str = "late") -> None:
    error = outcome.error
    assert isinstance(error, shotcast.CollectiveTimeout), error
    assert (error.missing, error.reason) == ((missing,), reason)
    assert error.op == op.label
    earliest, deadline = (timeout_s, timeout_s) if reason == "late" else (0, 1)
    assert earliest < outcome.took < deadline + 60, (
        "a program looks at the clock every 256 polls, a second or more here"
    )
    assert outcome.nan == {"quantized": True, "scale": True, "new_residual": True, "normed": True}
    assert isinstance(outcome.again, shotcast.CollectiveTimeout)
    assert outcome.again_s < 60


TROUBLE = [
    (Op.ALL_REDUCE_RMS_NORM, "one_shot", 2),
    (Op.ALL_REDUCE_RMS_NORM, "two_shot", 3),
]


@pytest.mark.every(4)
@pytest.mark.timing
@pytest.mark.parametrize(("op", "algorithm", "world_size"), TROUBLE)
def test_killed_rank(op: Op, algorithm: str, world_size: int) -> None:
    victim = world_size - 1
    results = interpreted(
        targets.stopped,
        world_size,
        "cpu",
        op,
        algorithm,
        victim,
        SIGNALS["killed"],
        600.0,
        fresh=True,
        return_exceptions=True,
    )
    assert isinstance(results[victim], shotcast.RankFailed)
    for outcome in results[:victim]:
        assert isinstance(outcome, Stopped), outcome
        expect_timeout(outcome, victim, 600.0, op, "dead")


@pytest.mark.timing
@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 3])
def test_reset_after_a_late_rank(world_size: int) -> None:
    kinds = [(op, algorithm) for op, algorithm, size in TROUBLE if size == world_size]
    calls = [("cpu", *kind, 0, "late", 2.0) for kind in kinds]
    for rank, each in enumerate(interpreted(in_turn, world_size, targets.stopped, calls)):
        for (op, _), outcome in zip(kinds, each, strict=True):
            if rank == 0:
                assert outcome.error.missing == (0,)
            else:
                expect_timeout(outcome, 0, 2.0, op)


@pytest.mark.full
@pytest.mark.timing
def test_rank_that_stops_between_the_shots() -> None:
    """The victim's header and its part of the sums have left it, so the others wait for its sums.

    They wait a quarter longer than for a missing first shot, and name the victim alone.
    """
    timeout_s, victim = 2.0, 1
    for rank, outcome in enumerate(interpreted(targets.silent_between_shots, 3, victim, 2, timeout_s)):
        error, took = outcome
        if rank != victim:  # the victim may have received all that it needed
            assert isinstance(error, shotcast.CollectiveTimeout), error
            assert error.missing == (victim,), (rank, error)
            assert took > timeout_s * 1.25


@pytest.mark.full
@pytest.mark.timing
def test_mismatch() -> None:
    """Ranks that request different things for the same rows raise an error that says so."""
    kinds = {"quantize": "root", "normed": "root", "weight": "root", "kind": "op", "hidden": "launch"}
    for each in interpreted(in_turn, 2, targets.mismatched, [("cpu", what) for what in kinds]):
        for (what, field), (error, fields) in zip(kinds.items(), each, strict=True):
            assert isinstance(error, shotcast.CollectiveMismatch), error
            assert field in fields
            if what == "quantize":
                assert "dynamic FP8 and the norm" in str(error)
                assert "static FP8 and the norm" in str(error)
