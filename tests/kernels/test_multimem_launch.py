"""How the executor launches sums in the switch, decided where there is no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shotcast.kernels import layout
from shotcast.kernels.executor import MULTICAST_OPTIONS, TritonExecutor
from shotcast.kernels.layout import Layout
from shotcast.kernels.multimem import multimem_all_reduce
from shotcast.wire import CallPlan, LaunchShape, Op


def launch(shape: LaunchShape, algorithm: str = "multimem", multicast: bool = True) -> tuple[Any, int, int, Any]:
    state: Any = SimpleNamespace(
        _own_address=1 << 40,
        _peers_address=1 << 41,
        _rank=1,
        _world=4,
        _pdl=True,
        _layout=Layout.of(1 << 20),
        _multicast=multicast,
        _multicast_options=MULTICAST_OPTIONS if multicast else {},
    )
    plan = CallPlan(Op.ALL_REDUCE, algorithm, "bfloat16", 1 << 16, launch=shape)
    return TritonExecutor._launch(state, plan, None, None, 16)


@pytest.mark.parametrize(("block", "warps", "taken"), [(128, 1, 128), (512, 4, 512), (64, 1, 128), (128, 4, 512)])
def test_every_quad_has_one_thread(block: int, warps: int, taken: int) -> None:
    """Two threads that sum one quad could see two orders of addition, and the ranks different bits."""
    kernel, programs, _, arguments = launch(LaunchShape(8, block, warps))
    assert kernel is multimem_all_reduce
    assert (programs, arguments["BLOCK"]) == (9, taken)


def test_programs_have_a_row_of_flags_each() -> None:
    assert launch(LaunchShape(5000, 128, 1))[1] == 1 + layout.FLAG_ROWS
    where = Layout.of(1 << 20)
    assert launch(LaunchShape(1, 128, 1))[3]["flags_at"] == where.flags_at
    assert where.cells_at - where.flags_at == layout.FLAG_ROWS * layout.FLAG_ROW_QUADS
    assert layout.FLAG_ROW_QUADS * layout.QUAD >= 8 * 8


def test_kernels_that_multicast_are_held_to_their_registers() -> None:
    shape = LaunchShape(8, 128, 1)
    assert launch(shape)[3]["maxnreg"] == 128
    assert launch(shape, "two_shot")[3]["maxnreg"] == 128
    assert "maxnreg" not in launch(shape, "two_shot", multicast=False)[3]
