"""The vocabulary of synchronisation; ``docs/reference/protocols.md`` says why each protocol is right.

A kernel looks up :func:`peer_addresses`, opens a call with :func:`enter`, pushes with :func:`store_to` and
:func:`store_to_all`, lets the epoch move on with :func:`leave_epoch`, and waits with :func:`await_words`. Program 0 of
every grid does :func:`exchange_headers` and nothing else. A call that cannot complete is stopped: ``live`` becomes 0,
waits end, stores to peers are masked, and outputs become NaN.

Loads that wait for one another were a seventh of a small call's time. So nothing is used, or branched on, before all
that a program needs first is on its way: peers' addresses before the prior kernel has ended, what it sends beside
the epoch, the extent to clear beside the count of readers. One warp issues in order: a use stands in the way of what
follows it.

Ordering. A word is its own flag, so data needs no fence: words are compared with the sentinel as integers, one by one,
through volatile (uncached) loads. Between calls the kernel boundary orders clearing before the next push. Decisions
that lead to a branch come from a reduction or an atomic, never from a plain load, which the warps of a program could
see differently.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from shotcast import wire
from shotcast.device.triton.intrinsics import (
    await_prior_kernel,
    fence_acquire,
    now_ns,
    release_next_kernel,
    store_release,
    yield_core,
)
from shotcast.transport.triton import layout
from shotcast.transport.triton.multicast import multicast_words

EPOCH = tl.constexpr(layout.EPOCH)
READERS = tl.constexpr(layout.READERS)
GENERATION = tl.constexpr(layout.GENERATION)
EXTENT = tl.constexpr(layout.EXTENT)
TIMEOUT = tl.constexpr(layout.TIMEOUT)
STATUS = tl.constexpr(layout.STATUS)
CLOCK = tl.constexpr(layout.CLOCK)
ABORT = tl.constexpr(layout.ABORT)
HEADERS = tl.constexpr(layout.HEADERS)
MAX_WORLD = tl.constexpr(wire.MAX_WORLD_SIZE)
FAULT_TIMEOUT = tl.constexpr(wire.TIMEOUT)
FAULT_MISMATCH = tl.constexpr(wire.MISMATCH)
GENERATIONS = tl.constexpr(3)
SENTINEL = tl.constexpr(-1)  # 0xFFFFFFFF
SENTINEL_ESCAPE = tl.constexpr(0x7FFFFFFF)
POLLS_PER_CHECK = tl.constexpr(256)
"""Polls between two looks at the clock and the abort word: about 0.2 ms on a GPU."""


class Call(NamedTuple):
    """One call as a program sees it. Addresses are of this rank's region and of the table of all regions."""

    own: tl.tensor
    peers: tl.tensor
    rank: tl.tensor
    header: tl.tensor
    epoch: tl.tensor
    generation: tl.tensor
    live: tl.tensor
    started: tl.tensor


@triton.jit
def words_at(address, quads):
    """Pointer to 32-bit words, ``quads`` 16-byte units past an (aligned) address."""
    base = tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(tl.int32)), 16)
    return base + quads * 4


@triton.jit
def read_abort_word(own, WARPS: tl.constexpr):
    """The abort word, the same for all threads of the program."""
    if WARPS == 1:
        fault = tl.load(own + ABORT, volatile=True)
    else:
        fault = tl.atomic_add(own + ABORT, 0, sem="relaxed", scope="sys")
    return fault


@triton.jit
def enter(own_address, peers_address, rank, header, WARPS: tl.constexpr, PDL: tl.constexpr):
    """Open a call: its epoch, and whether the communicator was stopped before (then ``live`` is 0).

    Under programmatic dependent launch the wait for the prior kernel comes first, in every program: it is not
    transitive. The epoch load is volatile because an L1 line may hold the prior kernel's view of it. The host is told
    of a call stopped before by :func:`leave_epoch`.
    """
    await_prior_kernel(PDL)
    own = tl.multiple_of(own_address.to(tl.int64).to(tl.pointer_type(tl.int64)), 16)
    peers = tl.multiple_of(peers_address.to(tl.int64).to(tl.pointer_type(tl.int64)), 16)
    epoch = tl.load(own + EPOCH, volatile=True)
    generation = tl.load(own + GENERATION, volatile=True).to(tl.int32)
    live = (read_abort_word(own, WARPS) == 0).to(tl.int32)
    return Call(own, peers, rank, header, epoch, generation, live, epoch * 0)


@triton.jit
def report_fault(own, fault):
    status = tl.load(own + STATUS).to(tl.pointer_type(tl.int64))
    tl.store(status, fault)


@triton.jit
def report_fault_if_stopped(call):
    """What :func:`enter` found, by a branch: past it, every thread has the abort word and the epoch."""
    if (call.live == 0) | (call.epoch < 0):  # no epoch is negative
        report_fault(call.own, tl.load(call.own + ABORT))


@triton.jit
def leave_epoch(call, extent, SLOTS: tl.constexpr):
    """Say that this program has read the epoch; the last program of the grid to do so advances it for the next kernel.

    Every thread has the epoch (by the branch), and the generation (by the extent's address), before it passes the
    barrier to the count, so the last program's stores follow all readers' loads. With SLOTS, also records that this
    call put ``extent`` quads into its generation, for the next one to clear, and moves on to the next generation; a
    call without slots leaves all generations as they are.

    Returns the extent of the previous call with slots, for :func:`clear_previous`.
    """
    report_fault_if_stopped(call)
    left = call.generation * 0
    if SLOTS:
        left = tl.load(call.own + EXTENT + previous_generation(call), volatile=True).to(tl.int32) * call.live
    tl.debug_barrier()
    readers = tl.atomic_add(call.own + READERS, 1, sem="relaxed", scope="gpu")
    if readers == tl.num_programs(0) - 1:
        tl.store(call.own + READERS, readers * 0)
        if SLOTS:
            tl.store(call.own + EXTENT + call.generation, extent.to(tl.int64))
            tl.store(call.own + GENERATION, ((call.generation + 1) % GENERATIONS).to(tl.int64))
        tl.store(call.own + EPOCH, call.epoch + 1)
    return left


@triton.jit
def previous_generation(call):
    """The generation of the previous call with slots."""
    return (call.generation + 2) % GENERATIONS


@triton.jit
def slots_offset(generation, slots_at, slots_quads):
    """Quads from a region's start to the slots of a generation."""
    return slots_at + generation * slots_quads


@triton.jit
def cells_offset(epoch, cells_at, cells_quads):
    """Quads from a region's start to the flag cells that ``epoch`` uses."""
    return cells_at + (epoch % 2).to(tl.int32) * cells_quads


@triton.jit
def clear_previous(call, left, slots_at, slots_quads, worker, workers, BLOCK: tl.constexpr):
    """Put sentinels back where the previous call with slots left words: ``left`` quads, as :func:`leave_epoch` says.

    No peer writes there before this rank finishes this call: a peer one call ahead uses generation g + 1, and none gets
    two calls ahead of a rank whose header it still needs. The programs of the grid share the work evenly.
    """
    base = words_at(call.own.to(tl.int64), slots_offset(previous_generation(call), slots_at, slots_quads))
    offs = tl.arange(0, BLOCK)
    clean = tl.full([BLOCK], SENTINEL, tl.int32)
    for start in range(worker * BLOCK, left * 4, workers * BLOCK):
        tl.store(base + start + offs, clean, mask=start + offs < left * 4)


@triton.jit
def clear_parts(call, quads, stride, offs, masks, COUNT: tl.constexpr):
    """Put sentinels back where :func:`await_words`, called with the same arguments, has read words.

    For kernels with CLEAR_AFTER_READ, which leave an extent of 0: where slots are many, they are better cleared while
    their lines are in the cache, and not in a pass of its own, during which the wires would be idle.
    """
    clean = tl.full([offs.shape[0]], SENTINEL, tl.int32)
    for r in tl.static_range(COUNT):
        tl.store(words_at(call.own.to(tl.int64), quads + r * stride) + offs, clean, mask=masks[r])


@triton.jit
def escape_sentinel(words):
    """Words that may be sent through slots: the sentinel, a NaN, becomes another NaN."""
    return tl.where(words == SENTINEL, SENTINEL_ESCAPE, words)


@triton.jit
def rotated_peer(rank, turn, i, WORLD: tl.constexpr, SKIP_SELF: tl.constexpr = True):
    """Which rank a program sends to as its i-th: all others, or with SKIP_SELF false all and itself.

    Programs with different ``turn`` begin with different ranks, which keeps all wires busy.
    """
    return (rank + 1 + (turn + i) % (WORLD - SKIP_SELF)) % WORLD


@triton.jit
def region_address(peers, rank):
    """Of a rank's region, by the table of all. It never changes, so it may be read before the prior kernel's end."""
    return tl.load(peers.to(tl.int64).to(tl.pointer_type(tl.int64)) + rank)


@triton.jit
def peer_addresses(peers, rank, turn, WORLD: tl.constexpr, SKIP_SELF: tl.constexpr = True):
    """Addresses of the regions of :func:`rotated_peer`, in that order."""
    addresses = ()
    for i in tl.static_range(WORLD - SKIP_SELF):
        addresses = addresses + (region_address(peers, rotated_peer(rank, turn, i, WORLD, SKIP_SELF)),)
    return addresses


@triton.jit
def store_to(call, address, quads, offs, words, mask, CELLS: tl.constexpr):
    """Push words (as flag cells with CELLS) to ``quads`` past the start of the region at ``address``."""
    if CELLS:
        base = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16) + quads * 2
        cells = (words.to(tl.int64) & 0xFFFFFFFF) | (call.epoch << 32)
        tl.store(base + offs, cells, mask=mask & (call.live != 0))
    else:
        tl.store(words_at(address, quads) + offs, words, mask=mask & (call.live != 0))


@triton.jit
def multicast_address(call, quads):
    """The address that stands for ``quads`` past the start of every rank's region: the table's last entry."""
    return tl.load(call.peers + MAX_WORLD) + quads.to(tl.int64) * 16


@triton.jit
def store_to_all(
    call,
    addresses,
    quads,
    offs,
    words,
    mask,
    CELLS: tl.constexpr,
    MULTICAST: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Push words to the same place in the COUNT regions at ``addresses``.

    With MULTICAST that is one store, which the switch repeats for all ranks; ``mask`` must take whole quads.
    """
    if MULTICAST:
        multicast_words(multicast_address(call, quads), offs, words, mask & (call.live != 0))
    else:
        for i in tl.static_range(COUNT):
            store_to(call, addresses[i], quads, offs, words, mask, CELLS)


@triton.jit
def arrival_masks(call, offs, span, step, total, COUNT: tl.constexpr, SKIP_SELF: tl.constexpr = False):
    """Which words of COUNT tiles come: of tile r those up to word ``min(span, total - r * step)``.

    With SKIP_SELF none of the tile of this rank, which then sends nothing to itself.
    """
    masks = ()
    for r in tl.static_range(COUNT):
        mask = (offs < span) & (offs + r * step < total)
        if SKIP_SELF:
            mask = mask & (call.rank != r)
        masks = masks + (mask,)
    return masks


@triton.jit
def load_parts(call, quads, stride, offs, masks, CELLS: tl.constexpr, COUNT: tl.constexpr):
    """COUNT tiles of this rank's region, ``stride`` quads apart; all loads are under way before one is used.

    What ``masks`` leave out reads as arrived.
    """
    parts = ()
    for r in tl.static_range(COUNT):
        if CELLS:
            base = tl.multiple_of(call.own, 16) + (quads + r * stride) * 2
            part = tl.load(base + offs, mask=masks[r], other=0, volatile=True)
            part = tl.where(masks[r], part, call.epoch << 32)
        else:
            base = words_at(call.own.to(tl.int64), quads + r * stride)
            part = tl.load(base + offs, mask=masks[r], other=0, volatile=True)
        parts = parts + (part,)
    return parts


@triton.jit
def missing_words(part, epoch, CELLS: tl.constexpr):
    if CELLS:
        hit = (part >> 32).to(tl.int32) != epoch.to(tl.int32)
    else:
        hit = part == SENTINEL
    return hit


@triton.jit
def any_missing(parts, epoch, CELLS: tl.constexpr, COUNT: tl.constexpr):
    """1 while a word of any tile has not arrived.

    The sentinel is the largest word, so one of many is found by their maximum: a fifth of the instructions that as many
    comparisons take, which a small call has between a word's arrival and its use.
    """
    if CELLS:
        hit = missing_words(parts[0], epoch, CELLS)
        for r in tl.static_range(1, COUNT):
            hit = hit | missing_words(parts[r], epoch, CELLS)
        waiting = tl.max(hit.to(tl.int32), axis=0)
    else:
        largest = parts[0].to(tl.uint32, bitcast=True)
        for r in tl.static_range(1, COUNT):
            largest = tl.maximum(largest, parts[r].to(tl.uint32, bitcast=True))
        waiting = (tl.max(largest, axis=0) == 0xFFFFFFFF).to(tl.int32)
    return waiting


@triton.jit
def await_words(
    call,
    quads,
    stride,
    offs,
    masks,
    first,
    CELLS: tl.constexpr,
    COUNT: tl.constexpr,
    WORLD: tl.constexpr,
    EXTENDED_DEADLINE: tl.constexpr = False,
):
    """Wait until all words of COUNT tiles (see :func:`load_parts`) are there. Returns (tiles, call).

    What tile r holds comes from rank ``(first + r) % WORLD``; a stopped call returns at once, with ``live`` 0. For
    EXTENDED_DEADLINE see :func:`check_deadline`.
    """
    parts = load_parts(call, quads, stride, offs, masks, CELLS, COUNT)
    waiting = any_missing(parts, call.epoch, CELLS, COUNT) & call.live
    started = call.started
    live = call.live
    polls = 0
    while waiting != 0:
        yield_core()
        parts = load_parts(call, quads, stride, offs, masks, CELLS, COUNT)
        waiting = any_missing(parts, call.epoch, CELLS, COUNT)
        polls += 1
        if polls % POLLS_PER_CHECK == 0:
            late_ranks = call.rank * 0
            for r in tl.static_range(COUNT):
                lacking = missing_words(parts[r], call.epoch, CELLS)
                late_ranks = late_ranks | (tl.max(lacking.to(tl.int32), axis=0) << ((first + r) % WORLD))
            started, live = check_deadline(call, started, late_ranks, True, WORLD, EXTENDED_DEADLINE)
            waiting = waiting & live
    call = Call(call.own, call.peers, call.rank, call.header, call.epoch, call.generation, live, started)
    words = ()
    for r in tl.static_range(COUNT):
        words = words + (parts[r].to(tl.int32),)
    return words, call


@triton.jit
def check_deadline(
    call, started, late_ranks, BY_HEADERS: tl.constexpr, WORLD: tl.constexpr, EXTENDED_DEADLINE: tl.constexpr = False
):
    """One look of a waiting program: has a peer stopped the call, or has the deadline passed? Returns (started, live).

    The deadline counts from the first look of the program that waits, over all waits of the call. When it passes, this
    rank stops the call everywhere. It names the ranks whose header is missing or, if all came (or without BY_HEADERS),
    the ranks in ``late_ranks``, whose data is. A program that waits for what peers make of others' data has
    EXTENDED_DEADLINE: it gives a quarter more, so that whoever lacks those data names the rank that did not send them
    first.
    """
    tl.atomic_max(call.own + CLOCK, now_ns(), sem="relaxed", scope="gpu")
    now = tl.atomic_max(call.own + CLOCK, call.epoch * 0, sem="relaxed", scope="gpu")
    timeout = tl.atomic_add(call.own + TIMEOUT, 0, sem="relaxed", scope="sys")
    if EXTENDED_DEADLINE:
        timeout += timeout // 4
    fault = tl.atomic_add(call.own + ABORT, 0, sem="relaxed", scope="sys")
    live = (fault == 0).to(tl.int32)
    if started == 0:
        started = now
    if fault != 0:
        report_fault(call.own, fault)
    elif now - started > timeout:
        missing = late_ranks
        if BY_HEADERS:
            lanes = tl.arange(0, MAX_WORLD)
            row = HEADERS + (call.epoch % 2) * MAX_WORLD
            cells = tl.load(call.own + row + lanes, mask=lanes < WORLD, other=0, volatile=True)
            late = ((cells >> 48) & 0xFFFF != call.epoch & 0xFFFF) | (cells == 0)
            late = late & (lanes < WORLD) & (lanes != call.rank)
            missing_headers = tl.sum(late.to(tl.int32) << lanes, axis=0)
            missing = tl.where(missing_headers == 0, late_ranks, missing_headers)
        stop(call, FAULT_TIMEOUT, missing, WORLD)
        live = live * 0
    return started, live


@triton.jit
def stop(call, kind, ranks, WORLD: tl.constexpr):
    """Set the abort word of every rank, and this host's copy."""
    op = (call.header >> 44) & 15
    fault = (call.epoch & 0xFFFFFFFF) | (ranks.to(tl.int64) << 32) | (op << 48) | (op * 0 + kind << 56)
    lanes = tl.arange(0, MAX_WORLD)
    bases = tl.load(call.peers + lanes, mask=lanes < WORLD, other=0)
    tl.store(bases.to(tl.pointer_type(tl.int64)) + ABORT, fault, mask=lanes < WORLD)
    report_fault(call.own, fault)


@triton.jit
def thread_ids(WARPS: tl.constexpr):
    """Numbers of the program's threads. A reduction over these passes through all warps, so all see its result alike;
    one over a shorter range is done by each warp for itself, and a branch on it could part them."""
    return tl.arange(0, 32 * WARPS)


@triton.jit
def raise_flags(call, quads, WORLD: tl.constexpr, WARPS: tl.constexpr):
    """Tell all ranks that what this program has stored so far, in its own region, may be read.

    Rank r's flag is a 64-bit word at ``quads`` past the start of each region, plus r: the epoch, which never repeats.
    """
    tl.debug_barrier()
    threads = thread_ids(WARPS)
    bases = tl.load(call.peers + threads % MAX_WORLD, mask=threads < WORLD, other=0)
    flags = bases.to(tl.pointer_type(tl.int64)) + quads * 2 + call.rank
    store_release(flags, call.epoch + threads * 0, (threads < WORLD) & (call.live != 0))


@triton.jit
def await_flags(call, quads, WORLD: tl.constexpr, WARPS: tl.constexpr):
    """Wait until every rank has raised its flag of this epoch; then all threads may read what it stored before.

    A rank's next flag takes the place of this one, so wait only where no rank can end the call without this program.
    Each thread has seen one rank's flag; the barrier joins what they know. The stopped call returns with ``live`` 0.
    """
    threads = thread_ids(WARPS)
    lanes = threads % MAX_WORLD
    ranks = lanes < WORLD
    flags = tl.load(call.own + quads * 2 + lanes, mask=ranks, other=0, volatile=True)
    late = ranks & (flags != call.epoch)
    waiting = tl.max(late.to(tl.int32), axis=0) & call.live
    started = call.started
    live = call.live
    polls = 0
    while waiting != 0:
        yield_core()
        flags = tl.load(call.own + quads * 2 + lanes, mask=ranks, other=0, volatile=True)
        late = ranks & (flags != call.epoch)
        waiting = tl.max(late.to(tl.int32), axis=0)
        polls += 1
        if polls % POLLS_PER_CHECK == 0:
            late_ranks = tl.sum((late & (threads < MAX_WORLD)).to(tl.int32) << lanes, axis=0)
            started, live = check_deadline(call, started, late_ranks, True, WORLD)
            waiting = waiting & live
    fence_acquire()
    tl.debug_barrier()
    return Call(call.own, call.peers, call.rank, call.header, call.epoch, call.generation, live, started)


@triton.jit
def exchange_headers(
    call, extent, SLOTS: tl.constexpr, WORLD: tl.constexpr, WARPS: tl.constexpr, RELEASE_NEXT: tl.constexpr
):
    """Tell every rank what this one calls, and wait until each has told the same; :func:`leave_epoch` in between.

    Returns when every rank has begun this call: no call ends before that, which is what lets slots be used again. With
    RELEASE_NEXT the next kernel is let in before the wait.
    """
    threads = thread_ids(WARPS)
    lanes = threads % MAX_WORLD
    ranks = lanes < WORLD
    row = HEADERS + (call.epoch % 2) * MAX_WORLD
    mine = ((call.epoch & 0xFFFF) << 48) | call.header
    bases = tl.load(call.peers + lanes, mask=ranks, other=0)
    once = ranks & (threads < MAX_WORLD) & (call.live != 0)
    tl.store(bases.to(tl.pointer_type(tl.int64)) + row + call.rank, mine, mask=once)
    leave_epoch(call, extent, SLOTS)
    release_next_kernel(RELEASE_NEXT)
    waiting = call.live
    started = call.started
    polls = 0
    while waiting != 0:
        cells = tl.load(call.own + row + lanes, mask=ranks, other=0, volatile=True)
        cells = tl.where(ranks, cells, mine)
        waiting = tl.max((cells != mine).to(tl.int32), axis=0)
        if waiting != 0:
            came = ((cells >> 48) & 0xFFFF == call.epoch & 0xFFFF) & (cells != 0)  # zero: never written
            odd = (cells != mine) & came & (threads < MAX_WORLD)
            differ = tl.sum(odd.to(tl.int32) << lanes, axis=0)
            polls += 1
            if differ != 0:
                stop(call, FAULT_MISMATCH, differ, WORLD)
                waiting = waiting * 0
            elif polls % POLLS_PER_CHECK == 0:
                started, live = check_deadline(call, started, call.rank * 0, True, WORLD)
                waiting = waiting & live
            yield_core()
