"""Copies in one step: all_gather (also with uneven parts), all_to_all and broadcast.

    all_gather:  out = x_0, x_1, ..., x_{N-1}                   each rank sends x to all
    all_to_all:  out_i = part_i(x_0), ..., part_i(x_{N-1})      each rank sends part j to rank j
    broadcast:   out_i = x_root                                 the root sends x to all

Floating-point data goes through sentinel slots, exact but for the payload of NaNs. Any other data goes as flag cells,
exact to the bit, at twice the bytes.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl

from shotcast import wire
from shotcast.device.triton.intrinsics import await_prior_kernel, kernel, release_next_kernel
from shotcast.device.triton.words import load_words, nan_unless, store_words
from shotcast.transport.triton.binding import KernelContext, KernelLaunch
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
from shotcast.wire import CallPlan, Op

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
    header_size,
    header_call,
    root,
    part_nbytes,  # bytes of the largest part
    start0,  # part r of out is the bytes from start_r to start_(r + 1)
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
    """Copy x into out on the ranks that KIND names: GATHER, EXCHANGE (all_to_all) or BROADCAST."""
    worker = tl.program_id(0) - 1
    workers = tl.num_programs(0) - 1
    addresses = peer_addresses(peers, rank, worker, WORLD)
    starts = (start0, start1, start2, start3, start4, start5, start6, start7, start8)
    own_nbytes = part_nbytes  # bytes that this rank sends
    own_start = part_nbytes * 0  # where they lie in out
    slot_index = rank
    senders: tl.constexpr = 1 if KIND == BROADCAST else WORLD
    if KIND == GATHER:
        for r in tl.static_range(WORLD):
            own_nbytes = tl.where(rank == r, starts[r + 1] - starts[r], own_nbytes)
            own_start = tl.where(rank == r, starts[r], own_start)
    if KIND == BROADCAST:
        own_nbytes = tl.where(rank == root, part_nbytes, 0)
        slot_index = rank * 0
    await_prior_kernel(PDL)
    offs = tl.maximum(worker, 0) * BLOCK + tl.arange(0, BLOCK)
    tiles = tiles_to_send(x, rank, worker, own_nbytes, offs, KIND == EXCHANGE, UNIT, WORLD)
    call = enter(own, peers, rank, header_size, header_call, WARPS, False)  # the prior kernel has been waited for
    quads = (part_nbytes + 15) // 16  # quads of a slot
    extent = 0 if CLEAR_AFTER_READ else quads * senders
    if tl.program_id(0) == 0:
        exchange_headers(call, extent, not CELLS, WORLD, WARPS, PDL)
    else:
        if CELLS:
            buffer = cells_offset(call.epoch, cells_at, cells_quads)
            stride = quads * 2
        else:
            buffer = slots_offset(call.generation, slots_at, slots_quads)
            stride = quads
        own_span = (own_nbytes + 15) // 16 * 4
        own_slot = buffer + slot_index * stride
        for start in range(worker * BLOCK, own_span, workers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            if KIND == EXCHANGE:
                for i in tl.static_range(WORLD - 1):
                    words = tiles[i] if CELLS else escape_sentinel(tiles[i])
                    store_to(call, addresses[i], own_slot, offs, words, offs < own_span, CELLS)
            else:
                words = tiles[0] if CELLS else escape_sentinel(tiles[0])
                store_to_all(call, addresses, own_slot, offs, words, offs < own_span, CELLS, MULTICAST, WORLD - 1)
                store_words(out, own_start, offs, tiles[0], own_nbytes, UNIT)
            tiles = tiles_to_send(x, rank, worker, own_nbytes, offs + workers * BLOCK, KIND == EXCHANGE, UNIT, WORLD)
        dirty = leave_epoch(call, extent, not CELLS)
        release_next_kernel(PDL)
        if not CELLS:
            clear_previous(call, dirty, slots_at, slots_quads, worker, workers, BLOCK)
        for start in range(worker * BLOCK, quads * 4, workers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            if KIND == EXCHANGE:
                own_words = load_words(x, rank.to(tl.int64) * part_nbytes, offs, part_nbytes, UNIT)
            sizes = ()
            masks = ()
            for r in tl.static_range(senders):
                size = starts[r + 1] - starts[r]
                if not MULTICAST:
                    size = tl.where(rank == (root if KIND == BROADCAST else r), 0, size)  # it sends nothing to itself
                sizes = sizes + (size,)
                masks = masks + (offs < (size + 15) // 16 * 4,)
            first = root if KIND == BROADCAST else rank * 0
            parts, call = await_words(call, buffer, stride, offs, masks, first, CELLS, senders, WORLD)
            for r in tl.static_range(senders):
                store_words(out, starts[r], offs, nan_unless(call.live, parts[r], DTYPE), sizes[r], UNIT)
            if KIND == EXCHANGE:
                store_words(out, rank.to(tl.int64) * part_nbytes, offs, own_words, part_nbytes, UNIT)
            if CLEAR_AFTER_READ:
                clear_parts(call, buffer, stride, offs, masks, senders)


_KINDS = {Op.ALL_GATHER: GATHER, Op.ALL_TO_ALL: EXCHANGE, Op.BROADCAST: BROADCAST}


def bind(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of an all_gather, an all_to_all or a broadcast."""
    item, world_size = wire.DTYPES[plan.dtype], context.world_size
    part = plan.nbytes // world_size
    starts = [rank * part for rank in range(world_size + 1)]
    if plan.sizes:
        part = max(plan.sizes) * item
        starts = [sum(plan.sizes[:rank]) * item for rank in range(world_size + 1)]
    elif plan.op is Op.BROADCAST:
        part = plan.nbytes
        starts = [0] + [part] * world_size
    starts += [starts[-1]] * (wire.MAX_WORLD_SIZE - world_size)
    cells = plan.dtype not in wire.REDUCIBLE
    arguments: dict[str, Any] = {f"start{i}": start for i, start in enumerate(starts)}
    arguments |= {"part_nbytes": part, "KIND": _KINDS[plan.op], "CELLS": cells}
    return context.launch(copy, plan, MULTICAST=context.multicast and not cells, **arguments)
