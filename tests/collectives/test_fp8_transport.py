"""FP8 transport on CPU ranks: the GPUs' kernel in the interpreter, and the rules of who may choose it."""

from __future__ import annotations

import fp8_targets as targets
import pytest
from interpreter_targets import in_turn, replayed
from test_interpreter import interpreted
from workers import SIGNALS, killed

import shotcast
from shotcast import wire

FLOATS = ["float32", "float16", "bfloat16"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "listed"),
    [
        (2, {"float32": [0, 1, 5, 513, 2048], "bfloat16": [1, 257, 2048, 4099]}),
        (3, {"float16": [0, 7, 129, 1537]}),
        pytest.param(4, {"bfloat16": [3, 1000], "float32": [8, 2050]}, marks=pytest.mark.full),
        pytest.param(5, {"float32": [1, 3000]}, marks=pytest.mark.full),
        pytest.param(
            8,
            {dtype: [0, 1, 64, 1024, 1025, 4099] for dtype in FLOATS},
            marks=[pytest.mark.full, pytest.mark.timeout(1800)],
        ),
    ],
)
def test_bits(world_size: int, listed: dict[str, list[int]]) -> None:
    limit_s = 1700 if world_size == 8 else 110
    calls = [(counts, [dtype], False) for dtype, counts in listed.items()]
    done = interpreted(in_turn, world_size, targets.matrix, calls, timeout_s=limit_s)
    assert done == [[4 * len(counts) for counts in listed.values()]] * world_size


@pytest.mark.full
@pytest.mark.parametrize(("world_size", "dtype"), [pytest.param(2, "float32", marks=pytest.mark.full), (3, "bfloat16")])
def test_calls_that_clear_their_own_slots(world_size: int, dtype: str) -> None:
    """Long calls clear their own slots. Here they also run between calls that leave the clearing to the next call."""
    interpreted(targets.matrix, world_size, [1, 700, 40, 1100], [dtype], True)


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_shorter_and_longer_calls(world_size: int) -> None:
    assert interpreted(targets.shorter_and_longer, world_size, 24)[0] > 1000


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2)])
def test_the_next_call_clears_all_slots(dtype: str, item: int) -> None:
    """A call leaves as many words and scales as the documentation states, and the next call clears all of them."""
    count = 3 * 128 * item + 40  # a rank's slice is one and a half groups and a little more
    first = wire.slice_bytes(count * item, 2)
    wanted = 0
    for slice_bytes in (first, count * item - first):
        group_bytes = 128 * item * item  # ``item`` blocks of 128 elements
        groups, rest = divmod(-(-slice_bytes // 16) * 16, group_bytes)
        wanted += groups * 128 * item // 4 + min(rest, 128 * item) // 4 + (groups + (rest > 0)) * item
    short = -(-4 * item // 16) * 4
    for counts in interpreted(targets.words_left_in_slots, 2, dtype, count):
        assert counts == [wanted, short]


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "world_size"), [pytest.param("float32", 2, marks=pytest.mark.full), ("float16", 3)])
def test_the_longest_message_fits(dtype: str, world_size: int) -> None:
    (nbytes,) = interpreted(targets.longest_messages, world_size, dtype)[0]
    assert nbytes > (1 << 12) * (3 if dtype == "float32" else 1.5)


@pytest.mark.full
def test_sentinels_arrive_as_nan() -> None:
    assert interpreted(targets.nothing_but_sentinels, 2, timeout_s=300) == [9, 9]


@pytest.mark.full
def test_bits_do_not_depend_on_the_launch() -> None:
    assert interpreted(targets.bits_of_launches, 2) == [True, True]


@pytest.mark.timing
@pytest.mark.parametrize(("world_size", "fault"), [(2, "killed"), pytest.param(3, "stopped", marks=pytest.mark.full)])
def test_killed_or_stopped_rank(world_size: int, fault: str) -> None:
    victim, timeout_s = world_size - 1, 600.0 if fault == "killed" else 3.0
    arguments = ("cpu", "two_shot_fp8", victim, SIGNALS[fault], timeout_s)
    results = interpreted(killed, world_size, *arguments, timeout_s=300, fresh=True, return_exceptions=True)
    assert isinstance(results[victim], shotcast.RankFailed)
    for outcome in results[:victim]:
        assert isinstance(outcome, dict), outcome
        assert isinstance(outcome["error"], shotcast.CollectiveTimeout), outcome["error"]
        assert outcome["error"].missing == (victim,)
        # A stopped call runs all its tiles to the end, which takes the interpreter a while.
        if fault == "killed":
            assert outcome["error"].reason == "dead"
            assert outcome["took"] < 60
        else:
            assert timeout_s * 0.9 < outcome["took"] < timeout_s + 60
        assert outcome["nan"]
        assert isinstance(outcome["again"], shotcast.CollectiveTimeout)
        assert outcome["left"] == []


@pytest.mark.full
@pytest.mark.timing
def test_calls_after_a_fault_give_nan() -> None:
    """The slots hold numbers of earlier calls by then."""
    for error, nans, _ in interpreted(replayed, 3, "two_shot_fp8", 2.0)[:-1]:
        assert isinstance(error, shotcast.CollectiveTimeout), error
        assert nans == [True] * 5


# -- permission -------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_auto_takes_fp8_only_where_allowed() -> None:
    """The argument allows it or, without an argument, the environment does."""
    kinds = [(None, "", False), (None, "1", True), (True, "0", True), (False, "1", False), (True, "", True)]
    calls = [(argument, variable) for argument, variable, _ in kinds]
    for each in interpreted(in_turn, 2, targets.choices, calls, timeout_s=300, fresh=True):
        for (argument, variable, allowed), outcome in zip(kinds, each, strict=True):
            taken = [outcome[key] == "two_shot_fp8" for key in ("algorithm", "child")]
            assert taken == [allowed] * 2, (argument, variable)
            assert "two_shot_fp8" in outcome["legal"]
            assert ("allow_fp8 is not set" in outcome["reason"]) == (not allowed)
