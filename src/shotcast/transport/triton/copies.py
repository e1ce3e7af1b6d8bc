"""Copies in one step: all_gather (also uneven), all_to_all, broadcast. Bytes move; nothing is computed.

    all_gather:  out = x_0, x_1, ..., x_{N-1}                   each rank sends x to all
    all_to_all:  out_i = part_i(x_0), ..., part_i(x_{N-1})      each rank sends part j to rank j
    broadcast:   out_i = x_root                                 the root sends x to all

Floating-point data goes through sentinel slots, exact but for the payload of NaNs; anything else goes as flag cells, at
twice the bytes, exact.
"""

from __future__ import annotations

import triton.language as tl

from shotcast.device.triton.intrinsics import await_prior_kernel, kernel, release_next_kernel
from shotcast.device.triton.words import load_words, nan_unless, store_words
from shotcast.transport.triton.one_shot import tiles_to_send
from shotcast.transport.triton.sync import (
    await_words,
    cells_offset,
    clear_parts,
    clear_previous,
    enter,
    escape_sentinel,
    exchange_headers,
    leave_epoch,
    peer_addresses,
    slots_offset,
    store_to,
    store_to_all,
)

GATHER = tl.constexpr(0)
EXCHANGE = tl.constexpr(1)
BROADCAST = tl.constexpr(2)


@kernel
def copy(
    x,
    out,
    own,
    peers,
    rank,
    header,
    root,
    part_nbytes,  # bytes of the largest part
    start0,  # part r lies in out at byte start_r, and ends where part r + 1 begins
    start1,
    start2,
    start3,
    start4,
    start5,
    start6,
    start7,
    start8,
    slots_at,
    slots_quads,
    cells_at,
    cells_quads,
    KIND: tl.constexpr,
    CELLS: tl.constexpr,
    MULTICAST: tl.constexpr,
    CLEAR_AFTER_READ: tl.constexpr,
    DTYPE: tl.constexpr,
    UNIT: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    worker = tl.program_id(0) - 1
    workers = tl.num_programs(0) - 1
    addresses = peer_addresses(peers, rank, worker, WORLD)
    starts = (start0, start1, start2, start3, start4, start5, start6, start7, start8)
    mine = part_nbytes  # bytes that this rank sends
    begins = part_nbytes * 0  # where they lie in out
    seat = rank
    senders: tl.constexpr = 1 if KIND == BROADCAST else WORLD
    if KIND == GATHER:
        for r in tl.static_range(WORLD):
            mine = tl.where(rank == r, starts[r + 1] - starts[r], mine)
            begins = tl.where(rank == r, starts[r], begins)
    if KIND == BROADCAST:
        mine = tl.where(rank == root, part_nbytes, 0)
        seat = rank * 0
    await_prior_kernel(PDL)
    offs = tl.maximum(worker, 0) * BLOCK + tl.arange(0, BLOCK)
    tiles = tiles_to_send(x, rank, worker, mine, offs, KIND == EXCHANGE, UNIT, WORLD)
    call = enter(own, peers, rank, header, WARPS, False)  # the prior kernel has been waited for
    quads = (part_nbytes + 15) // 16  # of a slot
    extent = 0 if CLEAR_AFTER_READ else quads * senders
    if tl.program_id(0) == 0:
        exchange_headers(call, extent, not CELLS, WORLD, WARPS, PDL)
    else:
        if CELLS:
            box = cells_offset(call.epoch, cells_at, cells_quads)
            stride = quads * 2
        else:
            box = slots_offset(call.generation, slots_at, slots_quads)
            stride = quads
        reach = (mine + 15) // 16 * 4
        place = box + seat * stride
        for start in range(worker * BLOCK, reach, workers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            if KIND == EXCHANGE:
                for i in tl.static_range(WORLD - 1):
                    words = tiles[i] if CELLS else escape_sentinel(tiles[i])
                    store_to(call, addresses[i], place, offs, words, offs < reach, CELLS)
            else:
                words = tiles[0] if CELLS else escape_sentinel(tiles[0])
                store_to_all(call, addresses, place, offs, words, offs < reach, CELLS, MULTICAST, WORLD - 1)
                store_words(out, begins, offs, tiles[0], mine, UNIT)
            tiles = tiles_to_send(x, rank, worker, mine, offs + workers * BLOCK, KIND == EXCHANGE, UNIT, WORLD)
        left = leave_epoch(call, extent, not CELLS)
        release_next_kernel(PDL)
        if not CELLS:
            clear_previous(call, left, slots_at, slots_quads, worker, workers, BLOCK)
        for start in range(worker * BLOCK, quads * 4, workers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            if KIND == EXCHANGE:
                own_words = load_words(x, rank.to(tl.int64) * part_nbytes, offs, part_nbytes, UNIT)
            sizes = ()
            masks = ()
            for r in tl.static_range(senders):
                size = starts[r + 1] - starts[r]
                if not MULTICAST:
                    size = tl.where(rank == (root if KIND == BROADCAST else r), 0, size)  # it sends itself nothing
                sizes = sizes + (size,)
                masks = masks + (offs < (size + 15) // 16 * 4,)
            first = root if KIND == BROADCAST else rank * 0
            parts, call = await_words(call, box, stride, offs, masks, first, CELLS, senders, WORLD)
            for r in tl.static_range(senders):
                store_words(out, starts[r], offs, nan_unless(call.live, parts[r], DTYPE), sizes[r], UNIT)
            if KIND == EXCHANGE:
                store_words(out, rank.to(tl.int64) * part_nbytes, offs, own_words, part_nbytes, UNIT)
            if CLEAR_AFTER_READ:
                clear_parts(call, box, stride, offs, masks, senders)
