"""Functions that a rank of tests/transport/test_fused_tiles.py runs: how a row's programs add up, interpreted.

They have their own module, since Triton decides at import whether it interprets.
"""

# ruff: noqa: N803, N806 (Triton: what is known when compiling is upper case)
from __future__ import annotations

import itertools
import math

import torch
import triton
import triton.language as tl

from shotcast.kernels.triton.norm import merge_moments, moments_of
from shotcast.transport.triton.fused_tiles import await_parts, store_parts, tag_of
from shotcast.transport.triton.sync import Call

ROW_TILES = 5


@triton.jit
def exchange(cells, cell_stride, row, mine, bits, seen, epoch, ROW_TILES: tl.constexpr):
    """Store the parts of two rows, those of this program and of all others, and then await them as this program."""
    address = cells.to(tl.int64)
    number = tl.load(epoch)
    call = Call(cells, cells, row, number, number, number, row, row, row, number)
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


TILE = 128


@triton.jit
def moments(values, out, count, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Store mean and sum of squared differences of the first ``count`` values in BLOCK words."""
    VALUES: tl.constexpr = 1 if tl.float32 == DTYPE else 2
    place = tl.arange(0, BLOCK) * VALUES
    low = tl.load(values + place, mask=place < count, other=0.0)
    high = tl.load(values + place + 1, mask=place + 1 < count, other=0.0)
    mean, squares = moments_of(low, high, count, BLOCK, DTYPE)
    tl.store(out, mean)
    tl.store(out + 1, squares)


@triton.jit
def merged(parts, out, count, WIDTH: tl.constexpr, LEAF: tl.constexpr):
    """Store the moments of a row from those of its tiles."""
    at = tl.arange(0, WIDTH)
    mean, squares = merge_moments(tl.load(parts + 2 * at), tl.load(parts + 2 * at + 1), count, WIDTH, LEAF)
    tl.store(out, mean)
    tl.store(out + 1, squares)


def moments_of_rows() -> None:
    """Compare mean and variance of rows that one program holds, or several with a tile each, with each other.

    The bits have to be the same, and the values those of float64, whatever the mean is beside the deviation.
    """
    generator = torch.Generator().manual_seed(3)
    for (dtype, values), words, offset in itertools.product(
        ((tl.float32, 1), (tl.bfloat16, 2)), (1, 100, 128, 129, 300, 1000, 4100), (0.0, 1e4, -1e6)
    ):
        for count in sorted({words * values, words * values - values + 1}):  # of 16 bits, the last may be half a word
            row = torch.randn(count, generator=generator) * 3 + offset
            tiles = -(-words // TILE)
            width = triton.next_power_of_2(tiles)
            whole, parts, joined = torch.zeros(2), torch.zeros(width, 2), torch.zeros(2)
            moments[(1,)](row, whole, count, max(16, triton.next_power_of_2(words)), dtype)
            for part in range(tiles):
                piece = row[part * TILE * values : (part + 1) * TILE * values].clone()
                moments[(1,)](piece, parts[part], len(piece), TILE, dtype)
            merged[(1,)](parts, joined, count, width, TILE * values)
            assert torch.equal(whole.view(torch.int32), joined.view(torch.int32)), (dtype, words, offset, count)
            exact, u = row.double(), 2.0**-24
            error = 4 * math.log2(2 * count) * u * exact.abs().max()
            assert abs(whole[0] - exact.mean()) <= error, (dtype, words, offset, count)
            squares = (exact - exact.mean()).square().sum()
            # means are off by up to `error`, and so are the differences from them and of them
            bound = 4 * math.log2(2 * count) * u * squares + 4 * error * (count * squares).sqrt() + 4 * count * error**2
            assert abs(whole[1] - squares) <= bound, (dtype, words, offset, count)
