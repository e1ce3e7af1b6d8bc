"""Copies in one step: all_gather (also uneven), all_to_all, broadcast. Bytes move; nothing is computed.

    all_gather:  out = x_0, x_1, ..., x_{N-1}                   each rank sends x to all
    all_to_all:  out_i = part_i(x_0), ..., part_i(x_{N-1})      each rank sends part j to rank j
    broadcast:   out_i = x_root                                 the root sends x to all

Floating-point data goes through sentinel slots, exact but for the payload of NaNs; anything else goes as flag cells, at
twice the bytes, exact.
"""

from __future__ import annotations

import triton.language as tl

from shotcast.kernels.sync import (
    addresses_of_peers,
    await_words,
    cells_of,
    clear_parts,
    clear_previous,
    enter,
    exchange_headers,
    leave_epoch,
    peer_in_turn,
    slots_of,
    store_to,
    store_to_all,
    without_sentinel,
)
from shotcast.kernels.target import kernel, release_next_kernel
from shotcast.kernels.words import load_words, nan_unless, store_words

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
    part,  # bytes of the largest part
    s0,  # part r lies in out at byte s_r, and ends where part r + 1 begins
    s1,
    s2,
    s3,
    s4,
    s5,
    s6,
    s7,
    s8,
    slots_at,
    slots_quads,
    cells_at,
    cells_quads,
    KIND: tl.constexpr,
    CELLS: tl.constexpr,
    MULTICAST: tl.constexpr,
    CLEARS: tl.constexpr,
    DTYPE: tl.constexpr,
    UNIT: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    worker = tl.program_id(0) - 1
    workers = tl.num_programs(0) - 1
    addresses = addresses_of_peers(peers, rank, worker, WORLD)
    call = enter(own, peers, rank, header, WARPS, PDL)
    starts = (s0, s1, s2, s3, s4, s5, s6, s7, s8)
    quads = (part + 15) // 16  # of a slot
    span = quads * 4
    senders: tl.constexpr = 1 if KIND == BROADCAST else WORLD
    extent = 0 if CLEARS else quads * senders
    if tl.program_id(0) == 0:
        exchange_headers(call, extent, not CELLS, WORLD, WARPS, PDL)
    else:
        if CELLS:
            box = cells_of(call.epoch, cells_at, cells_quads)
            stride = quads * 2
        else:
            box = slots_of(call.generation, slots_at, slots_quads)
            stride = quads
        mine = part
        begins = part * 0
        if KIND == GATHER:
            for r in tl.static_range(WORLD):
                mine = tl.where(rank == r, starts[r + 1] - starts[r], mine)
                begins = tl.where(rank == r, starts[r], begins)
        sends = mine > 0
        seat = rank
        if KIND == BROADCAST:
            sends = sends & (rank == root)
            seat = rank * 0
        reach = tl.where(sends, (mine + 15) // 16 * 4, 0)
        for start in range(worker * BLOCK, reach, workers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            mask = offs < reach
            if KIND == EXCHANGE:
                words = load_words(x, rank.to(tl.int64) * part, offs, part, UNIT)
                store_words(out, rank.to(tl.int64) * part, offs, words, part, UNIT)
                tiles = ()
                for i in tl.static_range(WORLD - 1):
                    peer = peer_in_turn(rank, worker, i, WORLD)
                    tiles = tiles + (load_words(x, peer.to(tl.int64) * part, offs, part, UNIT),)
                for i in tl.static_range(WORLD - 1):
                    words = tiles[i]
                    if not CELLS:
                        words = without_sentinel(words)
                    store_to(call, addresses[i], box + seat * stride, offs, words, mask, CELLS)
            else:
                words = load_words(x, 0, offs, mine, UNIT)
                store_words(out, begins, offs, words, mine, UNIT)
                if not CELLS:
                    words = without_sentinel(words)
                store_to_all(call, addresses, box + seat * stride, offs, words, mask, CELLS, MULTICAST, WORLD - 1)
        left = leave_epoch(call, extent, not CELLS)
        release_next_kernel(PDL)
        if not CELLS:
            clear_previous(call, left, slots_at, slots_quads, worker, workers, BLOCK)
        for start in range(worker * BLOCK, span, workers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            for r in tl.static_range(senders):
                sender = root if KIND == BROADCAST else r
                size = starts[r + 1] - starts[r]
                if not MULTICAST:
                    size = tl.where(rank == sender, 0, size)  # it sends itself nothing
                reach = (size + 15) // 16 * 4
                place = box + r * stride
                words, call = await_words(call, place, 0, offs, reach, 0, reach, sender, CELLS, 1, WORLD)
                store_words(out, starts[r], offs, nan_unless(call.live, words[0], DTYPE), size, UNIT)
                if CLEARS:
                    clear_parts(call, place, 0, offs, reach, 0, reach, 1, False)
