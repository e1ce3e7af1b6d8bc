"""One-shot all-reduce with residual add, RMSNorm and FP8 in the same kernel.

    row_i = sum over r of x_r[i];  every rank norms every row

Wins for small messages, as one-shot does. A program has one tile of one row: it sends it to all, adds up the peers',
and norms it with the other programs of the row (see ``fused_tiles.py``).
"""

from __future__ import annotations

import triton.language as tl

from shotcast.device.triton.intrinsics import await_prior_kernel, kernel, release_next_kernel
from shotcast.device.triton.words import insert_own, load_words, sum_words
from shotcast.transport.triton.fused_tiles import finish_tiles, load_tiles, where_tile
from shotcast.transport.triton.sync import (
    addresses_of_peers,
    await_words,
    clear_previous,
    enter,
    exchange_headers,
    expected,
    leave_epoch,
    slots_of,
    store_to_all,
    without_sentinel,
)


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
    header,
    nbytes,
    cells,
    more_cells,
    apart,
    slots_at,
    slots_quads,
    HIDDEN: tl.constexpr,
    QUANTIZE: tl.constexpr,
    KEEPS_NORMED: tl.constexpr,
    DTYPE: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a tile, PARTS tiles of BLOCK words a row.

    The next kernel, which mostly loads weights first, is let in at once; and what is to be summed is on its way while
    the epoch is read. Either saves half a microsecond between products.
    """
    release_next_kernel(PDL)
    ROW: tl.constexpr = HIDDEN * DTYPE.primitive_bitwidth // 8
    TILE: tl.constexpr = BLOCK // 4  # quads
    tiles = nbytes // ROW * PARTS
    extent = tiles * (TILE * WORLD)
    tile = tl.program_id(0) - 1
    offs = tl.arange(0, BLOCK)
    _, _, at, here = where_tile(tile, tiles, ROW, BLOCK, PARTS)
    addresses = addresses_of_peers(peers, rank, tile, WORLD)
    await_prior_kernel(PDL)
    words = load_words(x, at, offs, here, 16)
    before = load_tiles(residual, tile, 0, tiles, 1, ROW, BLOCK, PARTS, False)
    gains = load_tiles(weight, tile, 0, tiles, 1, ROW, BLOCK, PARTS, True)
    call = enter(own, peers, rank, header, WARPS, False)  # it has been waited for
    if tl.program_id(0) == 0:
        exchange_headers(call, extent, True, WORLD, WARPS, False)
    else:
        slots = slots_of(call.generation, slots_at, slots_quads)
        span = here // 16 * 4
        place = slots + (rank * tiles + tile) * TILE
        store_to_all(call, addresses, place, offs, without_sentinel(words), offs < span, False, False, WORLD - 1)
        dirty = leave_epoch(call, extent, True)
        clear_previous(call, dirty, slots_at, slots_quads, tile, tl.num_programs(0) - 1, BLOCK)
        masks = expected(call, offs, span, 0, span, WORLD, True)
        parts, call = await_words(call, slots + tile * TILE, tiles * TILE, offs, masks, 0, False, WORLD, WORLD)
        total = sum_words(insert_own(parts, words, rank, WORLD), WORLD, DTYPE)
        finish_tiles(
            call,
            cells,
            more_cells,
            apart,
            tile,
            0,
            tiles,
            (total,),
            before,
            gains,
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
            PARTS,
        )
