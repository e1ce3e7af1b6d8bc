"""How the executor launches kernels that multicast, decided where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest

from shotcast.kernels import layout
from shotcast.kernels.executor import TritonExecutor
from shotcast.kernels.launch import Launch
from shotcast.kernels.layout import Layout
from shotcast.kernels.multimem import multimem_all_reduce
from shotcast.wire import CallPlan, LaunchShape, Op

MAX_BYTES = 1 << 20


def launches(
    shape: LaunchShape,
    algorithm: str = "multimem",
    multicast: bool = True,
    op: Op = Op.ALL_REDUCE,
    nbytes: int = 1 << 16,
) -> list[tuple[Launch, int]]:
    """What a rank of four would launch, each with its first byte; nothing is compiled."""
    executor: Any = object.__new__(TritonExecutor)
    executor._own_address, executor._peers_address = 1 << 40, 1 << 41
    executor._rank, executor._world, executor._pdl = 1, 4, True
    executor._layout, executor.many_bytes = Layout.of(MAX_BYTES), layout.MANY_BYTES
    executor._multicast, executor._entries = multicast, {}
    plan = CallPlan(op, algorithm, "bfloat16", nbytes, launch=shape)
    return list(executor._ready(plan, True).launches)


@pytest.mark.parametrize(("block", "warps", "taken"), [(128, 1, 128), (512, 4, 512), (64, 1, 128), (128, 4, 512)])
def test_every_quad_has_one_thread(block: int, warps: int, taken: int) -> None:
    """Two threads that sum one quad could see two orders of addition, and the ranks different bits."""
    ((launch, start),) = launches(LaunchShape(8, block, warps))
    assert launch._kernel is multimem_all_reduce
    assert (launch._programs, launch._arguments["BLOCK"], start) == (9, taken, 0)


def test_programs_have_a_row_of_flags_each() -> None:
    ((launch, _),) = launches(LaunchShape(5000, 128, 1))
    where = Layout.of(MAX_BYTES)
    assert launch._programs == 1 + layout.FLAG_ROWS
    assert launch._arguments["flags_at"] == where.flags_at
    assert where.cells_at - where.flags_at == layout.FLAG_ROWS * layout.FLAG_ROW_QUADS
    assert layout.FLAG_ROW_QUADS * layout.QUAD >= 8 * 8


def test_a_message_beyond_the_workspace_passes_in_pieces() -> None:
    made = launches(LaunchShape(8, 128, 1), nbytes=2 * MAX_BYTES + 32)
    assert [start for _, start in made] == [0, MAX_BYTES, 2 * MAX_BYTES]
    assert [launch._arguments["nbytes"] for launch, _ in made] == [MAX_BYTES, MAX_BYTES, 32]
