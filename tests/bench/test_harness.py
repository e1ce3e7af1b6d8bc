"""The harness times right results only."""

from __future__ import annotations

import dataclasses

import harness_targets as targets
import pytest

import shotcast
from shotcast.bench import harness, implementations
from shotcast.bench.config import BenchConfig
from shotcast.bench.operations import OPERATIONS
from shotcast.errors import ConfigError, RankFailed

pytestmark = pytest.mark.timing

CONFIG = BenchConfig(
    op="all_reduce",
    device="cpu",
    dtype="float32",
    sizes=(64, 4096),
    iters=12,
    warmup_iters=2,
    budget_s=0.05,
    timeout_s=90,
)


@pytest.mark.full
@pytest.mark.parametrize(("world_size", "dtype"), [(2, "float32"), pytest.param(3, "bfloat16", marks=pytest.mark.full)])
def test_every_implementation_at_every_size(world_size: int, dtype: str) -> None:
    configs = [dataclasses.replace(CONFIG, op=op, dtype=dtype) for op in OPERATIONS]
    of_all = shotcast.spawn(targets.measured, world_size, configs, timeout_s=300)[0]
    for config, rows in zip(configs, of_all, strict=True):
        assert {row.nbytes for row in rows} == set(config.nbytes(world_size))
        for nbytes in config.nbytes(world_size):
            names = [row.algorithm for row in rows if row.nbytes == nbytes]
            rings = {"ring"} if config.op in ("all_reduce", "reduce_scatter", "all_gather") else set()
            assert {*rings, "one_shot", "auto", "gloo"} <= set(names)
            assert len(names) == len(set(names))
        for row in rows:
            facts = row.op, row.device, row.world_size, row.dtype, row.errors
            assert facts == (config.op, "cpu", world_size, dtype, 0)
            assert row.time_us is not None
            assert row.p99_us is not None
            assert row.lowest_us is not None
            assert row.highest_us is not None
            assert 0 < row.lowest_us <= row.highest_us
            assert 0 < row.time_us <= row.p99_us


@pytest.mark.full
def test_other_reductions_and_dtypes() -> None:
    asked = [("all_reduce", "max", "int32"), ("reduce_scatter", "prod", "int8"), ("reduce", "min", "float64")]
    asked += [("all_reduce", "avg", "float16"), ("all_gather", "sum", "uint8"), ("all_reduce", "sum", "int16")]
    configs = [
        dataclasses.replace(CONFIG, op=op, reduction=reduction, dtype=dtype, sizes=(96,))
        for op, reduction, dtype in asked
    ]
    for (op, reduction, dtype), rows in zip(
        asked, shotcast.spawn(targets.measured, 3, configs, timeout_s=300)[0], strict=True
    ):
        assert {(row.op, row.reduction, row.dtype, row.errors) for row in rows} == {(op, reduction, dtype, 0)}
        has_gloo = reduction != "avg" and dtype != "int16"
        assert {row.algorithm for row in rows} >= {"one_shot", "auto", *(["gloo"] if has_gloo else [])}


def test_only_what_was_asked_for() -> None:
    rows = harness.run(dataclasses.replace(CONFIG, algorithms=("gloo", "two_shot")), 2)
    assert [row.algorithm for row in rows] == ["gloo", "two_shot"] * 2


def test_without_check_nothing_is_compared() -> None:
    rows = shotcast.spawn(targets.one_element_off, 2, dataclasses.replace(CONFIG, check=False), 1.0, 1, timeout_s=300)[
        0
    ]
    assert [row.errors for row in rows] == [None, None]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_element_is_counted_and_not_timed(rank: int) -> None:
    rows = shotcast.spawn(targets.one_element_off, 2, CONFIG, 1e-3, rank, timeout_s=300)[0]
    assert [(row.errors, row.time_us) for row in rows] == [(1, None), (1, None)]


def test_nan_is_wrong() -> None:
    rows = shotcast.spawn(targets.one_element_off, 2, CONFIG, float("nan"), 0, timeout_s=300)[0]
    assert [row.errors for row in rows] == [1, 1]


def test_rounding_is_not_wrong() -> None:
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    rows = shotcast.spawn(targets.one_element_off, 2, config, 1e-4, 0, timeout_s=300)[0]
    assert [row.errors for row in rows] == [0, 0]


def test_an_implementation_that_goes_wrong_later_is_caught() -> None:
    config = dataclasses.replace(CONFIG, op="all_gather", sizes=(64,))
    rows = shotcast.spawn(targets.wrong_after_a_while, 2, config, timeout_s=300)[0]
    assert rows[0].errors == 32, "both ranks' 16 elements"
    assert rows[0].time_us is None


def test_the_slowest_rank_counts() -> None:
    rows = shotcast.spawn(targets.one_rank_sleeps, 2, dataclasses.replace(CONFIG, sizes=(64,), check=False), 0.01)[0]
    assert rows[0].time_us is not None
    assert rows[0].skew_us is not None
    assert 10_000 <= rows[0].time_us < 200_000
    assert rows[0].skew_us > 9_000


@pytest.mark.parametrize(("iters", "budget_s", "timed"), [(30, 100.0, 30), (1000, 0.0, 6)])
def test_calls_are_bounded_by_iterations_and_budget(iters: int, budget_s: float, timed: int) -> None:
    config = dataclasses.replace(CONFIG, sizes=(64,), iters=iters, budget_s=budget_s, warmup_iters=3)
    counts = shotcast.spawn(targets.counts_calls, 2, config, timeout_s=300)[0]
    assert counts == [1 + 1 + 3 + timed + 1]


def test_calls_in_place_are_timed_on_zeros() -> None:
    """Otherwise values would double until they overflow."""
    config = dataclasses.replace(CONFIG, sizes=(64,), budget_s=100.0)
    seen = shotcast.spawn(targets.values_in_place, 2, config, timeout_s=300)[0]
    assert max(seen) <= 2.0, "an input or the result of the checked call"
    assert seen.count(0.0) == 1 + config.warmup_iters + config.iters


def test_each_setting_of_nccl_has_ranks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def spawn(fn: object, world_size: int, config: BenchConfig, names: tuple[str, ...], **options: object) -> list:
        started.append((names, options["env"]))
        return [[]]

    named = ("one_shot", "nccl", "nccl_ll", "nccl_tree")
    monkeypatch.setattr(harness, "spawn", spawn)
    harness.run(dataclasses.replace(CONFIG, device="cuda", algorithms=named), 4)
    favourable = {"NCCL_GRAPH_MIXING_SUPPORT": "0", "NCCL_GRAPH_REGISTER": "1"}
    assert started == [
        (("one_shot", "nccl"), favourable),
        (("nccl_ll",), {**favourable, "NCCL_PROTO": "LL"}),
        (("nccl_tree",), {**favourable, "NCCL_ALGO": "Tree"}),
    ]


def test_settings_of_nccl_cannot_be_had_under_torchrun() -> None:
    config = dataclasses.replace(CONFIG, device="cuda", algorithms=("nccl", "nccl_ll", "nccl_ring"))
    with pytest.raises(ConfigError, match="nccl_ll, nccl_ring need ranks started with NCCL_ALGO, NCCL_PROTO set"):
        harness.run_under_torchrun(config)


def test_a_hang_ends() -> None:
    config = dataclasses.replace(CONFIG, timeout_s=2.0, iters=10**9, budget_s=1e6)
    with pytest.raises(RankFailed, match="not finished within 2 s"):
        harness.run(config, 2)


class TestConfig:
    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"op": "all_to_some"}, "no benchmark"),
            ({"dtype": "complex64"}, "dtype"),
            ({"device": "tpu"}, "device"),
            ({"algorithms": ("ring", "nccl")}, "unknown algorithms for all_reduce on cpu: nccl"),
            ({"iters": 1}, "at least 5"),
            ({"warmup_iters": -1}, "negative"),
            ({"sizes": ()}, "1 byte"),
            ({"sizes": (0,)}, "1 byte"),
            ({"op": "all_reduce_rms_norm"}, "no benchmark"),
        ],
    )
    def test_nonsense_is_refused(self, change: dict[str, object], match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            dataclasses.replace(CONFIG, **change)  # type: ignore[arg-type]

    def test_sizes_can_be_shared_out(self) -> None:
        config = dataclasses.replace(CONFIG, op="reduce_scatter", sizes=(1, 8, 1000))
        assert config.nbytes(3) == (12, 1008)
        assert dataclasses.replace(config, op="all_reduce").nbytes(3) == (4, 8, 1000)

    def test_the_best_nccl_is_looked_for_in_all_its_settings(self) -> None:
        config = dataclasses.replace(CONFIG, device="cuda", algorithms=())
        assert {"nccl", *implementations.NCCL_SETTINGS} <= set(config.implementations())
        assert "nccl_tree" not in dataclasses.replace(config, op="all_gather").implementations()
