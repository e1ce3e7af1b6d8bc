"""The fused operations on compiled CPU ranks, by their public methods: bits, forms, and the text of explain."""

from __future__ import annotations

import fused_cpu_targets as cpu_targets
import fused_targets as targets
import pytest
from fused_targets import Case

import shotcast
from shotcast.wire import Op

OPS = [Op.ALL_REDUCE_RMS_NORM, Op.REDUCE_SCATTER_RMS_NORM, Op.REDUCE_SCATTER_RMS_NORM_ALL_GATHER]
ROWS = [(0, 8), (1, 1), (5, 7), (4, 129), (6, 64), (3, 2880)]


@pytest.mark.parametrize(("world_size", "max_bytes", "shift"), [(2, 1 << 20, 1), (3, 1, 0), (8, 1, 1)])
def test_every_operation_and_form(world_size: int, max_bytes: int, shift: int) -> None:
    listed = [
        Case(dtype, rows, hidden, shift)
        for number, dtype in enumerate(("bfloat16", "float16", "float32"))
        for turn, (rows, hidden) in enumerate(ROWS)
        if world_size < 4 or (turn + number) % 3 == 0
    ]
    done = shotcast.spawn(targets.cases, world_size, "cpu", listed, OPS, max_bytes, timeout_s=100)
    algorithms = 4
    assert done == [len(listed) * (len(OPS) + 5 * algorithms)] * world_size


def test_fused_operations_are_one_call_and_work_in_place() -> None:
    shotcast.spawn(cpu_targets.one_call_and_in_place, 2, timeout_s=60)


def test_rows_without_elements_are_served_by_separate_calls() -> None:
    explanation = shotcast.spawn(cpu_targets.rows_without_elements, 2, timeout_s=60)[0]
    assert "rows have no elements; so the sum is a call of its own" in explanation


@pytest.mark.parametrize("world_size", [1, 2])
def test_vendor_sum_has_the_same_norm_bits(world_size: int) -> None:
    shotcast.spawn(cpu_targets.by_the_vendor_library, world_size, timeout_s=60)


def test_a_late_rank_leaves_nothing_that_looks_like_a_result() -> None:
    shotcast.spawn(cpu_targets.late_rank, 2, timeout_s=60)
