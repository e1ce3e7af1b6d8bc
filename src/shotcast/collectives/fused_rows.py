"""Rows of fused calls: which ones kernels can hold, and how launches divide them; and the forms of such calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shotcast.collectives.algorithm import CollectiveProblem, Form, Workspace
from shotcast.cost.collective import Work
from shotcast.device.triton.tiles import MAX_ROW_WORDS
from shotcast.transport.triton.layout import QUAD
from shotcast.units import align_up, format_size
from shotcast.wire import ALL_REDUCE_NORMS, LaunchShape, NodeShape, Op


def rows_unsupported_reason(problem: CollectiveProblem) -> str:
    """Return why the fused kernels, which hold a row in the registers of one program, cannot hold these rows; empty if
    they can. Host code takes any rows."""
    row = problem.row_bytes
    if not problem.topology.transport.grids:
        return "" if row else "rows have no elements"
    if row == 0 or row % QUAD:
        return f"fused kernels take rows of a multiple of {QUAD} bytes, and these have {row}"
    if row > 4 * MAX_ROW_WORDS:
        return f"fused kernels take rows of up to {format_size(4 * MAX_ROW_WORDS)}, and these have {format_size(row)}"
    return ""


_TILE_WORDS = 128
"""The words of a tile, unless the row is shorter: one load of a warp."""
_LARGE_TILE_WORDS = 256
"""The words of a tile of two ranks: on two H200s, 64 rows of 8192 bfloat16 take 7.1 us with these tiles and 7.4 with
small ones (``exploration/copies_x2.txt``)."""
_MOST_BESIDE_OTHERS = 1024
"""The most large tiles that leave room for other communicators. With 96 registers a thread in 1,024 programs of
one-shot, or 143 in 512 of two-shot, they take up to 36% of an H200's registers."""


def tiles_of_rows(problem: CollectiveProblem) -> tuple[int, int]:
    """Return the number of tiles in the rows of a fused all-reduce, and the words of a tile.

    A tile belongs to one warp, with at least one word per thread, and is otherwise no longer than a row. Large tiles
    pad no row further than small ones do. The interpreter runs programs one after the other, so there a tile is a row.
    The bits do not depend on tiles.
    """
    topology = problem.topology
    words = max(1, problem.row_bytes // 4)
    interpreted = topology.transport.serial
    rows = problem.nbytes // (4 * words)
    block = 1 << max(4 if interpreted else 5, (words - 1).bit_length())
    if not interpreted:
        large = topology.shape.nodes == 1 and topology.world_size == 2
        large &= align_up(words, _TILE_WORDS) % _LARGE_TILE_WORDS == 0
        if not topology.exclusive:
            large &= rows * -(-words // _LARGE_TILE_WORDS) <= _MOST_BESIDE_OTHERS
        block = min(block, _LARGE_TILE_WORDS if large else _TILE_WORDS)
    return rows * -(-words // block), block


def fused_forms(
    work: Callable[[int, NodeShape, int], Work],
    owners: Callable[[CollectiveProblem], int],
    workspace: Callable[[CollectiveProblem], Workspace],
    **kernels: Any,
) -> dict[Op, Form]:
    """Return the forms of an all-reduce with residual and norm.

    ``owners(problem)`` ranks divide the tiles, and a launch has one program for each tile of a rank.
    """

    def launch(problem: CollectiveProblem) -> LaunchShape:
        tiles, block = tiles_of_rows(problem)
        return LaunchShape(programs=max(1, -(-tiles // owners(problem))), block_words=block, num_warps=1)

    reason = rows_unsupported_reason
    form = Form(work=work, launch=launch, workspace=workspace, unsupported_reason=reason, **kernels)
    return dict.fromkeys(ALL_REDUCE_NORMS, form)
