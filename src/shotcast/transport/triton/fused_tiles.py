"""A row's norm by programs that hold a tile of it each: what fused all-reduces do with a tile once its sum is there.

Tiles are as small as those of the plain all-reduce, as that is what makes it fast; a row's programs tell each other
their part of the sum of squares (and, for FP8 by rows, of the largest value) through cells in this GPU's memory: 32
bits of value, 32 of the call's number, so a cell is its own flag and is never cleared. All cells of a row are polled at
once, but for a program's own: a load seems to wait for the program's store to the same 128 bytes. Cells of few rows are
so far cell_stride (``cell_stride``, in cells) that the others are not in those.

Every program writes its cell, also when the call was stopped, so nobody waits here for longer than its row's programs
wait for their peers. They start in the order of their numbers; a row's fit on any GPU together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shotcast.device.triton.words import load_words, nan_unless, pack, store_words, unpack
from shotcast.kernels.triton.norm import (
    DYNAMIC,
    NONE,
    magnitude,
    quantized_words,
    scale_of,
    tree_sum,
    tree_sum_of_squares,
)


@triton.jit
def tile_bounds(tile, tiles, ROW: tl.constexpr, BLOCK: tl.constexpr, ROW_TILES: tl.constexpr):
    """(row, part, first byte, bytes) of a tile; no bytes before the first or beyond the last."""
    row = tile // ROW_TILES
    part = tile % ROW_TILES
    nbytes = tl.minimum(BLOCK * 4, ROW - part * (BLOCK * 4))
    return row, part, row * ROW + part * (BLOCK * 4), tl.where((tile >= 0) & (tile < tiles), nbytes, 0)


@triton.jit
def tag_of(epoch):
    """32 bits that name a call; odd, so that memory never written names none."""
    return (epoch * 2 + 1) & 0xFFFFFFFF


@triton.jit
def load_cells(base, cell_stride, rows, parts, own_cells, present, COUNT: tl.constexpr, ROW_TILES: tl.constexpr):
    """All cells of COUNT rows, with ``own_cells[i]`` as part ``parts[i]``; those that there are none of read as 0."""
    WIDTH: tl.constexpr = triton.next_power_of_2(ROW_TILES)
    lanes = tl.arange(0, WIDTH)
    cells = ()
    for i in tl.static_range(COUNT):
        there = (lanes < ROW_TILES) & (present[i] != 0) & (lanes != parts[i])
        seen = tl.load(base + (rows[i] * WIDTH + lanes) * cell_stride, mask=there, other=0, volatile=True)
        cells = cells + (tl.where(lanes == parts[i], own_cells[i], seen),)
    return cells


@triton.jit
def any_missing(cells, tag, present, COUNT: tl.constexpr, ROW_TILES: tl.constexpr):
    """1 while a part of any row has not been own_cells in this call."""
    lanes = tl.arange(0, triton.next_power_of_2(ROW_TILES))
    missing = lanes < 0
    for i in tl.static_range(COUNT):
        missing = missing | ((lanes < ROW_TILES) & (present[i] != 0) & ((cells[i] >> 32) & 0xFFFFFFFF != tag))
    return tl.max(missing.to(tl.int32), axis=0)


@triton.jit
def store_parts(call, cells, cell_stride, rows, parts, bits, present, COUNT: tl.constexpr, ROW_TILES: tl.constexpr):
    """Give ``bits[i]`` (int32) as part ``parts[i]`` of row ``rows[i]``, if ``present[i]`` is not 0. Returns cells."""
    WIDTH: tl.constexpr = triton.next_power_of_2(ROW_TILES)
    base = cells.to(tl.int64).to(tl.pointer_type(tl.int64))
    own_cells = ()
    for i in tl.static_range(COUNT):
        cell = (bits[i].to(tl.int64) & 0xFFFFFFFF) | (tag_of(call.epoch) << 32)
        tl.store(base + (rows[i] * WIDTH + parts[i]) * cell_stride, cell, mask=present[i] != 0)
        own_cells = own_cells + (cell,)
    return own_cells


@triton.jit
def await_parts(
    call, cells, cell_stride, rows, parts, own_cells, present, COUNT: tl.constexpr, ROW_TILES: tl.constexpr
):
    """The bits of all parts of each row, once they are stored. ``own_cells`` is what :func:`store_parts` returned.

    Those are tensors of ROW_TILES rounded up to a power of two, 0 beyond ROW_TILES. Where ``present[i]`` is 0 there is
    no tile. For programs of one warp, which sees one result of a reduction.
    """
    base = cells.to(tl.int64).to(tl.pointer_type(tl.int64))
    tag = tag_of(call.epoch)
    seen = load_cells(base, cell_stride, rows, parts, own_cells, present, COUNT, ROW_TILES)
    waiting = any_missing(seen, tag, present, COUNT, ROW_TILES)
    while waiting != 0:
        seen = load_cells(base, cell_stride, rows, parts, own_cells, present, COUNT, ROW_TILES)
        waiting = any_missing(seen, tag, present, COUNT, ROW_TILES)
    all_bits = ()
    for i in tl.static_range(COUNT):
        all_bits = all_bits + (seen[i].to(tl.int32),)
    return all_bits


@triton.jit
def finish_tiles(
    call,
    sum_cells,
    amax_cells,
    cell_stride,
    first,
    stride,
    tiles,
    sums,
    residual_tiles,
    weight_tiles,
    new_residual,
    normed,
    quantized,
    scale,
    eps,
    COUNT: tl.constexpr,
    HIDDEN: tl.constexpr,
    QUANTIZE: tl.constexpr,
    KEEPS_NORMED: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_TILES: tl.constexpr,
):
    """From words of the sums of tiles ``first + i stride``, i < COUNT, to all that is written of them.

    ``residual_tiles`` and ``weight_tiles`` are words of the residual and of the weight. All is NaN when the call was
    stopped.
    """
    ROW: tl.constexpr = HIDDEN * DTYPE.primitive_bitwidth // 8
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    FP8_UNIT: tl.constexpr = 16 if HIDDEN % 16 == 0 else 4
    offs = tl.arange(0, BLOCK)
    few = tl.arange(0, BLOCK // ITEM)
    rows, parts, present, afters, squares = (), (), (), (), ()
    for i in tl.static_range(COUNT):
        row, part, at, nbytes = tile_bounds(first + i * stride, tiles, ROW, BLOCK, ROW_TILES)
        low, high = unpack(nan_unless(call.live, sums[i], DTYPE), DTYPE)
        more_low, more_high = unpack(residual_tiles[i], DTYPE)
        after = tl.where(offs < nbytes // 4, pack(low + more_low, high + more_high, DTYPE), 0)
        rows, parts, present = rows + (row,), parts + (part,), present + (nbytes,)
        afters = afters + (after,)
        squares = squares + (tree_sum_of_squares(after, BLOCK, DTYPE),)
    if ROW_TILES > 1:
        bits = ()
        for i in tl.static_range(COUNT):
            bits = bits + (squares[i].to(tl.int32, bitcast=True),)
        own_cells = store_parts(call, sum_cells, cell_stride, rows, parts, bits, present, COUNT, ROW_TILES)
    for i in tl.static_range(COUNT):  # what nobody waits for goes after what the row's programs wait for
        _, _, at, nbytes = tile_bounds(first + i * stride, tiles, ROW, BLOCK, ROW_TILES)
        store_words(new_residual, at, offs, afters[i], nbytes, 16)
    if ROW_TILES > 1:
        all_bits = await_parts(call, sum_cells, cell_stride, rows, parts, own_cells, present, COUNT, ROW_TILES)
        squares = ()
        for i in tl.static_range(COUNT):
            squares = squares + (tree_sum(all_bits[i].to(tl.float32, bitcast=True), triton.next_power_of_2(ROW_TILES)),)
    norms, largest = (), ()
    for i in tl.static_range(COUNT):
        factor = tl.rsqrt(squares[i] / HIDDEN + eps)
        low, high = unpack(afters[i], DTYPE)
        gain_low, gain_high = unpack(weight_tiles[i], DTYPE)
        norm = pack(low * factor * gain_low, high * factor * gain_high, DTYPE)
        norms = norms + (norm,)
        if QUANTIZE == DYNAMIC:
            low, high = unpack(norm, DTYPE)
            inside = offs < present[i] // 4
            largest = largest + (tl.max(tl.where(inside, tl.maximum(magnitude(low), magnitude(high)), 0), axis=0),)
    if QUANTIZE == DYNAMIC and ROW_TILES > 1:
        own_cells = store_parts(call, amax_cells, cell_stride, rows, parts, largest, present, COUNT, ROW_TILES)
    if KEEPS_NORMED:
        for i in tl.static_range(COUNT):
            _, _, at, nbytes = tile_bounds(first + i * stride, tiles, ROW, BLOCK, ROW_TILES)
            store_words(normed, at, offs, norms[i], nbytes, 16)
    if QUANTIZE == DYNAMIC and ROW_TILES > 1:
        all_bits = await_parts(call, amax_cells, cell_stride, rows, parts, own_cells, present, COUNT, ROW_TILES)
        largest = ()
        for i in tl.static_range(COUNT):
            largest = largest + (tl.max(all_bits[i], axis=0),)
    if QUANTIZE != NONE:
        scales = scale.to(tl.int64).to(tl.pointer_type(tl.float32))
        for i in tl.static_range(COUNT):
            row, part, at, nbytes = tile_bounds(first + i * stride, tiles, ROW, BLOCK, ROW_TILES)
            if QUANTIZE == DYNAMIC:
                factor = tl.where(call.live != 0, scale_of(largest[i]), float("nan"))
                tl.store(scales + row, factor, mask=(part == 0) & (nbytes != 0))
            else:
                factor = tl.load(scales)
            packed = quantized_words(norms[i], factor, BLOCK, DTYPE)
            store_words(quantized, at // ITEM, few, packed, nbytes // ITEM, FP8_UNIT)


@triton.jit
def load_tiles(
    address,
    first,
    stride,
    tiles,
    COUNT: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_TILES: tl.constexpr,
    SAME_ROW: tl.constexpr,
):
    """Load the words of tiles ``first + i * stride``, i < COUNT, of rows at ``address``.

    With SAME_ROW, there is one row at ``address``, which stands for every row.
    """
    words = ()
    for i in tl.static_range(COUNT):
        _, part, at, nbytes = tile_bounds(first + i * stride, tiles, ROW, BLOCK, ROW_TILES)
        if SAME_ROW:
            at = part * (BLOCK * 4)
        words = words + (load_words(address, at, tl.arange(0, BLOCK), nbytes, 16),)
    return words
