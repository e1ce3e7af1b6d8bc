"""The sentences that end a benchmark name what a repetition and a neighbouring size bear out."""

from __future__ import annotations

import itertools

import pytest

from shotcast.bench.headline import sentences
from shotcast.bench.report import Row

SIZES = [64, 128, 256]


def rows(algorithm: str, *rounds: tuple[float, ...], measure: str = "call") -> list[Row]:
    """Return a row for each of the first sizes, from its times of rounds on the slower of two ranks."""
    return [
        Row.from_ranks(
            op="all_reduce", device="cuda", world_size=4, dtype="bfloat16", algorithm=algorithm, nbytes=nbytes,
            medians_us=[sorted(us)[len(us) // 2]] * 2, p99s_us=[max(us)] * 2, errors=0, measure=measure,
            rounds_us=[us, [one / 2 for one in us]],
        )
        for nbytes, us in zip(SIZES, rounds, strict=False)
    ]  # fmt: skip


def test_rows_have_the_times_of_single_rounds() -> None:
    row = Row.from_ranks(
        op="all_reduce", device="cpu", world_size=2, dtype="float32", algorithm="ring", nbytes=8,
        medians_us=[3.0, 2.0], p99s_us=[9.0, 9.0], errors=0, rounds_us=[[3.0, 4.0, 1.0], [5.0, 2.0, 2.0]],
    )  # fmt: skip
    assert (row.lowest_us, row.highest_us) == (2.0, 5.0), "the slowest rank counts in each round"


def test_a_gain_at_neighbouring_sizes_is_named_by_the_smaller_ratio() -> None:
    measured = rows("ring", (30, 30, 30), (42, 42, 42)) + rows("one_shot", (10, 10, 10), (10, 10, 10))
    assert sentences(measured) == "4 ranks: one_shot is at least 3.0 times as fast as ring at 64 B and 128 B"


def test_a_gain_at_one_size_alone_is_not_named() -> None:
    ring = rows("ring", (10, 10, 10), (90, 90, 90), (10, 10, 10))
    assert sentences(ring + rows("one_shot", (10, 10, 10), (10, 10, 10), (10, 10, 10))) == ""
    assert sentences(rows("ring", (90, 90, 90)) + rows("one_shot", (10, 10, 10))) == ""


@pytest.mark.parametrize("disturbed", [0, 1, 2])
def test_a_gain_that_a_repetition_does_not_show_is_not_named(disturbed: int) -> None:
    quiet = (30.0, 30.0, 30.0)
    slow = tuple(30.0 if number == disturbed else 10.0 for number in range(3))
    assert sentences(rows("ring", quiet, quiet) + rows("one_shot", slow, slow)) == ""
    fast = tuple(10.0 if number == disturbed else 30.0 for number in range(3))
    assert sentences(rows("ring", fast, fast) + rows("one_shot", *[(10.0,) * 3] * 2)) == ""


def test_equal_times_with_noise_are_not_named() -> None:
    """Whatever the order of rounds, noise of a tenth leaves no ratio."""
    for first, second in itertools.product(itertools.permutations((100, 105, 110)), repeat=2):
        assert sentences(rows("ring", first, second) + rows("two_shot", second, first)) == ""


def test_the_best_of_all_forms_of_nccl_counts() -> None:
    nccl = rows("nccl", *[(30,) * 3] * 2) + rows("nccl_ll", *[(20,) * 3] * 2) + rows("nccl_tree", *[(50,) * 3] * 2)
    own = rows("two_shot", *[(5,) * 3] * 2)
    line = "4 ranks: two_shot is at least 4.0 times as fast as the best NCCL at 64 B and 128 B"
    assert sentences(nccl + own) == line
    assert sentences(nccl + own + rows("gloo", *[(10,) * 3] * 2)).splitlines() == [
        line,
        "4 ranks: two_shot is at least 2.0 times as fast as Gloo at 64 B and 128 B",
    ]


def test_ratios_are_rounded_down_and_small_ones_left_out() -> None:
    own = rows("one_shot", *[(100,) * 3] * 2)
    assert "at least 1.9 times" in sentences(rows("ring", *[(199,) * 3] * 2) + own)
    assert "at least 1.08 times" in sentences(rows("ring", *[(108.9,) * 3] * 2) + own)
    assert sentences(rows("ring", *[(104.9,) * 3] * 2) + own) == ""


def test_other_measures_are_not_compared() -> None:
    own = rows("one_shot", *[(1,) * 3] * 2, measure="host")
    assert sentences(rows("ring", *[(9,) * 3] * 2, measure="host") + own) == ""
