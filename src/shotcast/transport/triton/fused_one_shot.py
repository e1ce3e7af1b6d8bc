"""One-shot all-reduce with residual add, RMSNorm and FP8 in the same kernel.

    row_i = sum over r of x_r[i];  every rank norms every row

It wins for small messages, as one-shot does. A program has one tile of one row. It sends the tile to all ranks, sums it
with those of the peers, and norms it together with the other programs of the row (``fused_tiles.py``).
"""

from __future__ import annotations

import triton.language as tl

from shotcast import wire
from shotcast.device.triton.intrinsics import await_prior_kernel, kernel, release_next_kernel
from shotcast.device.triton.words import insert_own, load_words, sum_words
from shotcast.transport.triton import layout
from shotcast.transport.triton.binding import KernelContext, KernelLaunch
from shotcast.transport.triton.fused_tiles import finish_tiles, load_tiles, tile_arguments, tile_bounds
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
def one_shot_rms_norm(
    x,
    residual,
    weight,
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
    amax_cells,
    cell_stride,
    slots_at,
    slots_quads,
    HIDDEN: tl.constexpr,
    QUANTIZE: tl.constexpr,
    KEEPS_NORMED: tl.constexpr,
    DTYPE: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum x over all ranks, add the residual, and norm the rows.

    There is one program for each tile of BLOCK words, ROW_TILES tiles to a row. The next kernel, which usually loads
    weights first, is allowed to launch at once. And the words to sum are loaded while the epoch is read. Each of these
    saves half a microsecond between matrix products.
    """
    release_next_kernel(PDL)
    ROW: tl.constexpr = HIDDEN * DTYPE.primitive_bitwidth // 8
    TILE: tl.constexpr = BLOCK // 4  # quads
    tiles = nbytes // ROW * ROW_TILES
    extent = tiles * (TILE * WORLD)
    tile = tl.program_id(0) - 1
    offs = tl.arange(0, BLOCK)
    _, _, tile_start, tile_nbytes = tile_bounds(tile, tiles, ROW, BLOCK, ROW_TILES)
    addresses = peer_addresses(peers, rank, tile, WORLD)
    await_prior_kernel(PDL)
    words = load_words(x, tile_start, offs, tile_nbytes, 16)
    residual_tiles = load_tiles(residual, tile, 0, tiles, 1, ROW, BLOCK, ROW_TILES, False)
    weight_tiles = load_tiles(weight, tile, 0, tiles, 1, ROW, BLOCK, ROW_TILES, True)
    call = enter(own, peers, rank, header_size, header_call, WARPS, False)  # the prior kernel has been waited for
    if tl.program_id(0) == 0:
        exchange_headers(call, extent, True, WORLD, WARPS, False)
    else:
        slots = slots_offset(call.generation, slots_at, slots_quads)
        span = tile_nbytes // 16 * 4
        slot = slots + (rank * tiles + tile) * TILE
        store_to_all(call, addresses, slot, offs, escape_sentinel(words), offs < span, False, False, WORLD - 1)
        dirty = leave_epoch(call, extent, True)
        clear_previous(call, dirty, slots_at, slots_quads, tile, tl.num_programs(0) - 1, BLOCK)
        masks = arrival_masks(call, offs, span, 0, span, WORLD, True)
        parts, call = await_words(call, slots + tile * TILE, tiles * TILE, offs, masks, 0, False, WORLD, WORLD)
        total = sum_words(insert_own(parts, words, rank, WORLD), WORLD, DTYPE)
        finish_tiles(
            call,
            sum_cells,
            amax_cells,
            cell_stride,
            tile,
            0,
            tiles,
            (total,),
            residual_tiles,
            weight_tiles,
            new_residual,
            normed,
            quantized,
            scale,
            eps,
            1,
            HIDDEN,
            QUANTIZE,
            KEEPS_NORMED,
            DTYPE,
            BLOCK,
            ROW_TILES,
        )


def bind(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of an all_reduce_rms_norm."""
    arguments = tile_arguments(plan, context)
    assert plan.norm is not None
    row_words = plan.norm.hidden * wire.DTYPES[plan.dtype] // 4
    stride = layout.row_cell_stride(plan.nbytes // (4 * row_words), arguments["ROW_TILES"])
    return context.launch(one_shot_rms_norm, plan, tensors="x and norm", **arguments, cell_stride=stride)
