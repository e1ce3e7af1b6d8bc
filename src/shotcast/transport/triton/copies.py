"""Copies in one step: all_gather (also with uneven parts), all_to_all and broadcast.

    all_gather:  out = x_0, x_1, ..., x_{N-1}                   each rank sends x to all
    all_to_all:  out_i = part_i(x_0), ..., part_i(x_{N-1})      each rank sends part j to rank j
    broadcast:   out_i = x_root                                 the root sends x to all

Floating-point data goes through sentinel slots, exact except for the payload of NaNs. Any other data goes as flag
cells, exact to the bit, at twice the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl

from shotcast import wire
from shotcast.device.triton.intrinsics import await_prior_kernel, kernel, release_next_kernel
from shotcast.device.triton.words import load_words, nan_unless, store_words
from shotcast.transport.triton import sync
from shotcast.transport.triton.binding import KernelContext, KernelLaunch, TileShape
from shotcast.transport.triton.one_shot import tiles_to_send
from shotcast.transport.triton.sync import Entry
from shotcast.wire import CallPlan, Op

GATHER = tl.constexpr(0)
EXCHANGE = tl.constexpr(1)
BROADCAST = tl.constexpr(2)


@dataclass(frozen=True, slots=True)
class CopyShape(TileShape):
    """A copy; ``KIND`` is GATHER, EXCHANGE or BROADCAST, and ``CELLS`` sends it as flag cells."""

    KIND: int
    CELLS: bool
    MULTICAST: bool
    CLEAR_AFTER_READ: bool


@kernel(shape=CopyShape)
def copy(
    x,
    out,
    entry: Entry,
    root,
    part_nbytes,  # bytes of the largest part
    starts,  # part r of out is the bytes from starts[r] to starts[r + 1]
    slots_at,
    slots_quads,
    cells_at,
    cells_quads,
    SHAPE: tl.constexpr,
):
    """Copy x into out on the ranks that KIND names: GATHER, EXCHANGE (all_to_all) or BROADCAST."""
    rank = entry.rank
    WORLD: tl.constexpr = SHAPE.WORLD
    BLOCK: tl.constexpr = SHAPE.BLOCK
    KIND: tl.constexpr = SHAPE.KIND
    CELLS: tl.constexpr = SHAPE.CELLS
    UNIT: tl.constexpr = SHAPE.UNIT
    worker = tl.program_id(0) - 1
    workers = tl.num_programs(0) - 1
    addresses = sync.peer_addresses(entry.peers, rank, worker, WORLD)
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
    await_prior_kernel(SHAPE.PDL)
    offs = tl.maximum(worker, 0) * BLOCK + tl.arange(0, BLOCK)
    tiles = tiles_to_send(x, rank, worker, own_nbytes, offs, KIND == EXCHANGE, UNIT, WORLD)
    call = sync.enter(entry, SHAPE.WARPS, False)  # it has already waited for the prior kernel
    quads = (part_nbytes + 15) // 16  # quads of a slot
    extent = 0 if SHAPE.CLEAR_AFTER_READ else quads * senders
    if tl.program_id(0) == 0:
        sync.exchange_headers(call, extent, not CELLS, WORLD, SHAPE.WARPS, SHAPE.PDL)
    else:
        if CELLS:
            buffer = sync.cells_offset(call.epoch, cells_at, cells_quads)
            stride = quads * 2
        else:
            buffer = sync.slots_offset(call.generation, slots_at, slots_quads)
            stride = quads
        own_span = (own_nbytes + 15) // 16 * 4
        own_slot = buffer + slot_index * stride
        for start in range(worker * BLOCK, own_span, workers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            if KIND == EXCHANGE:
                for i in tl.static_range(WORLD - 1):
                    words = tiles[i] if CELLS else sync.escape_sentinel(tiles[i])
                    sync.store_to(call, addresses[i], own_slot, offs, words, offs < own_span, CELLS)
            else:
                words = tiles[0] if CELLS else sync.escape_sentinel(tiles[0])
                sync.store_to_all(
                    call, addresses, own_slot, offs, words, offs < own_span, CELLS, SHAPE.MULTICAST, WORLD - 1
                )
                store_words(out, own_start, offs, tiles[0], own_nbytes, UNIT)
            tiles = tiles_to_send(x, rank, worker, own_nbytes, offs + workers * BLOCK, KIND == EXCHANGE, UNIT, WORLD)
        sync.leave_epoch(call, extent, not CELLS)
        release_next_kernel(SHAPE.PDL)
        if not CELLS:
            sync.clear_previous(call, slots_at, slots_quads, worker, workers, BLOCK)
        for start in range(worker * BLOCK, quads * 4, workers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            if KIND == EXCHANGE:
                own_words = load_words(x, rank.to(tl.int64) * part_nbytes, offs, part_nbytes, UNIT)
            sizes = ()
            masks = ()
            for r in tl.static_range(senders):
                size = starts[r + 1] - starts[r]
                if not SHAPE.MULTICAST:
                    size = tl.where(rank == (root if KIND == BROADCAST else r), 0, size)  # it sends nothing to itself
                sizes = sizes + (size,)
                masks = masks + (offs < (size + 15) // 16 * 4,)
            first = root if KIND == BROADCAST else rank * 0
            parts, call = sync.await_words(call, buffer, stride, offs, masks, first, CELLS, senders, WORLD)
            for r in tl.static_range(senders):
                store_words(out, starts[r], offs, nan_unless(call.live, parts[r], SHAPE.DTYPE), sizes[r], UNIT)
            if KIND == EXCHANGE:
                store_words(out, rank.to(tl.int64) * part_nbytes, offs, own_words, part_nbytes, UNIT)
            if SHAPE.CLEAR_AFTER_READ:
                sync.clear_parts(call, buffer, stride, offs, masks, senders)


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
    return context.launch(
        copy,
        plan,
        starts=tuple(starts),
        part_nbytes=part,
        KIND=_KINDS[plan.op].value,
        CELLS=cells,
        MULTICAST=context.multicast and not cells,
    )
