"""Two-shot all-reduce with residual add, norm and FP8 in the same kernel.

    shot 1: rank i sends slice j of its tiles to rank j, which sums:  s_j = x_0[j] + x_1[j] + ... in float32, in order
    shot 2: rank j sends s_j to all
    every rank norms every row of s_0, s_1, ..., s_{N-1}

It wins from the size at which two-shot beats one-shot. Slices consist of whole tiles, ROW_TILES to a row. A program has
the tile of its number in every slice, and norms these together with the other programs of their rows
(``fused_tiles.py``).
"""

from __future__ import annotations

import triton.language as tl

from shotcast.device.triton.intrinsics import await_prior_kernel, kernel, release_next_kernel
from shotcast.device.triton.words import insert_own, load_words, sum_words
from shotcast.kernels.triton.norm import LAYER_WITH_BIAS
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
    clear_parts,
    clear_previous,
    enter,
    escape_sentinel,
    exchange_headers,
    leave_epoch,
    peer_addresses,
    rotated_peer,
    slots_offset,
    store_to,
    store_to_all,
)
from shotcast.wire import CallPlan


@kernel
def two_shot_norm(
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
    MULTICAST: tl.constexpr,
    CLEAR_AFTER_READ: tl.constexpr,
    HIDDEN: tl.constexpr,
    QUANTIZE: tl.constexpr,
    KEEPS_NORMED: tl.constexpr,
    WEIGHT: tl.constexpr,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum x over all ranks, add the residual, and norm the rows. There are as many programs as a slice has tiles."""
    ROW: tl.constexpr = HIDDEN * DTYPE.primitive_bitwidth // 8
    TILE: tl.constexpr = BLOCK // 4  # quads
    worker = tl.program_id(0) - 1
    tiles = nbytes // ROW * ROW_TILES
    slice_tiles = (tiles + WORLD - 1) // WORLD  # the last slices may be shorter, or empty
    offs = tl.arange(0, BLOCK)
    addresses = peer_addresses(peers, rank, worker, WORLD)
    await_prior_kernel(PDL)
    words = ()
    for i in tl.static_range(WORLD - 1):
        _, _, tile_start, tile_nbytes = tile_bounds(
            rotated_peer(rank, worker, i, WORLD) * slice_tiles + worker, tiles, ROW, BLOCK, ROW_TILES
        )
        words = words + (load_words(x, tile_start, offs, tile_nbytes, 16),)
    call = enter(own, peers, rank, header_size, header_call, WARPS, False)  # the prior kernel has been waited for
    extent = 0 if CLEAR_AFTER_READ else slice_tiles * (2 * WORLD * TILE)
    if tl.program_id(0) == 0:
        exchange_headers(call, extent, True, WORLD, WARPS, PDL)
    else:
        first_shot = slots_offset(call.generation, slots_at, slots_quads)
        second_shot = first_shot + slice_tiles * (WORLD * TILE)
        stride = slice_tiles * TILE
        for i in tl.static_range(WORLD - 1):
            # send whole tiles, with zeros beyond the end of a row, so that the wait is the same for all tiles
            sent = (offs >= 0) & (rotated_peer(rank, worker, i, WORLD) * slice_tiles + worker < tiles)
            slots = first_shot + (rank * slice_tiles + worker) * TILE
            store_to(call, addresses[i], slots, offs, escape_sentinel(words[i]), sent, False)
        own_tile = rank * slice_tiles + worker
        _, _, tile_start, tile_nbytes = tile_bounds(own_tile, tiles, ROW, BLOCK, ROW_TILES)
        own_words = load_words(x, tile_start, offs, tile_nbytes, 16)
        residual_tiles = load_tiles(residual, worker, slice_tiles, tiles, WORLD, ROW, BLOCK, ROW_TILES)
        weight_tiles = load_weight_tiles(
            weight, worker, slice_tiles, tiles, WORLD, HIDDEN, DTYPE, WEIGHT, BLOCK, ROW_TILES
        )
        bias_tiles = weight_tiles
        if KIND == LAYER_WITH_BIAS:
            bias_tiles = load_weight_tiles(
                bias, worker, slice_tiles, tiles, WORLD, HIDDEN, DTYPE, WEIGHT, BLOCK, ROW_TILES
            )
        dirty = leave_epoch(call, extent, True)
        release_next_kernel(PDL)
        clear_previous(call, dirty, slots_at, slots_quads, worker, tl.num_programs(0) - 1, BLOCK)
        span = tl.where(own_tile < tiles, BLOCK, 0)
        slots = first_shot + worker * TILE
        masks = arrival_masks(call, offs, span, 0, span, WORLD, True)
        parts, call = await_words(call, slots, stride, offs, masks, 0, False, WORLD, WORLD)
        own_sum = escape_sentinel(sum_words(insert_own(parts, own_words, rank, WORLD), WORLD, DTYPE))
        sums = second_shot + own_tile * TILE
        store_to_all(call, addresses, sums, offs, own_sum, offs < span, False, MULTICAST, WORLD - 1)
        if CLEAR_AFTER_READ:
            clear_parts(call, slots, stride, offs, masks, WORLD)
        slots = second_shot + worker * TILE
        masks = arrival_masks(call, offs, BLOCK, slice_tiles * BLOCK, (tiles - worker) * BLOCK, WORLD, not MULTICAST)
        parts, call = await_words(call, slots, stride, offs, masks, 0, False, WORLD, WORLD, True)
        if CLEAR_AFTER_READ:
            clear_parts(call, slots, stride, offs, masks, WORLD)
        finish_tiles(
            call,
            sum_cells,
            mean_cells,
            amax_cells,
            cell_stride,
            worker,
            slice_tiles,
            tiles,
            insert_own(parts, own_sum, rank, WORLD),
            residual_tiles,
            weight_tiles,
            bias_tiles,
            new_residual,
            normed,
            quantized,
            scale,
            eps,
            WORLD,
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
    # cells of rows need not stand apart here: with four rows a program nothing is gained by it
    return context.launch(two_shot_norm, plan, tensors="x and norm", **tile_arguments(plan, context), cell_stride=1)
