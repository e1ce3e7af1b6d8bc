"""Addends that are with the peers before the call begins, by the interpreter."""

from __future__ import annotations

import push_targets as targets
import pytest
from test_interpreter import interpreted

import shotcast


@pytest.mark.parametrize(("world_size", "dtype", "some"), [(2, "bfloat16", False), (4, "float16", True)])
def test_the_bits_are_those_of_a_call_that_sends_itself(world_size: int, dtype: str, some: bool) -> None:
    done = interpreted(targets.pushed_calls, world_size, "cpu", 6, [256, 512], 64, dtype, some)
    if some:
        assert 0 < sum(done) < 6 * world_size
    else:
        assert done == [6] * world_size


def test_where_nothing_can_be_pushed() -> None:
    interpreted(targets.where_none, 2, "cpu")


def test_compiled_ranks_push_nothing() -> None:
    assert shotcast.spawn(targets.compiled, 2) == [None, None]
