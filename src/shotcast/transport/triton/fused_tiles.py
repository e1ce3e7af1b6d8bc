"""The norm of a row by programs that each hold one tile of it: the last part of the fused all-reduces.

The programs of a row tell each other their part of the sum of squares through cells in this GPU's memory. For a
LayerNorm, they tell their mean and the sum of squared differences from it; for FP8 with a scale for each row, also
their largest value. A cell holds 32 bits of value and 32 bits of the call's number, so it is its own flag and is never
cleared. A program polls all cells of a row at once, except its own: a load seems to wait for the program's own store to
the same 128 bytes. In calls of few rows, cells are far enough apart (``cell_stride``, in cells) that no two programs'
cells are in the same 128 bytes.

Every program writes its cell, even if the call was stopped, so no program waits here longer than the programs of its
row wait for their peers. Programs start in the order of their numbers, and the programs of one row fit on any GPU
together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from shotcast import wire
from shotcast.device.triton.words import load_words, nan_unless, pack, store_words, unpack
from shotcast.kernels.triton.norm import (
    DYNAMIC,
    LAYER_WITH_BIAS,
    NONE,
    RMS,
    NormShape,
    load_weights,
    magnitude,
    merge_moments,
    moments_of,
    norm_arguments,
    quantized_words,
    scale_and_shift,
    scale_of,
    tree_sum,
    tree_sum_of_squares,
)
from shotcast.transport.triton.binding import KernelContext
from shotcast.wire import CallPlan


@dataclass(frozen=True, slots=True)
class RowTileShape(NormShape):
    """The argument SHAPE of a kernel that norms rows of ROW_TILES tiles of BLOCK words."""

    WORLD: int
    BLOCK: int
    ROW_TILES: int
    WARPS: int


class RowCells(NamedTuple):
    """The addresses of cells, by what the programs of a row tell each other, and the distance between cells."""

    squares: tl.tensor
    means: tl.tensor
    largest: tl.tensor
    stride: tl.tensor


class Operands(NamedTuple):
    """Tiles that programs load: words of the residual, and weights and biases (anything if there is no bias)."""

    residual: tl.tuple
    weight: tl.tuple
    bias: tl.tuple


@triton.jit
def tile_bounds(tile, tiles, SHAPE: tl.constexpr):
    """Return (row, index in the row, first byte, bytes) of a tile; 0 bytes if there is no such tile."""
    ROW: tl.constexpr = SHAPE.HIDDEN * SHAPE.DTYPE.primitive_bitwidth // 8
    row = tile // SHAPE.ROW_TILES
    part = tile % SHAPE.ROW_TILES
    nbytes = tl.minimum(SHAPE.BLOCK * 4, ROW - part * (SHAPE.BLOCK * 4))
    return row, part, row * ROW + part * (SHAPE.BLOCK * 4), tl.where((tile >= 0) & (tile < tiles), nbytes, 0)


@triton.jit
def tag_of(epoch):
    """Return 32 bits that identify a call. They are odd, so memory that was never written matches no call."""
    return (epoch * 2 + 1) & 0xFFFFFFFF


@triton.jit
def load_cells(base, cell_stride, rows, parts, own_cells, present, COUNT: tl.constexpr, ROW_TILES: tl.constexpr):
    """Load all cells of COUNT rows, with ``own_cells[i]`` as part ``parts[i]``; cells that do not exist read as 0."""
    WIDTH: tl.constexpr = triton.next_power_of_2(ROW_TILES)
    lanes = tl.arange(0, WIDTH)
    cells = ()
    for i in tl.static_range(COUNT):
        expected = (lanes < ROW_TILES) & (present[i] != 0) & (lanes != parts[i])
        seen = tl.load(base + (rows[i] * WIDTH + lanes) * cell_stride, mask=expected, other=0, volatile=True)
        cells = cells + (tl.where(lanes == parts[i], own_cells[i], seen),)
    return cells


@triton.jit
def any_missing(cells, tag, present, COUNT: tl.constexpr, ROW_TILES: tl.constexpr):
    """Return 1 while a part of any row has not been stored in this call, else 0."""
    lanes = tl.arange(0, triton.next_power_of_2(ROW_TILES))
    missing = lanes < 0
    for i in tl.static_range(COUNT):
        missing = missing | ((lanes < ROW_TILES) & (present[i] != 0) & ((cells[i] >> 32) & 0xFFFFFFFF != tag))
    return tl.max(missing.to(tl.int32), axis=0)


@triton.jit
def store_parts(call, cells, cell_stride, rows, parts, bits, present, COUNT: tl.constexpr, ROW_TILES: tl.constexpr):
    """Store ``bits[i]`` (int32) as part ``parts[i]`` of row ``rows[i]``, unless ``present[i]`` is 0.

    Returns the stored cells.
    """
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
    """Wait until all parts of each row are stored, and return their bits.

    ``own_cells`` is what :func:`store_parts` returned. The bits are tensors of ROW_TILES rounded up to a power of two,
    0 beyond ROW_TILES. If ``present[i]`` is 0, there is no tile. Only programs of one warp may call this, because the
    warps of a larger program could see different results of the reduction.
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
def finish_tiles(call, cells, first, stride, tiles, sums, operands, norm, COUNT: tl.constexpr, SHAPE: tl.constexpr):
    """Write all outputs of tiles ``first + i * stride``, i < COUNT, given the words of their sums.

    ``operands`` come from :func:`load_operands`. All outputs are NaN if the call was stopped.
    """
    ROW_TILES: tl.constexpr = SHAPE.ROW_TILES
    DTYPE: tl.constexpr = SHAPE.DTYPE
    BLOCK: tl.constexpr = SHAPE.BLOCK
    KIND: tl.constexpr = SHAPE.KIND
    QUANTIZE: tl.constexpr = SHAPE.QUANTIZE
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    FP8_UNIT: tl.constexpr = 16 if SHAPE.HIDDEN % 16 == 0 else 4
    offs = tl.arange(0, BLOCK)
    fp8_offs = tl.arange(0, BLOCK // ITEM)
    rows, parts, present, new_residuals, squares, means = (), (), (), (), (), ()
    for i in tl.static_range(COUNT):
        row, part, start, nbytes = tile_bounds(first + i * stride, tiles, SHAPE)
        low, high = unpack(nan_unless(call.live, sums[i], DTYPE), DTYPE)
        residual_low, residual_high = unpack(operands.residual[i], DTYPE)
        new_residual_words = tl.where(offs < nbytes // 4, pack(low + residual_low, high + residual_high, DTYPE), 0)
        rows, parts, present = rows + (row,), parts + (part,), present + (nbytes,)
        new_residuals = new_residuals + (new_residual_words,)
        if KIND == RMS:
            squares = squares + (tree_sum_of_squares(new_residual_words, BLOCK, DTYPE),)
        else:
            low, high = unpack(new_residual_words, DTYPE)
            mean, square = moments_of(low, high, nbytes // ITEM, BLOCK, DTYPE)
            means, squares = means + (mean,), squares + (square,)
    if ROW_TILES > 1:
        bits = ()
        for i in tl.static_range(COUNT):
            bits = bits + (squares[i].to(tl.int32, bitcast=True),)
        own_cells = store_parts(call, cells.squares, cells.stride, rows, parts, bits, present, COUNT, ROW_TILES)
        if KIND != RMS:
            bits = ()
            for i in tl.static_range(COUNT):
                bits = bits + (means[i].to(tl.int32, bitcast=True),)
            own_means = store_parts(call, cells.means, cells.stride, rows, parts, bits, present, COUNT, ROW_TILES)
    for i in tl.static_range(COUNT):  # after the stores that the row's programs wait for
        _, _, start, nbytes = tile_bounds(first + i * stride, tiles, SHAPE)
        store_words(norm.new_residual, start, offs, new_residuals[i], nbytes, 16)
    if ROW_TILES > 1:
        all_bits = await_parts(call, cells.squares, cells.stride, rows, parts, own_cells, present, COUNT, ROW_TILES)
        squares = ()
        if KIND == RMS:
            for i in tl.static_range(COUNT):
                squares = squares + (
                    tree_sum(all_bits[i].to(tl.float32, bitcast=True), triton.next_power_of_2(ROW_TILES)),
                )
        else:
            mean_bits = await_parts(call, cells.means, cells.stride, rows, parts, own_means, present, COUNT, ROW_TILES)
            means = ()
            for i in tl.static_range(COUNT):
                mean, square = merge_moments(
                    mean_bits[i].to(tl.float32, bitcast=True),
                    all_bits[i].to(tl.float32, bitcast=True),
                    SHAPE.HIDDEN,
                    triton.next_power_of_2(ROW_TILES),
                    BLOCK * 4 // ITEM,
                )
                means, squares = means + (mean,), squares + (square,)
    norms, largest = (), ()
    for i in tl.static_range(COUNT):
        factor = tl.rsqrt(squares[i] / SHAPE.HIDDEN + norm.eps)
        low, high = unpack(new_residuals[i], DTYPE)
        if KIND != RMS:
            low = low - means[i]
            high = high - means[i]
        normed = scale_and_shift(low, high, factor, operands.weight[i], operands.bias[i], SHAPE)
        norms = norms + (normed,)
        if QUANTIZE == DYNAMIC:
            low, high = unpack(normed, DTYPE)
            inside = offs < present[i] // 4
            largest = largest + (tl.max(tl.where(inside, tl.maximum(magnitude(low), magnitude(high)), 0), axis=0),)
    if QUANTIZE == DYNAMIC and ROW_TILES > 1:
        own_cells = store_parts(call, cells.largest, cells.stride, rows, parts, largest, present, COUNT, ROW_TILES)
    if SHAPE.KEEPS_NORMED:
        for i in tl.static_range(COUNT):
            _, _, start, nbytes = tile_bounds(first + i * stride, tiles, SHAPE)
            store_words(norm.normed, start, offs, norms[i], nbytes, 16)
    if QUANTIZE == DYNAMIC and ROW_TILES > 1:
        all_bits = await_parts(call, cells.largest, cells.stride, rows, parts, own_cells, present, COUNT, ROW_TILES)
        largest = ()
        for i in tl.static_range(COUNT):
            largest = largest + (tl.max(all_bits[i], axis=0),)
    if QUANTIZE != NONE:
        scales = norm.scale.to(tl.int64).to(tl.pointer_type(tl.float32))
        for i in tl.static_range(COUNT):
            row, part, start, nbytes = tile_bounds(first + i * stride, tiles, SHAPE)
            if QUANTIZE == DYNAMIC:
                factor = tl.where(call.live != 0, scale_of(largest[i]), float("nan"))
                tl.store(scales + row, factor, mask=(part == 0) & (nbytes != 0))
            else:
                factor = tl.load(scales)
            packed = quantized_words(norms[i], factor, BLOCK, DTYPE)
            store_words(norm.quantized, start // ITEM, fp8_offs, packed, nbytes // ITEM, FP8_UNIT)


@triton.jit
def load_operands(norm, first, stride, tiles, COUNT: tl.constexpr, SHAPE: tl.constexpr):
    """Load the operands of tiles ``first + i * stride``, i < COUNT; one row of weights stands for every row."""
    offs = tl.arange(0, SHAPE.BLOCK)
    residual = ()
    for i in tl.static_range(COUNT):
        _, _, start, nbytes = tile_bounds(first + i * stride, tiles, SHAPE)
        residual = residual + (load_words(norm.residual, start, offs, nbytes, 16),)
    weight = load_weight_tiles(norm.weight, first, stride, tiles, COUNT, SHAPE)
    bias = weight
    if SHAPE.KIND == LAYER_WITH_BIAS:
        bias = load_weight_tiles(norm.bias, first, stride, tiles, COUNT, SHAPE)
    return Operands(residual, weight, bias)


@triton.jit
def load_weight_tiles(address, first, stride, tiles, COUNT: tl.constexpr, SHAPE: tl.constexpr):
    """Load the weights of tiles ``first + i * stride``, i < COUNT, from the row at ``address``."""
    weights = ()
    for i in tl.static_range(COUNT):
        _, part, _, nbytes = tile_bounds(first + i * stride, tiles, SHAPE)
        first_byte = part * (SHAPE.BLOCK * 4)
        weights = weights + (load_weights(address, first_byte, tl.arange(0, SHAPE.BLOCK), nbytes, 16, SHAPE),)
    return weights


def tile_arguments(plan: CallPlan, context: KernelContext, cell_stride: int = 1) -> dict[str, Any]:
    """Return the arguments of tile kernels for the norm of ``plan`` and for the cells of its rows."""
    assert plan.norm is not None
    row_words = plan.norm.hidden * wire.DTYPES[plan.dtype] // 4
    base, part = context.cells_address, context.cells_nbytes // 3
    return norm_arguments(plan.norm, plan.dtype, context.own_address) | {
        "cells": RowCells(base, base + part, base + part * 2, cell_stride),
        "ROW_TILES": -(-row_words // plan.launch.block_words),
    }
