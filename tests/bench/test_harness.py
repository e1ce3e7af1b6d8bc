"""The harness times what is right, and only that."""

from __future__ import annotations

import dataclasses

import harness_targets as targets
import pytest

import shotcast
from shotcast.bench import contenders, harness
from shotcast.bench.harness import BenchPlan
from shotcast.errors import ConfigError, RankFailed

PLAN = BenchPlan(
    op="all_reduce",
    device="cpu",
    dtype="float32",
    sizes=(64, 4096),
    iters=12,
    warmup_iters=2,
    budget_s=0.05,
    timeout_s=90,
)


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize(("world_size", "dtype"), [(2, "float32"), (3, "bfloat16")])
def test_every_contender_at_every_size(op: str, world_size: int, dtype: str) -> None:
    plan = dataclasses.replace(PLAN, op=op, dtype=dtype)
    rows = harness.run(plan, world_size)
    assert {row.nbytes for row in rows} == set(plan.nbytes(world_size))
    for nbytes in plan.nbytes(world_size):
        names = [row.algorithm for row in rows if row.nbytes == nbytes]
        assert {"ring", "one_shot", "gloo"} <= set(names)
        assert len(names) == len(set(names))
    for row in rows:
        assert (row.op, row.device, row.world_size, row.dtype, row.errors) == (op, "cpu", world_size, dtype, 0)
        assert row.time_us is not None
        assert row.p99_us is not None
        assert 0 < row.time_us <= row.p99_us


def test_only_what_was_asked_for() -> None:
    rows = harness.run(dataclasses.replace(PLAN, algorithms=("gloo", "two_shot")), 2)
    assert [row.algorithm for row in rows] == ["gloo", "two_shot"] * 2


def test_without_check_nothing_is_compared() -> None:
    rows = shotcast.spawn(targets.one_element_off, 2, dataclasses.replace(PLAN, check=False), 1.0, 1, timeout_s=60)[0]
    assert [row.errors for row in rows] == [None, None]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_element_is_counted_and_not_timed(rank: int) -> None:
    rows = shotcast.spawn(targets.one_element_off, 2, PLAN, 1e-3, rank, timeout_s=60)[0]
    assert [(row.errors, row.time_us) for row in rows] == [(1, None), (1, None)]


def test_nan_is_wrong() -> None:
    rows = shotcast.spawn(targets.one_element_off, 2, PLAN, float("nan"), 0, timeout_s=60)[0]
    assert [row.errors for row in rows] == [1, 1]


def test_rounding_is_not_wrong() -> None:
    plan = dataclasses.replace(PLAN, dtype="bfloat16")
    rows = shotcast.spawn(targets.one_element_off, 2, plan, 1e-4, 0, timeout_s=60)[0]
    assert [row.errors for row in rows] == [0, 0]


def test_a_contender_that_goes_wrong_later_is_caught() -> None:
    plan = dataclasses.replace(PLAN, op="all_gather", sizes=(64,))
    rows = shotcast.spawn(targets.wrong_after_a_while, 2, plan, timeout_s=60)[0]
    assert rows[0].errors == 32, "both ranks' 16 elements"
    assert rows[0].time_us is None


def test_the_slowest_rank_counts() -> None:
    rows = shotcast.spawn(targets.one_rank_sleeps, 2, dataclasses.replace(PLAN, sizes=(64,), check=False), 0.01)[0]
    assert rows[0].time_us is not None
    assert rows[0].skew_us is not None
    assert 10_000 <= rows[0].time_us < 30_000
    assert rows[0].skew_us > 9_000


@pytest.mark.parametrize(("iters", "budget_s", "timed"), [(30, 100.0, 30), (1000, 0.0, 6)])
def test_calls_are_bounded_by_iterations_and_budget(iters: int, budget_s: float, timed: int) -> None:
    plan = dataclasses.replace(PLAN, sizes=(64,), iters=iters, budget_s=budget_s, warmup_iters=3)
    made = shotcast.spawn(targets.counts_calls, 2, plan, timeout_s=60)[0]
    assert made == [1 + 3 + timed + 1]


def test_a_hang_ends() -> None:
    plan = dataclasses.replace(PLAN, timeout_s=2.0, iters=10**9, budget_s=1e6)
    with pytest.raises(RankFailed, match="not finished within 2 s"):
        harness.run(plan, 2)


class TestPlan:
    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"op": "all_to_some"}, "no benchmark"),
            ({"dtype": "int32"}, "dtype"),
            ({"device": "tpu"}, "device"),
            ({"algorithms": ("ring", "nccl")}, "unknown algorithms for all_reduce on cpu: nccl"),
            ({"iters": 1}, "at least 5"),
            ({"warmup_iters": -1}, "negative"),
            ({"sizes": ()}, "1 byte"),
            ({"sizes": (0,)}, "1 byte"),
        ],
    )
    def test_nonsense_is_refused(self, change: dict[str, object], match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            dataclasses.replace(PLAN, **change)  # type: ignore[arg-type]

    def test_sizes_can_be_shared_out(self) -> None:
        plan = dataclasses.replace(PLAN, op="reduce_scatter", sizes=(1, 8, 1000))
        assert plan.nbytes(3) == (12, 1008)
        assert dataclasses.replace(plan, op="all_reduce").nbytes(3) == (4, 8, 1000)

    def test_the_best_nccl_is_looked_for_in_all_its_settings(self) -> None:
        plan = dataclasses.replace(PLAN, device="cuda", algorithms=())
        assert {"nccl", *contenders.NCCL_SETTINGS} <= set(plan.contenders())
        assert "nccl_tree" not in dataclasses.replace(plan, op="all_gather").contenders()
