"""The cells in which a row's programs store their parts of its sum of squares."""

from __future__ import annotations

import fused_tile_targets as targets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quick_interpreter import interpret
from shotcast.device.triton import tiles
from shotcast.transport.triton import layout


@given(st.integers(16, 1 << 24), st.integers(129, tiles.MAX_ROW_WORDS), st.data())
def test_every_row_of_the_largest_call_has_its_own(max_bytes: int, row_words: int, data: st.DataObject) -> None:
    """The kernel gives each row a power of two of cells, ``cell_stride`` apart from one another.

    Rows of one tile have none.
    """
    rows = data.draw(st.integers(0, max_bytes // (4 * row_words)))
    parts = -(-row_words // 128)
    cell_stride = layout.row_cell_stride(rows, parts)
    width = 1 << (parts - 1).bit_length()
    assert width >= parts
    assert rows * width * cell_stride <= layout.row_cell_count(max_bytes)


@pytest.mark.parametrize("cell_stride", [1, 16])
def test_a_program_takes_what_all_gave(cell_stride: int) -> None:
    """A program keeps its own part: the test damages the cell of it before the others are read."""
    interpret(targets.exchanges, 1, cell_stride)


@pytest.mark.full
def test_mean_and_variance_do_not_depend_on_who_holds_a_row() -> None:
    interpret(targets.moments_of_rows, 1)
