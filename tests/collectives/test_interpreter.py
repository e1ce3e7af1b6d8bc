"""The GPUs' kernels in Triton's interpreter on CPU ranks, which run concurrently over shared memory without a GPU.

Tests share sets of ranks, as the interpreter takes about a second to read a kernel that is new to a process.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Callable
from typing import Any

import communicator_targets
import operation_programs
import pytest
from fault_targets import different_messages, first_use_after_a_mismatch, missing_messages
from interpreter_targets import (
    OPERATIONS,
    Case,
    calls_clearing_slots,
    in_turn,
    long_messages,
    messages_in_pieces,
    programs_that_do_not_count,
    replayed,
    rms_norms,
    run_cases,
    sentinels,
    silent_after_its_header,
    told_of_a_long_wait,
    with_late_programs,
    words_left_in_slots,
)
from workers import (
    SIGNALS,
    across_epochs,
    changing_sizes,
    killed,
    late_then_reset,
    matrix,
    mismatched,
    numerics,
    waiting_messages,
)

import shotcast
from quick_interpreter import GPU_COLLECTIVES, interpret

pytestmark = pytest.mark.long

WORLD_SIZES = range(2, 9)
SUMS = [f"{kind}/{name}" for kind in ("all_reduce", "in_place") for name in ("one_shot", "two_shot", "ring")]
SUMS += ["all_reduce/two_shot_fp8", "in_place/two_shot_fp8"]
SUMS += [f"reduce_scatter/{name}" for name in ("one_shot", "ring")]
COPIES = ["all_gather/one_shot", "uneven", "all_to_all", "broadcast", "message"]
FLOATS = ["float32", "float16", "bfloat16"]
INTEGERS = ["uint8", "int16", "int32", "int64"]
COUNTS = [0, 1, 5, 64, 333, 2048]
"""Numbers of elements: none, less than a quad, odd, one tile, several tiles, and several tiles a program."""
VALUES: dict[str, list[Any]] = {
    "operation": [*SUMS, *COPIES, "all_gather/ring"],
    "dtype": FLOATS + INTEGERS,
    "world_size": list(WORLD_SIZES),
    "count": COUNTS,
    "shift": [0, 1],
}
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def legal(values: dict[str, Any]) -> bool:
    """Return whether a case is legal: sums and the ring need floating-point numbers."""
    return values.get("operation") in (*COPIES, None) or values.get("dtype") in (*FLOATS, None)


def pairs_of(values: dict[str, Any]) -> set[Pair]:
    return set(itertools.combinations(values.items(), 2))


def all_pairs() -> set[Pair]:
    """Return every two values of different parameters that a call can have at once."""
    pairs = set()
    for first, second in itertools.combinations(VALUES, 2):
        for a, b in itertools.product(VALUES[first], VALUES[second]):
            if legal({first: a, second: b}):
                pairs.add(((first, a), (second, b)))
    return pairs


def pairwise() -> list[Case]:
    """Return few cases that cover every pair.

    Each step draws some cases around a missing pair and takes the one with the most new pairs.
    """
    rng, missing, cases = random.Random(1), all_pairs(), []
    while missing:
        wanted = dict(min(missing, key=str))
        drawn = []
        while len(drawn) < 40:
            values = {name: wanted.get(name, rng.choice(choices)) for name, choices in VALUES.items()}
            if legal(values):
                drawn.append(values)
        best = max(drawn, key=lambda values: len(pairs_of(values) & missing))
        missing -= pairs_of(best)
        cases.append(Case(**best))
    return cases


def interpreted(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 500, fresh: bool = False, **kwargs: Any
) -> list[Any]:
    """Run ranks whose collectives use the kernels of GPUs. ``fresh`` ranks use shared memory that nobody else uses."""
    if not fresh:
        return interpret(fn, world_size, *args, timeout_s=timeout_s, env=GPU_COLLECTIVES, **kwargs)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-") as folder:
        env = {**GPU_COLLECTIVES, "SHOTCAST_SHM_DIR": folder}
        return interpret(fn, world_size, *args, timeout_s=timeout_s, env=env, fresh=True, **kwargs)


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_random_programs() -> None:
    """Calls with a root and uneven parts have kernels of their own."""
    interpreted(operation_programs.many_programs, 3, 150, 8)


def test_cases_cover_every_pair() -> None:
    cases = pairwise()
    covered = set().union(*(pairs_of(case._asdict()) for case in cases))
    assert covered == all_pairs()
    assert cases == pairwise(), "the same cases in every process"
    assert {case.operation.partition("/")[0] for case in cases} == set(OPERATIONS)


@pytest.mark.full
@pytest.mark.parametrize(
    "world_size", [pytest.param(n, marks=[pytest.mark.full] if n > 3 else []) for n in WORLD_SIZES]
)
def test_pairwise(world_size: int) -> None:
    """Run the cases of one world size, with random stragglers."""
    cases = [case for case in pairwise() if case.world_size == world_size]
    assert interpreted(with_late_programs, world_size, run_cases, cases) == [len(cases)] * world_size


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_matrix(world_size: int, dtype: str, shift: int) -> None:
    counts = [0, 1, 2, 3, 8, 63, 64, 333, 2048, 4099]
    done = interpreted(matrix, world_size, "cpu", [dtype], counts, shift, 1 << 18, timeout_s=1700)
    assert min(done) == max(done) > 100


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "calls", "largest"),
    [
        (2, 150, 40),
        pytest.param(3, 30, 3000, marks=pytest.mark.full),
        pytest.param(8, 400, 3000, marks=[pytest.mark.full, pytest.mark.timeout(1000)]),
    ],
)
def test_calls_of_changing_size_with_stragglers(world_size: int, calls: int, largest: int) -> None:
    """Calls find sentinels where longer or shorter calls left words. Many short calls reveal a single missed quad."""
    limit_s = 900 if calls > 100 else 100
    interpreted(with_late_programs, world_size, changing_sizes, "cpu", calls, largest, 3, timeout_s=limit_s)


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_epochs_across_borders(world_size: int) -> None:
    assert interpreted(across_epochs, world_size, "cpu")[0][2] > 1 << 32


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "dtypes"), [(3, ["float32", "bfloat16"]), pytest.param(8, FLOATS, marks=pytest.mark.full)]
)
def test_bits_are_equal_on_all_ranks_and_runs(world_size: int, dtypes: list[str]) -> None:
    results = interpreted(numerics, world_size, "cpu", dtypes)
    assert all(result == results[0] for result in results)


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 3])
def test_sentinels_arrive_as_nan(world_size: int) -> None:
    """A tensor of words that mean "not arrived" keeps no rank waiting."""
    assert interpreted(sentinels, world_size, 50, timeout_s=300) == [30] * world_size


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_calls_that_clear_their_slots_themselves(world_size: int) -> None:
    interpreted(with_late_programs, world_size, calls_clearing_slots, 60, 1500)


@pytest.mark.full
def test_calls_that_clear_their_slots_leave_no_words() -> None:
    kinds = ("all_reduce/two_shot", "all_reduce/two_shot_fp8", "reduce_scatter/one_shot", "all_gather", "all_to_all")
    for each in interpreted(in_turn, 2, words_left_in_slots, [(operation, 1001) for operation in kinds]):
        assert len(each) == len(kinds)
        for operation, (itself, by_the_next) in zip(kinds, each, strict=True):
            assert itself == 0, operation
            assert by_the_next > 0, operation


@pytest.mark.full
def test_integers_beyond_the_workspace_pass_in_pieces() -> None:
    interpreted(communicator_targets.integers_in_pieces, 2)


@pytest.mark.full
def test_every_reduction() -> None:
    interpreted(communicator_targets.every_reduction, 2, 1, 8)


@pytest.mark.full
@pytest.mark.parametrize("world_size", range(2, 9))
@pytest.mark.parametrize("part", range(3))
def test_every_reduction_on_every_number_of_ranks(world_size: int, part: int) -> None:
    interpreted(communicator_targets.every_reduction, world_size, part, 3)


@pytest.mark.full
def test_messages_beyond_the_workspace_pass_in_pieces() -> None:
    assert interpreted(messages_in_pieces, 3, 4096) == [16] * 3


@pytest.mark.full
def test_long_messages() -> None:
    """A lane has five or three chunks, of which two are in flight: the sender must wait for credit."""
    assert interpreted(with_late_programs, 2, long_messages, 150_001) == [2, 2]


@pytest.mark.full
def test_messages_wait_in_the_mailbox() -> None:
    assert interpreted(waiting_messages, 3, "cpu", 3) == [48] * 2 + [0]


@pytest.mark.full
def test_norm() -> None:
    interpreted(rms_norms, 2)


# -- faults -----------------------------------------------------------------------------------------------------------


SOON_S = 60.0
"""Far more than a fault takes to be seen on a busy machine."""


def expect_timeout(outcome: dict[str, Any], missing: int, timeout_s: float, reason: str = "late") -> None:
    error = outcome["error"]
    assert isinstance(error, shotcast.CollectiveTimeout), error
    assert (error.missing, error.reason) == ((missing,), reason)
    assert error.op == "all_reduce"
    assert error.epoch > 2
    if reason == "late":
        assert timeout_s * 0.9 < outcome["took"] < timeout_s + SOON_S
    else:
        assert outcome["took"] < SOON_S, "a program looks for dead ranks every 256 polls, a second or more here"
    assert outcome["nan"]


@pytest.mark.every(3)
@pytest.mark.timing
@pytest.mark.parametrize(
    ("world_size", "fault", "algorithm"), [(2, "killed", "one_shot"), (3, "killed", "ring"), (3, "stopped", "two_shot")]
)
def test_killed_or_stopped_rank(world_size: int, fault: str, algorithm: str) -> None:
    """Survivors name a stopped rank at the deadline, a killed one before; later calls fail at once."""
    victim, timeout_s = world_size - 1, 600.0 if fault == "killed" else 4.0
    results = interpreted(
        killed,
        world_size,
        *("cpu", algorithm, victim, SIGNALS[fault], timeout_s),
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
        assert outcome["left"] == []


@pytest.mark.full
@pytest.mark.timing
def test_a_host_hears_whom_its_kernels_wait_for() -> None:
    """Long before the deadline, and no more once the rank has come."""
    (lines, afterwards), (none, _) = interpreted(told_of_a_long_wait, 2, 1, 0.5)
    assert [line for line in lines if "all_reduce" in line and "waits for rank 1" in line]
    assert afterwards is None
    assert not none


@pytest.mark.timing
@pytest.mark.parametrize(
    ("operation", "victim"), [pytest.param("all_gather", 0, marks=pytest.mark.full), ("broadcast", 1)]
)
def test_rank_that_sends_only_its_header_is_named(operation: str, victim: int) -> None:
    for rank, outcome in enumerate(interpreted(silent_after_its_header, 3, operation, victim, 3.0)):
        if rank != victim:
            assert isinstance(outcome["error"], shotcast.CollectiveTimeout), outcome["error"]
            assert (outcome["error"].op, outcome["error"].missing) == (operation, (victim,))


@pytest.mark.timing
@pytest.mark.parametrize(
    ("world_size", "algorithm"),
    [(2, "one_shot"), *(pytest.param(*one, marks=pytest.mark.full) for one in ((3, "two_shot"), (2, "ring")))],
)
def test_calls_after_a_fault_give_nan_at_once(world_size: int, algorithm: str) -> None:
    """The slots hold numbers of earlier calls by then. A graph of many calls must not wait for as many deadlines."""
    for error, nans, took in interpreted(replayed, world_size, algorithm, 4.0)[:-1]:
        assert isinstance(error, shotcast.CollectiveTimeout), error
        assert nans == [True] * 5
        assert took < 16, "less than five deadlines"


@pytest.mark.full
@pytest.mark.timing
@pytest.mark.parametrize(
    ("world_size", "algorithm"), [(2, "two_shot"), pytest.param(3, "ring", marks=pytest.mark.full)]
)
def test_reset_after_a_late_rank(world_size: int, algorithm: str) -> None:
    results = interpreted(late_then_reset, world_size, "cpu", algorithm, 1, 2.0)
    for rank, outcome in enumerate(results):
        if rank == 1:
            assert outcome["error"].missing == (1,)
        else:
            expect_timeout(outcome, 1, 2.0)


@pytest.mark.timing
@pytest.mark.parametrize(("what", "ahead"), [("nbytes", 0), ("dtype", 3)])
def test_mismatched_message(what: str, ahead: int) -> None:
    """The receiver learns of it at once. The sender, whose message lies in the mailbox, learns of it later."""
    errors = interpreted(different_messages, 3, what, ahead)
    assert errors[0] is errors[2] is None
    assert isinstance(errors[1], shotcast.CollectiveMismatch)
    assert errors[1].fields == (what,)
    assert sorted(errors[1].calls) == [0, 1]


@pytest.mark.full
@pytest.mark.timing
def test_mismatched_message_before_the_first_use_of_another_kernel() -> None:
    """The rank that does not know of it yet must not wait for the other one to load that kernel."""
    assert interpreted(first_use_after_a_mismatch, 2)[1].fields == ("dtype",)


@pytest.mark.full
@pytest.mark.timing
def test_missing_message() -> None:
    first, second, third = interpreted(missing_messages, 3)
    assert [error and error.missing for error in first] == [None, (1,)]
    assert [error and error.missing for error in second] == [(0,), None]
    assert third == [None, None]


@pytest.mark.timing
def test_a_program_that_does_not_count_itself_stops_the_call() -> None:
    """Program 0 neither advances the epoch without it nor waits forever."""
    for error, took in interpreted(programs_that_do_not_count, 2, 1.0):
        assert isinstance(error, shotcast.CollectiveTimeout)
        assert set(error.missing) <= {0, 1}
        assert 1.8 < took < 2 + SOON_S


@pytest.mark.timing
@pytest.mark.parametrize(
    ("world_size", "kinds"),
    [(2, ["op", "dtype", "root", "launch"]), (3, ["nbytes", "algorithm", "nbytes of two calls"])],
)
def test_mismatch(world_size: int, kinds: list[str]) -> None:
    """All ranks learn who differs and in which field, long before the deadline."""
    odd = world_size - 1
    for each in interpreted(in_turn, world_size, mismatched, [("cpu", what, odd, 300.0) for what in kinds]):
        for what, outcome in zip(kinds, each, strict=True):
            error = outcome["error"]
            assert isinstance(error, shotcast.CollectiveMismatch), error
            assert error.differing == (odd,)
            assert error.fields == (what.split()[0],)
            if what == "nbytes of two calls":
                sizes = {rank: call.split(", ")[1] for rank, call in error.calls.items()}
                assert len(sizes) >= 2, "a rank that begins after the fault sends no header"
                assert all(size == ("256 KiB" if rank == odd else "512 KiB") for rank, size in sizes.items())
            assert outcome["took"] < SOON_S
