"""Random programs of collectives, started and coalesced calls and messages, against plain PyTorch."""

from __future__ import annotations

import operation_programs as programs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shared_ranks

SIZES = (2, 3)


@st.composite
def sized_programs(draw: st.DrawFn) -> tuple[int, programs.Program]:
    """Draw a number of ranks and a program for them, each of whose numbers can be shrunk."""
    size = draw(st.sampled_from(SIZES))
    return size, programs.make(size, lambda low, high: draw(st.integers(low, high)))


@pytest.mark.full
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(sized_programs())
def test_programs_that_shrink(case: tuple[int, programs.Program]) -> None:
    size, program = case
    shared_ranks.run(programs.one_program, size, program, timeout_s=300)


@pytest.mark.every(2)
@pytest.mark.parametrize("world_size", SIZES)
def test_programs(world_size: int) -> None:
    steps = shared_ranks.run(programs.many_programs, world_size, 1000 * world_size, 60, timeout_s=300)
    assert len(set(steps)) == 1
    assert steps[0] > 200


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("world_size", "count"), [(2, 5000), (3, 3000), (4, 1500), (8, 500)])
def test_ten_thousand_programs(world_size: int, count: int) -> None:
    shared_ranks.run(programs.many_programs, world_size, 1_000_000 * world_size, count, timeout_s=3000)
