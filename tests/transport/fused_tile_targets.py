"""Functions that a rank of tests/transport/test_fused_tiles.py runs: how a row's programs add up, interpreted.

They have their own module, since Triton decides at import whether it interprets.
"""

# ruff: noqa: N803, N806 (Triton: what is known when compiling is upper case)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from shotcast.transport.triton.fused_tiles import await_parts, store_parts, tag_of
from shotcast.transport.triton.sync import Call

ROW_TILES = 5


@triton.jit
def exchange(cells, cell_stride, row, mine, bits, seen, epoch, ROW_TILES: tl.constexpr):
    """Store the parts of two rows, those of this program and of all others, and then await them as this program."""
    address = cells.to(tl.int64)
    number = tl.load(epoch)
    call = Call(cells, cells, row, number, number, number, row, row, number)
    for part in range(ROW_TILES):
        store_parts(
            call,
            address,
            cell_stride,
            (row, row + 1),
            (row * 0 + part, row * 0 + part),
            (tl.load(bits + part), tl.load(bits + ROW_TILES + part)),
            (row * 0 + 1, row * 0 + 1),
            2,
            ROW_TILES,
        )
    own = (tl.load(bits + mine), tl.load(bits + ROW_TILES + mine))
    given = store_parts(
        call, address, cell_stride, (row, row + 1), (mine, mine), own, (row * 0 + 1, row * 0 + 1), 2, ROW_TILES
    )
    WIDTH: tl.constexpr = triton.next_power_of_2(ROW_TILES)
    for i in tl.static_range(2):  # no program may need to read its own cell
        tl.store(cells + ((row + i) * WIDTH + mine) * cell_stride, tag_of(number) << 32)
    taken = await_parts(
        call, address, cell_stride, (row, row + 1), (mine, mine), given, (row * 0 + 1, row * 0 + 1), 2, ROW_TILES
    )
    for i in tl.static_range(2):
        tl.store(seen + i * WIDTH + tl.arange(0, WIDTH), taken[i])


def exchanges(cell_stride: int) -> None:
    width = triton.next_power_of_2(ROW_TILES)
    for epoch, row, mine in ((1, 0, 0), (2, 3, 4), ((1 << 31) + 5, 1, 2)):
        bits = torch.randint(-(1 << 31), 1 << 31, (2, ROW_TILES), dtype=torch.int32)
        cells = torch.full([8 * width * cell_stride], -1, dtype=torch.int64)
        seen = torch.full([2, width], 7, dtype=torch.int32)
        exchange[(1,)](cells, cell_stride, row, mine, bits, seen, torch.tensor([epoch]), ROW_TILES)
        assert torch.equal(seen[:, :ROW_TILES], bits), (epoch, row, mine)
        assert not seen[:, ROW_TILES:].any()
        written = (cells != -1).nonzero().flatten().tolist()
        assert written == [((row + i) * width + part) * cell_stride for i in range(2) for part in range(ROW_TILES)]
