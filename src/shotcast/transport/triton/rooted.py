"""Copies to and from a root in one step: gather and scatter.

    gather:   out_root = x_0, x_1, ..., x_{N-1}       each rank sends x to the root
    scatter:  out_i = part_i(x_root)                  the root sends part j to rank j

As in :mod:`.copies`, floating-point data goes through sentinel slots, exact except for the payload of NaNs. Any other
data goes as flag cells, exact to the bit, at twice the bytes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import triton.language as tl

from shotcast import wire
from shotcast.device.triton.intrinsics import await_prior_kernel, kernel, release_next_kernel
from shotcast.device.triton.words import load_words, nan_unless, store_words
from shotcast.transport.triton import sync
from shotcast.transport.triton.binding import KernelContext, KernelLaunch, TileShape
from shotcast.transport.triton.sync import Entry
from shotcast.wire import CallPlan, Op


@dataclass(frozen=True, slots=True)
class RootedShape(TileShape):
    """A copy from the root (``SCATTER``) or to it; ``CELLS`` sends it as flag cells."""

    SCATTER: bool
    CELLS: bool
    CLEAR_AFTER_READ: bool


@kernel(shape=RootedShape)
def rooted_copy(
    x, out, entry: Entry, root, part_nbytes, slots_at, slots_quads, cells_at, cells_quads, SHAPE: tl.constexpr
):
    """Copy all ranks' x into the root's out, or with SCATTER each part of the root's x into its rank's out."""
    rank = entry.rank
    WORLD: tl.constexpr = SHAPE.WORLD
    BLOCK: tl.constexpr = SHAPE.BLOCK
    SCATTER: tl.constexpr = SHAPE.SCATTER
    CELLS: tl.constexpr = SHAPE.CELLS
    UNIT: tl.constexpr = SHAPE.UNIT
    worker = tl.program_id(0) - 1
    workers = tl.num_programs(0) - 1
    senders: tl.constexpr = 1 if SCATTER else WORLD
    if SCATTER:
        addresses = sync.peer_addresses(entry.peers, rank, worker, WORLD)
    else:
        addresses = (sync.region_address(entry.peers, root),)
    own_nbytes = tl.where(rank == root, part_nbytes, 0)  # kept by the root
    sent_nbytes = own_nbytes if SCATTER else part_nbytes - own_nbytes  # sent by this rank to each of some others
    await_prior_kernel(SHAPE.PDL)
    call = sync.enter(entry, SHAPE.WARPS, False)  # the program has already waited for the prior kernel
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
        span = quads * 4
        for start in range(worker * BLOCK, span, workers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            mask = offs < (sent_nbytes + 15) // 16 * 4
            if SCATTER:
                for i in tl.static_range(WORLD - 1):
                    peer = sync.rotated_peer(rank, worker, i, WORLD).to(tl.int64)
                    words = load_words(x, peer * part_nbytes, offs, sent_nbytes, UNIT)
                    words = words if CELLS else sync.escape_sentinel(words)
                    sync.store_to(call, addresses[i], buffer, offs, words, mask, CELLS)
                kept = load_words(x, rank.to(tl.int64) * part_nbytes, offs, own_nbytes, UNIT)
                store_words(out, 0, offs, kept, own_nbytes, UNIT)
            else:
                kept = load_words(x, 0, offs, part_nbytes, UNIT)
                words = kept if CELLS else sync.escape_sentinel(kept)
                sync.store_to(call, addresses[0], buffer + rank * stride, offs, words, mask, CELLS)
                store_words(out, rank.to(tl.int64) * part_nbytes, offs, kept, own_nbytes, UNIT)
        sync.leave_epoch(call, extent, not CELLS)
        release_next_kernel(SHAPE.PDL)
        if not CELLS:
            sync.clear_previous(call, slots_at, slots_quads, worker, workers, BLOCK)
        for start in range(worker * BLOCK, span, workers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            sizes = ()
            masks = ()
            for r in tl.static_range(senders):
                arrives = (rank != root) if SCATTER else (rank == root) & (root != r)
                size = tl.where(arrives, part_nbytes, 0)
                sizes = sizes + (size,)
                masks = masks + (offs < (size + 15) // 16 * 4,)
            first = root if SCATTER else rank * 0
            parts, call = sync.await_words(call, buffer, stride, offs, masks, first, CELLS, senders, WORLD)
            for r in tl.static_range(senders):
                store_words(
                    out,
                    part_nbytes.to(tl.int64) * r,
                    offs,
                    nan_unless(call.live, parts[r], SHAPE.DTYPE),
                    sizes[r],
                    UNIT,
                )
            if SHAPE.CLEAR_AFTER_READ:
                sync.clear_parts(call, buffer, stride, offs, masks, senders)


def bind(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of a gather or a scatter."""
    cells = plan.dtype not in wire.REDUCIBLE
    alike = dataclasses.replace(plan, op=Op.ALL_GATHER)  # its parts are as large
    return context.launch(
        rooted_copy,
        plan,
        part_nbytes=plan.nbytes // context.world_size,
        SCATTER=plan.op is Op.SCATTER,
        CELLS=cells,
        CLEAR_AFTER_READ=context.clears(alike),
        UNIT=context.unit(alike),
    )
