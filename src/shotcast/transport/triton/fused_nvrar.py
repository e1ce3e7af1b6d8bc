"""All-reduce over nodes with residual add, norm and FP8 in the same kernel.

    scatter   in the node: local rank l gets slice l of the tiles of all ranks, and adds up in rank order, in float32
    exchange  between the ranks of one local rank (``exchanges.py``)
    gather    in the node: local rank l sends its tiles of the result to all others
    every rank norms every row

Slices consist of whole tiles, ROW_TILES to a row. A program has the tile of its number in every slice, and norms these
together with the other programs of their rows (``fused_tiles.py``).
"""

from __future__ import annotations

import triton.language as tl

from shotcast.device.triton.intrinsics import await_prior_kernel, kernel, release_next_kernel
from shotcast.device.triton.words import insert_own, load_words
from shotcast.kernels.triton.norm import LAYER_WITH_BIAS
from shotcast.transport.triton.binding import KernelContext, KernelLaunch
from shotcast.transport.triton.exchanges import DOUBLING, HALVING, PAIRS, exchange_quads, place_of, targets_of
from shotcast.transport.triton.fused_tiles import (
    finish_tiles,
    load_tiles,
    load_weight_tiles,
    tile_arguments,
    tile_bounds,
)
from shotcast.transport.triton.network import enter_network
from shotcast.transport.triton.nvrar import begin_exchange, finish_exchange, partial_sum, tree_arguments
from shotcast.transport.triton.sync import (
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
def nvrar_norm(
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
    puts,
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
    staging_at,
    staging_quads,
    PUTS: tl.constexpr,
    EXCHANGE: tl.constexpr,
    NODES: tl.constexpr,
    FOLDED: tl.constexpr,
    DOUBLINGS: tl.constexpr,
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
    LOCAL: tl.constexpr = WORLD // NODES
    PARTS: tl.constexpr = 1 if DTYPE == tl.float32 else 2
    ROW: tl.constexpr = HIDDEN * DTYPE.primitive_bitwidth // 8
    TILE: tl.constexpr = BLOCK // 4  # quads
    worker = tl.program_id(0) - 1
    place = place_of(rank, FOLDED, LOCAL)
    local = place.local
    first_rank = rank - local
    tiles = nbytes // ROW * ROW_TILES
    slice_tiles = (tiles + LOCAL - 1) // LOCAL  # the last slices may be shorter, or empty
    offs = tl.arange(0, BLOCK)
    mates = ()
    if LOCAL > 1:
        mates = peer_addresses(peers + first_rank * 8, local, worker, LOCAL)
    targets = targets_of(peers, puts, place, PUTS, EXCHANGE, NODES, FOLDED, DOUBLINGS, LOCAL)
    await_prior_kernel(PDL)
    own_tile = local * slice_tiles + worker
    _, _, own_start, own_nbytes = tile_bounds(own_tile, tiles, ROW, BLOCK, ROW_TILES)
    words = ()
    if LOCAL == 1:
        words = (load_words(x, own_start, offs, own_nbytes, 16),)
    else:
        for i in tl.static_range(LOCAL - 1):
            _, _, tile_start, tile_nbytes = tile_bounds(
                rotated_peer(local, worker, i, LOCAL) * slice_tiles + worker, tiles, ROW, BLOCK, ROW_TILES
            )
            words = words + (load_words(x, tile_start, offs, tile_nbytes, 16),)
    call = enter(own, peers, rank, header_size, header_call, WARPS, False)  # the prior kernel has been waited for
    inner_quads = slice_tiles * (2 * LOCAL * TILE if LOCAL > 1 else 0)
    extent = inner_quads + exchange_quads(slice_tiles * TILE, EXCHANGE, NODES, FOLDED, DOUBLINGS, PARTS)
    if CLEAR_AFTER_READ:
        extent = extent * 0
    if tl.program_id(0) == 0:
        exchange_headers(call, extent, True, WORLD, WARPS, PDL, puts, PUTS)
    else:
        first_shot = slots_offset(call.generation, slots_at, slots_quads)
        second_shot = first_shot + slice_tiles * (LOCAL * TILE)
        network = enter_network(call, first_shot + inner_quads, staging_at, staging_quads, PUTS, CLEAR_AFTER_READ)
        stride = slice_tiles * TILE
        # whole tiles are sent, with zeros beyond the end of a row, so that the wait is the same for all tiles
        span = tl.where(own_tile < tiles, BLOCK, 0)
        if LOCAL == 1:
            value = partial_sum(words, DTYPE, 1)
            begin_exchange(
                call,
                network,
                targets,
                place,
                worker,
                worker * BLOCK,
                slice_tiles * BLOCK,
                offs,
                value,
                span,
                EXCHANGE,
                NODES,
                FOLDED,
                DOUBLINGS,
                DTYPE,
                PARTS,
            )
        else:
            for i in tl.static_range(LOCAL - 1):
                sent = (offs >= 0) & (rotated_peer(local, worker, i, LOCAL) * slice_tiles + worker < tiles)
                slots = first_shot + (local * slice_tiles + worker) * TILE
                store_to(call, mates[i], slots, offs, escape_sentinel(words[i]), sent, False)
        residual_tiles = load_tiles(residual, worker, slice_tiles, tiles, LOCAL, ROW, BLOCK, ROW_TILES)
        weight_tiles = load_weight_tiles(
            weight, worker, slice_tiles, tiles, LOCAL, HIDDEN, DTYPE, WEIGHT, BLOCK, ROW_TILES
        )
        bias_tiles = weight_tiles
        if KIND == LAYER_WITH_BIAS:
            bias_tiles = load_weight_tiles(
                bias, worker, slice_tiles, tiles, LOCAL, HIDDEN, DTYPE, WEIGHT, BLOCK, ROW_TILES
            )
        if LOCAL > 1:
            own_words = load_words(x, own_start, offs, own_nbytes, 16)
        dirty = leave_epoch(call, extent, True)
        release_next_kernel(PDL)
        clear_previous(call, dirty, slots_at, slots_quads, worker, tl.num_programs(0) - 1, BLOCK)
        if LOCAL > 1:
            slots = first_shot + worker * TILE
            masks = ()
            for r in tl.static_range(LOCAL):
                masks = masks + ((offs < span) & (local != r),)
            parts, call = await_words(call, slots, stride, offs, masks, first_rank, False, LOCAL, WORLD)
            value = partial_sum(insert_own(parts, own_words, local, LOCAL), DTYPE, LOCAL)
            if CLEAR_AFTER_READ:
                clear_parts(call, slots, stride, offs, masks, LOCAL)
            begin_exchange(
                call,
                network,
                targets,
                place,
                worker,
                worker * BLOCK,
                slice_tiles * BLOCK,
                offs,
                value,
                span,
                EXCHANGE,
                NODES,
                FOLDED,
                DOUBLINGS,
                DTYPE,
                PARTS,
            )
        own_sum, call = finish_exchange(
            call,
            network,
            targets,
            place,
            worker,
            worker * BLOCK,
            slice_tiles * BLOCK,
            offs,
            value,
            span,
            EXCHANGE,
            NODES,
            FOLDED,
            DOUBLINGS,
            LOCAL,
            DTYPE,
            PARTS,
            WORLD,
        )
        sums = (own_sum,)
        if LOCAL > 1:
            store_to_all(
                call, mates, second_shot + own_tile * TILE, offs, own_sum, offs < span, False, False, LOCAL - 1
            )
            slots = second_shot + worker * TILE
            masks = ()
            for r in tl.static_range(LOCAL):
                masks = masks + ((offs >= 0) & (r * slice_tiles + worker < tiles) & (local != r),)
            parts, call = await_words(call, slots, stride, offs, masks, first_rank, False, LOCAL, WORLD, True)
            if CLEAR_AFTER_READ:
                clear_parts(call, slots, stride, offs, masks, LOCAL)
            sums = insert_own(parts, own_sum, local, LOCAL)
        finish_tiles(
            call,
            sum_cells,
            mean_cells,
            amax_cells,
            cell_stride,
            worker,
            slice_tiles,
            tiles,
            sums,
            residual_tiles,
            weight_tiles,
            bias_tiles,
            new_residual,
            normed,
            quantized,
            scale,
            eps,
            LOCAL,
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
    """Return the launch of an all-reduce and norm whose exchange between nodes is by doubling."""
    arguments = tile_arguments(plan, context) | tree_arguments(context)
    return context.launch(nvrar_norm, plan, tensors="x and norm", **arguments, EXCHANGE=DOUBLING.value, cell_stride=1)


def bind_pairs(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of an all-reduce and norm whose exchange between nodes is between all pairs at once."""
    arguments = tile_arguments(plan, context) | tree_arguments(context)
    return context.launch(nvrar_norm, plan, tensors="x and norm", **arguments, EXCHANGE=PAIRS.value, cell_stride=1)


def bind_halving(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of an all-reduce and norm whose exchange between nodes is by halving and doubling."""
    arguments = tile_arguments(plan, context) | tree_arguments(context)
    return context.launch(nvrar_norm, plan, tensors="x and norm", **arguments, EXCHANGE=HALVING.value, cell_stride=1)
