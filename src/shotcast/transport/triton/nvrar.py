"""All-reduce over nodes (NVRAR) in one launch, for any number of nodes and of ranks per node.

    scatter   in the node: local rank l gets slice l of all ranks, and adds up in rank order, in float32
    exchange  between ranks with the same local rank, as ``exchanges.py`` describes: the partial sums of the nodes
              are added up in one fixed tree, in float32, and rounded once
    gather    in the node: local rank l sends its slice of the result to all others

A program carries its tile through all phases, and the grid passes over the message as a window, so the phases of
different tiles overlap. Nodes are consecutive ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import await_prior_kernel, kernel, release_next_kernel
from shotcast.device.triton.words import accumulate, insert_own, load_words, nan_unless, store_words, unpack
from shotcast.errors import UnsupportedError
from shotcast.hardware.nodes import folded
from shotcast.transport.triton import exchanges, sync
from shotcast.transport.triton.binding import KernelContext, KernelLaunch, TileShape
from shotcast.transport.triton.exchanges import DOUBLING, HALVING, PAIRS, PAIRS_16BIT, TWO_SHOT_16BIT, NodesShape, Tile
from shotcast.transport.triton.network import enter_network
from shotcast.transport.triton.sync import EntryWithPuts
from shotcast.wire import SIXTEEN_BITS, CallPlan


@triton.jit
def load_slice(x, local, slice_quads, nbytes, offs, UNIT: tl.constexpr):
    """Load a tile of a local rank's slice; zero beyond the slice."""
    start = local * slice_quads * 16
    return load_words(x, start, offs, tl.minimum(nbytes - start, slice_quads * 16), UNIT)


@triton.jit
def tiles_to_send(
    x,
    local,
    rotation,
    slice_quads,
    nbytes,
    offs,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    UNIT: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """Load tiles of the slices of local peers FIRST to END - 1, in ``rotated_peer`` order; a lone rank has its own."""
    tiles = ()
    for i in tl.static_range(FIRST, END):
        mate = local
        if LOCAL > 1:
            mate = sync.rotated_peer(local, rotation, i, LOCAL)
        tiles = tiles + (load_slice(x, mate, slice_quads, nbytes, offs, UNIT),)
    return tiles


@triton.jit
def partial_sum(parts, DTYPE: tl.constexpr, COUNT: tl.constexpr):
    """Sum tiles as ((+0.0 + parts[0]) + parts[1]) + ... in float32, for low and for high halves."""
    low, high = unpack(parts[0], DTYPE)
    return accumulate(low + 0.0, high + 0.0, parts[1:], COUNT - 1, DTYPE)


@triton.jit
def slice_span(local, slice_words, total):
    """Return the number of words in a local rank's slice; 0 or less if it is empty."""
    return tl.minimum(slice_words, total - local * slice_words)


@triton.jit
def begin_exchange(call, network, targets, place, tile, value, SHAPE: tl.constexpr):
    """Send the partial sums that a rank has, without waiting for other nodes."""
    if SHAPE.NODES > 1:
        if SHAPE.EXCHANGE == PAIRS:
            exchanges.begin_pairs(
                call, network, targets, place, tile, exchanges.bits_of(value, SHAPE.PARTS), SHAPE.PARTS, SHAPE
            )
        elif SHAPE.EXCHANGE == PAIRS_16BIT:
            exchanges.begin_pairs(
                call, network, targets, place, tile, (exchanges.rounded(value, SHAPE.DTYPE),), 1, SHAPE
            )
        elif SHAPE.EXCHANGE == TWO_SHOT_16BIT:
            exchanges.begin_two_shot_16bit(
                call, network, targets, place, tile, exchanges.rounded(value, SHAPE.DTYPE), SHAPE
            )
        elif SHAPE.EXCHANGE == HALVING:
            exchanges.begin_halving(call, network, targets, place, tile, value, SHAPE)
        else:
            exchanges.begin_doubling(call, network, targets, place, tile, value, SHAPE)


@triton.jit
def finish_exchange(call, network, targets, place, tile, value, SHAPE: tl.constexpr):
    """Add up the partial sums of all nodes. Returns (words of the result, call)."""
    if SHAPE.NODES == 1:
        words = exchanges.rounded(value, SHAPE.DTYPE)
    elif SHAPE.EXCHANGE == PAIRS:
        words, call = exchanges.finish_pairs(call, network, place, tile, value, SHAPE)
    elif SHAPE.EXCHANGE == PAIRS_16BIT:
        words, call = exchanges.finish_pairs_16bit(
            call, network, place, tile, exchanges.rounded(value, SHAPE.DTYPE), SHAPE
        )
    elif SHAPE.EXCHANGE == TWO_SHOT_16BIT:
        words, call = exchanges.finish_two_shot_16bit(
            call, network, targets, place, tile, exchanges.rounded(value, SHAPE.DTYPE), SHAPE
        )
    elif SHAPE.EXCHANGE == HALVING:
        words, call = exchanges.finish_halving(call, network, targets, place, tile, value, SHAPE)
    else:
        words, call = exchanges.finish_doubling(call, network, targets, place, tile, value, SHAPE)
    return words, call


@dataclass(frozen=True, slots=True)
class AllReduceShape(TileShape, NodesShape):
    """The all-reduce over nodes."""

    CLEAR_AFTER_READ: bool


@kernel(shape=AllReduceShape)
def nvrar_all_reduce(
    x, out, entry: EntryWithPuts, nbytes, slots_at, slots_quads, staging_at, staging_quads, SHAPE: tl.constexpr
):
    """Sum x over all ranks into out."""
    rank = entry.rank
    BLOCK: tl.constexpr = SHAPE.BLOCK
    DTYPE: tl.constexpr = SHAPE.DTYPE
    UNIT: tl.constexpr = SHAPE.UNIT
    LOCAL: tl.constexpr = SHAPE.LOCAL
    worker = tl.program_id(0) - 1
    workers = tl.num_programs(0) - 1
    place = exchanges.place_of(rank, SHAPE)
    local = place.local
    first_rank = rank - local
    quads = (nbytes + 15) // 16
    slice_quads = (quads + LOCAL - 1) // LOCAL  # the last slices may be shorter, or empty
    slice_words = slice_quads * 4
    mates = ()
    if LOCAL > 1:
        mates = sync.peer_addresses(entry.peers + first_rank * 8, local, worker, LOCAL)
    targets = exchanges.targets_of(entry, place, SHAPE)
    await_prior_kernel(SHAPE.PDL)
    lanes = tl.arange(0, BLOCK)
    offs = tl.maximum(worker, 0) * BLOCK + lanes
    # as in two-shot: load all of a small message, but only the first tile of a large one, before the epoch is known
    SENT: tl.constexpr = LOCAL - 1 if LOCAL > 1 else 1
    EARLY: tl.constexpr = SENT if SHAPE.WARPS == 1 else 1
    tiles = tiles_to_send(x, local, worker, slice_quads, nbytes, offs, 0, EARLY, UNIT, LOCAL)
    call = sync.enter(entry, SHAPE.WARPS, False)  # the program has already waited for the prior kernel
    rounds = (slice_words + workers * BLOCK - 1) // (workers * BLOCK)
    inner_quads = slice_quads * (2 * LOCAL if LOCAL > 1 else 0)
    extent = inner_quads + exchanges.exchange_quads(slice_quads, SHAPE)
    if SHAPE.CLEAR_AFTER_READ:
        extent = extent * 0
    if tl.program_id(0) == 0:
        sync.exchange_headers(call, extent, True, SHAPE.WORLD, SHAPE.WARPS, SHAPE.PDL, entry.puts, SHAPE.PUTS)
    else:
        total = quads * 4
        own_span = slice_span(local, slice_words, total)
        first_shot = sync.slots_offset(call.generation, slots_at, slots_quads)
        second_shot = first_shot + slice_quads * LOCAL
        network = enter_network(
            call, first_shot + inner_quads, staging_at, staging_quads, SHAPE.PUTS, SHAPE.CLEAR_AFTER_READ
        )
        for chunk in range(0, rounds):
            tile = chunk * workers + worker
            offs = tile * BLOCK + lanes
            if LOCAL == 1:
                value = partial_sum(tiles, DTYPE, 1)
                count = tl.minimum(tl.maximum(own_span - tile * BLOCK, 0), BLOCK)
                at = Tile(tile, tile * BLOCK, slice_words, lanes, count)
                begin_exchange(call, network, targets, place, at, value, SHAPE)
            else:
                for i in tl.static_range(SENT):
                    span = slice_span(sync.rotated_peer(local, worker, i, LOCAL), slice_words, total)
                    if i < EARLY:
                        words = tiles[i]
                    else:
                        (words,) = tiles_to_send(x, local, worker, slice_quads, nbytes, offs, i, i + 1, UNIT, LOCAL)
                    words = sync.escape_sentinel(words)
                    sync.store_to(call, mates[i], first_shot + local * slice_quads, offs, words, offs < span, False)
            next_offs = offs + workers * BLOCK
            tiles = tiles_to_send(x, local, worker, slice_quads, nbytes, next_offs, 0, EARLY, UNIT, LOCAL)
        sync.leave_epoch(call, extent, True)
        release_next_kernel(SHAPE.PDL)
        sync.clear_previous(call, slots_at, slots_quads, worker, workers, BLOCK)
        for chunk in range(0, rounds + (LOCAL > 1)):
            if chunk < rounds:
                tile = chunk * workers + worker
                start = tile * BLOCK
                offs = start + lanes
                count = tl.minimum(tl.maximum(own_span - start, 0), BLOCK)
                at = Tile(tile, start, slice_words, lanes, count)
                words = load_slice(x, local, slice_quads, nbytes, offs, UNIT)
                if LOCAL == 1:
                    value = partial_sum((words,), DTYPE, 1)
                else:
                    masks = ()
                    for r in tl.static_range(LOCAL):
                        masks = masks + ((offs < own_span) & (local != r),)
                    parts, call = sync.await_words(
                        call, first_shot, slice_quads, offs, masks, first_rank, False, LOCAL, SHAPE.WORLD
                    )
                    value = partial_sum(insert_own(parts, words, local, LOCAL), DTYPE, LOCAL)
                    if SHAPE.CLEAR_AFTER_READ:
                        sync.clear_parts(call, first_shot, slice_quads, offs, masks, LOCAL)
                    begin_exchange(call, network, targets, place, at, value, SHAPE)
                words, call = finish_exchange(call, network, targets, place, at, value, SHAPE)
                quad = local * slice_quads
                if LOCAL > 1:
                    sync.store_to_all(
                        call, mates, second_shot + quad, offs, words, offs < own_span, False, False, LOCAL - 1
                    )
                remaining = tl.minimum(slice_quads * 16, nbytes - quad * 16)
                store_words(out, quad * 16, offs, nan_unless(call.live, words, DTYPE), remaining, UNIT)
            if LOCAL > 1 and chunk > 0:
                offs = ((chunk - 1) * workers + worker) * BLOCK + lanes
                masks = ()
                for r in tl.static_range(LOCAL):
                    masks = masks + ((offs < slice_span(r, slice_words, total)) & (local != r),)
                parts, call = sync.await_words(
                    call, second_shot, slice_quads, offs, masks, first_rank, False, LOCAL, SHAPE.WORLD, SHAPE.NODES > 1
                )
                for r in tl.static_range(LOCAL):
                    remaining = tl.minimum(slice_quads * 16, nbytes - r * slice_quads * 16)
                    remaining = tl.where(local == r, 0, remaining)
                    words = nan_unless(call.live, parts[r], DTYPE)
                    store_words(out, r * slice_quads * 16, offs, words, remaining, UNIT)
                if SHAPE.CLEAR_AFTER_READ:
                    sync.clear_parts(call, second_shot, slice_quads, offs, masks, LOCAL)


def nodes_arguments(plan: CallPlan, context: KernelContext) -> dict[str, Any]:
    """Return the fields of :class:`.exchanges.NodesShape` that describe the nodes and words."""
    return {
        "FOLDED": folded(context.nodes),
        "DOUBLINGS": context.nodes.bit_length() - 1,
        "LOCAL": context.world_size // context.nodes,
        "PARTS": 1 if plan.dtype == "float32" else 2,
    }


def bind(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of an all_reduce that exchanges between nodes by doubling."""
    return context.launch(nvrar_all_reduce, plan, EXCHANGE=DOUBLING.value, **nodes_arguments(plan, context))


def bind_pairs(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of an all_reduce that exchanges between all pairs of nodes at once."""
    return context.launch(nvrar_all_reduce, plan, EXCHANGE=PAIRS.value, **nodes_arguments(plan, context))


def bind_halving(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of an all_reduce that exchanges between nodes by halving and doubling."""
    return context.launch(nvrar_all_reduce, plan, EXCHANGE=HALVING.value, **nodes_arguments(plan, context))


def bind_16bit(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of an all_reduce that rounds the partial sums passed between nodes to 16 bits.

    Raises UnsupportedError for a dtype that does not have 16 bits.
    """
    if plan.dtype not in SIXTEEN_BITS:
        raise UnsupportedError(f"{plan.algorithm} adds up {' and '.join(SIXTEEN_BITS)}, not {plan.dtype}")
    exchange = PAIRS_16BIT if context.in_one_step(plan) else TWO_SHOT_16BIT
    return context.launch(nvrar_all_reduce, plan, EXCHANGE=exchange.value, **nodes_arguments(plan, context))
