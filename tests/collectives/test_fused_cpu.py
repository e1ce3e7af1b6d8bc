"""The fused operations on compiled CPU ranks, by their public methods: bits, forms, and the text of explain."""

from __future__ import annotations

import fused_cpu_targets as cpu_targets
import fused_targets as targets
import pytest
from fused_targets import Case
from workers import FLOATS

import shotcast
from shotcast.wire import ALL_REDUCE_NORMS, Op

OPS = list(ALL_REDUCE_NORMS)
ROWS = [(0, 8), (1, 1), (5, 7), (4, 129), (6, 64), (3, 2880)]


@pytest.mark.every(3)
@pytest.mark.parametrize(("world_size", "max_bytes", "shift"), [(2, 1 << 20, 1), (3, 1, 0), (8, 1, 1)])
def test_every_operation_and_form(world_size: int, max_bytes: int, shift: int) -> None:
    listed = [
        Case(dtype, rows, hidden, shift)
        for number, dtype in enumerate(("bfloat16", "float16", "float32"))
        for turn, (rows, hidden) in enumerate(ROWS)
        if world_size < 4 or (turn + number) % 3 == 0
    ]
    done = shotcast.spawn(targets.cases, world_size, "cpu", listed, OPS, max_bytes, timeout_s=300)
    algorithms = 2 * len(OPS)
    assert done == [len(listed) * (len(OPS) + 5 * algorithms)] * world_size


@pytest.mark.full
@pytest.mark.parametrize(("world_size", "max_bytes"), [(2, 1 << 20), (5, 1)])
def test_layer_norms(world_size: int, max_bytes: int) -> None:
    weights = ("", "float32", "bfloat16")
    listed = [Case(dtype, *rows, n % 2, weights[n % 3]) for dtype in FLOATS for n, rows in enumerate(ROWS[1:])]
    listed = listed[:: 1 if world_size == 2 else 3]
    done = shotcast.spawn(targets.cases, world_size, "cpu", listed, [Op.ALL_REDUCE_LAYER_NORM], max_bytes, 2)
    algorithms = 2
    assert done == [len(listed) * (1 + 2 * algorithms)] * world_size


def test_a_rank_that_norms_otherwise_is_named() -> None:
    for error, fields in shotcast.spawn(targets.mismatched, 2, "cpu", "kind", timeout_s=300):
        assert isinstance(error, shotcast.CollectiveMismatch), error
        assert fields[0] == "op"
        assert "all_reduce_layer_norm(float32" in str(error)
        assert "all_reduce_rms_norm(float32" in str(error)
        assert "bias" in str(error)


@pytest.mark.full
def test_weights_of_another_dtype() -> None:
    pairs = [(dtype, weight) for dtype in FLOATS for weight in FLOATS if weight != dtype]
    listed = [Case(dtype, 2 + turn % 2, 129 + turn, turn % 2, weight) for turn, (dtype, weight) in enumerate(pairs)]
    done = shotcast.spawn(targets.cases, 2, "cpu", listed, OPS, 1 << 18, 2, timeout_s=300)
    algorithms = 2 * len(OPS)
    assert done == [len(listed) * (len(OPS) + 2 * algorithms)] * 2


def test_ranks_with_weights_of_different_dtypes_are_named() -> None:
    for error, fields in shotcast.spawn(targets.mismatched, 2, "cpu", "weight", timeout_s=300):
        assert isinstance(error, shotcast.CollectiveMismatch), error
        assert fields == ["root"]
        assert "static FP8 and the norm, weight of float16" in str(error)


def test_ranks_with_rows_of_different_lengths_are_named() -> None:
    for error, fields in shotcast.spawn(targets.mismatched, 2, "cpu", "hidden", timeout_s=300):
        assert isinstance(error, shotcast.CollectiveMismatch), error
        assert "launch" in fields
        assert " in rows or launch #" in str(error)


def test_fused_operations_are_one_call_and_work_in_place() -> None:
    shotcast.spawn(cpu_targets.one_call_and_in_place, 2, timeout_s=300)


def test_rows_without_elements_are_served_by_separate_calls() -> None:
    explanation = shotcast.spawn(cpu_targets.rows_without_elements, 2, timeout_s=300)[0]
    assert "rows have no elements; so the sum is a call of its own" in explanation


@pytest.mark.parametrize("world_size", [1, 2])
def test_vendor_sum_has_the_same_norm_bits(world_size: int) -> None:
    shotcast.spawn(cpu_targets.by_the_vendor_library, world_size, timeout_s=300)


def test_a_late_rank_leaves_nothing_that_looks_like_a_result() -> None:
    shotcast.spawn(cpu_targets.late_rank, 2, timeout_s=300)
