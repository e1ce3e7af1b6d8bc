"""One-shot all-reduce with residual add, norm and FP8 in the same kernel.

    row_i = sum over r of x_r[i];  every rank norms every row

It wins for small messages, as one-shot does. A program has one tile of one row, or with a launch that says so a few
tiles of different rows. It sends a tile to all ranks, sums it with those of the peers, and norms it together with the
other programs of the row (``fused_tiles.py``). The tiles, and so the bits, are the same in every launch. Each program
reads the epoch, the generation, the extent and the abort word and counts itself, all in two lines of memory that one
slice of a cache serves, so many programs wait for each other there.
"""

from __future__ import annotations

import triton.language as tl

from shotcast import wire
from shotcast.device.triton.intrinsics import await_prior_kernel, kernel, release_next_kernel
from shotcast.device.triton.words import insert_own, load_words, sum_words
from shotcast.kernels.triton.norm import LAYER_WITH_BIAS
from shotcast.transport.triton import layout
from shotcast.transport.triton.binding import KernelContext, KernelLaunch
from shotcast.transport.triton.fused_tiles import (
    finish_tiles,
    load_tiles,
    load_weight_tiles,
    tile_arguments,
    tile_bounds,
)
from shotcast.transport.triton.sync import (
    arrival_masks,
    await_words,
    clear_previous,
    enter,
    escape_sentinel,
    exchange_headers,
    leave_epoch,
    peer_addresses,
    slots_offset,
    store_to_all,
)
from shotcast.wire import CallPlan


@kernel
def one_shot_norm(
    x,
    residual,
    weight,
    bias,
    new_residual,
    normed,
    quantized,
    scale,
    eps,
    own,
    peers,
    rank,
    header_size,
    header_call,
    nbytes,
    sum_cells,
    mean_cells,
    amax_cells,
    cell_stride,
    slots_at,
    slots_quads,
    HIDDEN: tl.constexpr,
    QUANTIZE: tl.constexpr,
    KEEPS_NORMED: tl.constexpr,
    WEIGHT: tl.constexpr,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_TILES: tl.constexpr,
    EACH: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum x over all ranks, add the residual, and norm the rows.

    There is one program for EACH tiles of BLOCK words, ROW_TILES tiles to a row. The next kernel, which usually loads
    weights first, is allowed to launch at once. And the words to sum are loaded while the epoch is read. Each of these
    saves half a microsecond between matrix products.
    """
    release_next_kernel(PDL)
    ROW: tl.constexpr = HIDDEN * DTYPE.primitive_bitwidth // 8
    TILE: tl.constexpr = BLOCK // 4  # quads
    tiles = nbytes // ROW * ROW_TILES
    extent = tiles * (TILE * WORLD)
    worker = tl.program_id(0) - 1
    workers = tl.num_programs(0) - 1  # a program has every so many-th tile
    offs = tl.arange(0, BLOCK)
    addresses = peer_addresses(peers, rank, worker, WORLD)
    await_prior_kernel(PDL)
    words = ()
    for i in tl.static_range(EACH):
        _, _, tile_start, tile_nbytes = tile_bounds(worker + i * workers, tiles, ROW, BLOCK, ROW_TILES)
        words = words + (load_words(x, tile_start, offs, tile_nbytes, 16),)
    residual_tiles = load_tiles(residual, worker, workers, tiles, EACH, ROW, BLOCK, ROW_TILES)
    weight_tiles = load_weight_tiles(weight, worker, workers, tiles, EACH, HIDDEN, DTYPE, WEIGHT, BLOCK, ROW_TILES)
    bias_tiles = weight_tiles
    if KIND == LAYER_WITH_BIAS:
        bias_tiles = load_weight_tiles(bias, worker, workers, tiles, EACH, HIDDEN, DTYPE, WEIGHT, BLOCK, ROW_TILES)
    call = enter(own, peers, rank, header_size, header_call, WARPS, False)  # the prior kernel has been waited for
    if tl.program_id(0) == 0:
        exchange_headers(call, extent, True, WORLD, WARPS, False)
    else:
        slots = slots_offset(call.generation, slots_at, slots_quads)
        for i in tl.static_range(EACH):
            tile = worker + i * workers
            _, _, _, tile_nbytes = tile_bounds(tile, tiles, ROW, BLOCK, ROW_TILES)
            slot = slots + (rank * tiles + tile) * TILE
            sent = offs < tile_nbytes // 16 * 4
            store_to_all(call, addresses, slot, offs, escape_sentinel(words[i]), sent, False, False, WORLD - 1)
        dirty = leave_epoch(call, extent, True)
        clear_previous(call, dirty, slots_at, slots_quads, worker, workers, BLOCK)
        totals = ()
        for i in tl.static_range(EACH):
            tile = worker + i * workers
            _, _, _, tile_nbytes = tile_bounds(tile, tiles, ROW, BLOCK, ROW_TILES)
            span = tile_nbytes // 16 * 4
            masks = arrival_masks(call, offs, span, 0, span, WORLD, True)
            parts, call = await_words(call, slots + tile * TILE, tiles * TILE, offs, masks, 0, False, WORLD, WORLD)
            totals = totals + (sum_words(insert_own(parts, words[i], rank, WORLD), WORLD, DTYPE),)
        finish_tiles(
            call,
            sum_cells,
            mean_cells,
            amax_cells,
            cell_stride,
            worker,
            workers,
            tiles,
            totals,
            residual_tiles,
            weight_tiles,
            bias_tiles,
            new_residual,
            normed,
            quantized,
            scale,
            eps,
            EACH,
            HIDDEN,
            QUANTIZE,
            KEEPS_NORMED,
            WEIGHT,
            KIND,
            DTYPE,
            BLOCK,
            ROW_TILES,
        )


def bind(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of an all-reduce whose rows are normed."""
    arguments = tile_arguments(plan, context)
    assert plan.norm is not None
    row_words = plan.norm.hidden * wire.DTYPES[plan.dtype] // 4
    rows, row_tiles = plan.nbytes // (4 * row_words), arguments["ROW_TILES"]
    each = max(1, plan.launch.chunk_bytes // (4 * plan.launch.block_words))
    return context.launch(
        one_shot_norm,
        plan,
        programs=1 + max(1, -(-rows * row_tiles // each)),
        tensors="x and norm",
        **arguments,
        cell_stride=layout.row_cell_stride(rows, row_tiles),
        EACH=each,
    )
