"""The synchronization primitives of the Triton transport, for the kernels here and for kernels that you write.

``docs/reference/protocols.md`` explains why each protocol is correct. A kernel

- looks up the regions of its peers with :func:`peer_addresses`;
- opens the call with :func:`enter`;
- pushes words to peers with :func:`store_to` and :func:`store_to_all`;
- counts itself with :func:`leave_epoch`, once in every program but program 0;
- clears the slots of the previous call with :func:`clear_previous`;
- waits for the words of its peers with :func:`await_words`.

Program 0 of every grid calls :func:`exchange_headers`, which also advances the epoch. A call that cannot complete is
*stopped*: ``call.live`` becomes 0, waits end, stores to peers are masked off, and outputs become NaN
(:func:`shotcast.device.triton.words.nan_unless`).

Terms. Every rank owns a *region* of symmetric memory (``layout.py``); offsets into it count *quads* of 16 bytes. Three
*generations* of slots take turns. The *extent* of a call is the number of quads of its generation that it uses.

Ordering. A word is its own flag, read by volatile (uncached) loads, so data needs no fence. A decision that leads to a
branch comes from a reduction or an atomic, never from a plain load, whose result the warps of a program could see
differently.

Latency. A program issues all the loads that it needs before it uses, or branches on, the result of any. Loads that
waited for one another took a seventh of the time of a small call.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from shotcast import wire
from shotcast.device.triton.intrinsics import (
    INTERPRETED,
    await_prior_kernel,
    fence_acquire,
    load_acquire,
    load_pair,
    now_ns,
    release_next_kernel,
    store_release,
    sync_warp,
    yield_core,
)
from shotcast.device.triton.nvshmem import put_nbi_block
from shotcast.transport.triton import layout
from shotcast.transport.triton.multicast import multicast_words

COPIES = tl.constexpr(layout.COPIES)
COPY_WORDS = tl.constexpr(layout.COPY_WORDS)
EPOCH = tl.constexpr(layout.EPOCH)
GENERATION_WORD = tl.constexpr(layout.GENERATION - layout.EPOCH)
ABORT_WORD = tl.constexpr(layout.ABORT - layout.EPOCH)
READERS_WORD = tl.constexpr(layout.READERS - layout.EPOCH)
TIMEOUT = tl.constexpr(layout.TIMEOUT)
STATUS = tl.constexpr(layout.STATUS)
CLOCK = tl.constexpr(layout.CLOCK)
GONE = tl.constexpr(layout.GONE)
HOST_FAULT = tl.constexpr(layout.HOST_FAULT)
HOST_GONE = tl.constexpr(layout.HOST_GONE)
HOST_WAIT = tl.constexpr(layout.HOST_WAIT)
HOST_LOOK_NS = tl.constexpr(layout.HOST_LOOK_NS)
WAIT_NOTICE_NS = tl.constexpr(layout.WAIT_NOTICE_NS)
HEADERS = tl.constexpr(layout.HEADERS)
HEADER_WORDS = tl.constexpr(layout.HEADER_WORDS)
OP_AT = tl.constexpr(wire.OP_AT)
WIDE_HEADERS = tl.constexpr(layout.WIDE_HEADERS)
MAX_WORLD = tl.constexpr(wire.MAX_WORLD_SIZE)
PROGRESS_STEP_BITS = tl.constexpr(layout.PROGRESS_STEP_BITS)
BLOCKS = tl.constexpr(layout.BLOCKS)
PLACE_AT = tl.constexpr(layout.PLACE_AT)
PLACE_MASK = tl.constexpr((1 << layout.PLACE_AT) - 1)
MOST_RANKS = tl.constexpr(layout.MOST_RANKS)
FAULT_TIMEOUT = tl.constexpr(wire.TIMEOUT)
FAULT_MISMATCH = tl.constexpr(wire.MISMATCH)
FAULT_DEAD = tl.constexpr(wire.DEAD)
FAULT_MASK_AT = tl.constexpr(wire.FAULT_MASK_AT)
FAULT_OP_AT = tl.constexpr(wire.FAULT_OP_AT)
FAULT_KIND_AT = tl.constexpr(wire.FAULT_KIND_AT)
GENERATIONS = tl.constexpr(3)
SENTINEL = tl.constexpr(-1)  # 0xFFFFFFFF
SENTINEL_ESCAPE = tl.constexpr(0x7FFFFFFF)
SERIAL = tl.constexpr(INTERPRETED)
POLLS_PER_CHECK = tl.constexpr(16 if INTERPRETED else 256)
"""Polls between two checks of the deadline and the abort word: about 0.2 ms on a GPU, 0.1 s in the interpreter."""


class Entry(NamedTuple):
    """The kernel arguments that open a call.

    ``own`` is the address of this rank's region, and ``peers`` the address of the table of the addresses of all
    regions. ``header_size`` and ``header_call`` are the words of the header (:class:`shotcast.wire.HeaderWords`).
    """

    own: tl.tensor
    peers: tl.tensor
    rank: tl.tensor
    header_size: tl.tensor
    header_call: tl.tensor


class EntryWithPuts(NamedTuple):
    """An :class:`Entry` with ``puts``, the address of the table of what puts to each rank take (:mod:`.network`)."""

    own: tl.tensor
    peers: tl.tensor
    puts: tl.tensor
    rank: tl.tensor
    header_size: tl.tensor
    header_call: tl.tensor


class Places(NamedTuple):
    """The places of this rank's tensors of a call in its blocks; 0 for memory that the other ranks do not map.

    A place holds the number of the block, plus one, at bit PLACE_AT, and the first byte within the block below it.
    """

    x: tl.tensor
    out: tl.tensor


class Blocks(NamedTuple):
    """The blocks of tensors of all ranks.

    ``rows`` is the offset, in quads of a region, at which the places of a call are told. ``addresses`` is the table of
    where this rank has the blocks.
    """

    rows: tl.tensor
    addresses: tl.tensor


class Call(NamedTuple):
    """One call as a program sees it.

    The first fields are those of its :class:`Entry`, with ``own`` and ``peers`` as pointers. ``epoch`` is the number of
    the call, ``generation`` says which slots it uses, and ``dirty`` how many quads the previous call with slots used.
    ``live`` is 1 until the call is stopped. ``started`` is the time of the first check of the deadline, or 0 before
    that.
    """

    own: tl.tensor
    peers: tl.tensor
    rank: tl.tensor
    header_size: tl.tensor
    header_call: tl.tensor
    epoch: tl.tensor
    generation: tl.tensor
    dirty: tl.tensor
    live: tl.tensor
    started: tl.tensor


@triton.jit
def with_status(call, live, started):
    """Return the call with new values of ``live`` and ``started``."""
    return Call(
        call.own,
        call.peers,
        call.rank,
        call.header_size,
        call.header_call,
        call.epoch,
        call.generation,
        call.dirty,
        live,
        started,
    )


@triton.jit
def words_at(address, quads):
    """Return a pointer to 32-bit words, ``quads`` quads past an address that is a multiple of 16."""
    base = tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(tl.int32)), 16)
    return base + quads * 4


@triton.jit
def copy_to_read(own):
    """Return a pointer to this program's copy of the words that every program of a call reads first."""
    return own + EPOCH + (tl.program_id(0) % COPIES) * COPY_WORDS


@triton.jit
def read_abort_word(own, WARPS: tl.constexpr):
    """Load the abort word so that all threads of the program get the same value."""
    word = copy_to_read(own) + ABORT_WORD
    if WARPS == 1:
        fault = tl.load(word, volatile=True)
    else:
        fault = tl.atomic_add(word, 0, sem="relaxed", scope="sys")
    return fault


@triton.jit
def any_abort_word(own):
    """Load all copies of the abort word: 0, or a fault that has come to one of them. For programs of one warp."""
    copies = tl.arange(0, COPIES) * COPY_WORDS
    return tl.max(tl.load(own + EPOCH + copies + ABORT_WORD, volatile=True), axis=0)  # no fault is negative


@triton.jit
def write_abort_words(region, fault, mask):
    """Store the fault in all copies of the abort word of the region at the address ``region``."""
    copies = tl.arange(0, COPIES) * COPY_WORDS
    tl.store(region.to(tl.pointer_type(tl.int64)) + EPOCH + copies + ABORT_WORD, fault, mask=mask)


@triton.jit
def enter(entry, WARPS: tl.constexpr, PDL: tl.constexpr):
    """Open the call of an :class:`Entry`: read its epoch and generation. ``live`` is 0 if the communicator was stopped
    before.

    Call it once in every program, before any other use of the region. All stores of the prior kernel on this rank are
    visible from here on. With PDL, the call first waits for the prior kernel; pass it as false if the program has
    already called ``await_prior_kernel``.

    The load of the epoch is volatile, because a line of the L1 cache may hold the value from before the prior kernel.
    """
    await_prior_kernel(PDL)
    own = tl.multiple_of(entry.own.to(tl.int64).to(tl.pointer_type(tl.int64)), 16)
    peers = tl.multiple_of(entry.peers.to(tl.int64).to(tl.pointer_type(tl.int64)), 16)
    epoch, word = load_pair(copy_to_read(own))
    live = (read_abort_word(own, WARPS) == 0).to(tl.int32)
    generation = (word & 3).to(tl.int32)
    dirty = (word >> 2).to(tl.int32)
    return Call(own, peers, entry.rank, entry.header_size, entry.header_call, epoch, generation, dirty, live, epoch * 0)


@triton.jit
def host_words(own):
    """Return a pointer to the host's words."""
    return tl.load(own + STATUS).to(tl.pointer_type(tl.int64))


@triton.jit
def report_fault(own, fault):
    """Store the fault in the host's copy of the abort word; another one that came to copy 0 goes before it."""
    first = tl.load(own + EPOCH + ABORT_WORD, volatile=True)
    tl.store(host_words(own) + HOST_FAULT, tl.where(first != 0, first, fault))


@triton.jit
def report_fault_if_stopped(call):
    """Report the fault to the host if the call is stopped.

    The branch also makes every thread wait until it has loaded the abort word and the epoch.
    """
    if (call.live == 0) | (call.epoch < 0):  # no epoch is negative
        report_fault(call.own, tl.load(copy_to_read(call.own) + ABORT_WORD))


@triton.jit
def advance_epoch(call, extent, SLOTS: tl.constexpr):
    """Write the epoch of the next kernel. Only one program calls it, after all others have counted themselves."""
    copies = call.own + EPOCH + tl.arange(0, COPIES) * COPY_WORDS
    tl.store(copies + READERS_WORD, call.epoch * 0)
    if SLOTS:
        generation = ((call.generation + 1) % GENERATIONS).to(tl.int64)
        tl.store(copies + GENERATION_WORD, (extent.to(tl.int64) << 2) | generation)
    tl.store(copies, call.epoch + 1)


@triton.jit
def still_reading(call, reading, threads, extent, SLOTS: tl.constexpr):
    """Advance the epoch if all other programs have now read it. Returns ``reading``, which is 1 until then.

    ``threads`` are those of the program (:func:`thread_ids`), so that all of its warps see the same sum.
    """
    if reading != 0:
        readers = call.own + EPOCH + READERS_WORD + (threads % COPIES) * COPY_WORDS
        counts = tl.load(readers, mask=threads < COPIES, other=0, volatile=True)
        if tl.sum(counts.to(tl.int32), axis=0) == tl.num_programs(0) - 1:
            advance_epoch(call, extent, SLOTS)
            reading = reading * 0
    return reading


@triton.jit
def leave_epoch(call, extent, SLOTS: tl.constexpr):
    """Count this program among those that have read the epoch, which program 0 (:func:`exchange_headers`) advances.

    Call it exactly once in every other program, also in a stopped call, after :func:`enter` and before the program
    waits for a peer; ``extent`` and SLOTS must be those of :func:`exchange_headers`. A program that does not call it
    stops the call, with a fault that names this rank, after twice the deadline.

    With SLOTS, the call uses ``extent`` quads of its generation, which the next call with slots clears, and the
    generation moves on. A call without slots leaves that as it is.

    Every thread has the epoch (because of the branch) and the generation (because one load brings both) before it
    passes the barrier that precedes the count. So the stores of program 0 follow the loads of all readers.
    """
    report_fault_if_stopped(call)
    tl.debug_barrier()
    tl.atomic_add(copy_to_read(call.own) + READERS_WORD, 1, sem="relaxed", scope="gpu")
    if SERIAL:  # program 0 cannot wait for programs that run after it, so it counts itself, and the last one advances
        counts = tl.load(call.own + EPOCH + READERS_WORD + tl.arange(0, COPIES) * COPY_WORDS, volatile=True)
        if tl.sum(counts, axis=0) == tl.num_programs(0):
            advance_epoch(call, extent, SLOTS)


@triton.jit
def previous_generation(call):
    """Return the generation that the previous call with slots used."""
    return (call.generation + 2) % GENERATIONS


@triton.jit
def slots_offset(generation, slots_at, slots_quads):
    """Return the offset, in quads, of the slots of a generation in a region."""
    return slots_at + generation * slots_quads


@triton.jit
def cells_offset(epoch, cells_at, cells_quads):
    """Return the offset, in quads, of the flag cells that ``epoch`` uses in a region."""
    return cells_at + (epoch % 2).to(tl.int32) * cells_quads


@triton.jit
def clear_previous(call, slots_at, slots_quads, worker, workers, BLOCK: tl.constexpr):
    """Restore the sentinels in the slots of the previous call, unless this call is stopped.

    All programs except program 0 call it, at any time in the call; they share the work evenly as ``worker`` of
    ``workers``. Nothing needs to wait for the stores.
    """
    base = words_at(call.own.to(tl.int64), slots_offset(previous_generation(call), slots_at, slots_quads))
    offs = tl.arange(0, BLOCK)
    clean = tl.full([BLOCK], SENTINEL, tl.int32)
    dirty = call.dirty * call.live * 4
    for start in range(worker * BLOCK, dirty, workers * BLOCK):
        tl.store(base + start + offs, clean, mask=start + offs < dirty)


@triton.jit
def clear_parts(call, quads, stride, offs, masks, COUNT: tl.constexpr):
    """Restore the sentinels in the slots that :func:`await_words`, called with the same arguments, has read.

    This is for kernels with CLEAR_AFTER_READ, which record an extent of 0: large slots are better cleared while their
    lines are in the cache than in a separate pass, during which the links would be idle.
    """
    clean = tl.full([offs.shape[0]], SENTINEL, tl.int32)
    for r in tl.static_range(COUNT):
        tl.store(words_at(call.own.to(tl.int64), quads + r * stride) + offs, clean, mask=masks[r])


@triton.jit
def escape_sentinel(words):
    """Make words safe to send through slots: the sentinel, which is a NaN, becomes another NaN."""
    return tl.where(words == SENTINEL, SENTINEL_ESCAPE, words)


@triton.jit
def rotated_peer(rank, rotation, i, WORLD: tl.constexpr, SKIP_SELF: tl.constexpr = True):
    """Return the i-th rank that a program sends to: every rank but this one, or with SKIP_SELF false every rank.

    Programs with different ``rotation`` begin with different ranks, which keeps all links busy.
    """
    return (rank + 1 + (rotation + i) % (WORLD - SKIP_SELF)) % WORLD


@triton.jit
def region_address(peers, rank):
    """Load the address of a rank's region from the table ``peers``.

    The table never changes, so it may be read before the prior kernel has ended.
    """
    return tl.load(peers.to(tl.int64).to(tl.pointer_type(tl.int64)) + rank)


@triton.jit
def peer_addresses(peers, rank, rotation, WORLD: tl.constexpr, SKIP_SELF: tl.constexpr = True):
    """Load the addresses of the regions of the peers, in the order of :func:`rotated_peer`."""
    addresses = ()
    for i in tl.static_range(WORLD - SKIP_SELF):
        addresses = addresses + (region_address(peers, rotated_peer(rank, rotation, i, WORLD, SKIP_SELF)),)
    return addresses


@triton.jit
def store_to(call, address, quads, offs, words, mask, CELLS: tl.constexpr):
    """Push words to ``quads`` quads past the start of the region at ``address``.

    ``offs`` and ``mask`` select the words. With CELLS, they go as flag cells of this epoch. Without CELLS, no word may
    be the sentinel (:func:`escape_sentinel`), and the target must be slots of this call's generation. Nothing is stored
    if the call is stopped. The peer may see the words at any later time and in any order (:func:`await_words`).
    """
    if CELLS:
        base = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16) + quads * 2
        cells = (words.to(tl.int64) & 0xFFFFFFFF) | (call.epoch << 32)
        tl.store(base + offs, cells, mask=mask & (call.live != 0))
    else:
        tl.store(words_at(address, quads) + offs, words, mask=mask & (call.live != 0))


@triton.jit
def multicast_address(call, quads):
    """Return the multicast address of ``quads`` quads past the start of every rank's region."""
    return tl.load(call.peers + MAX_WORLD) + quads.to(tl.int64) * 16


@triton.jit
def store_to_all(
    call, addresses, quads, offs, words, mask, CELLS: tl.constexpr, MULTICAST: tl.constexpr, COUNT: tl.constexpr
):
    """Push words to the same offset in the COUNT regions at ``addresses``, under the terms of :func:`store_to`.

    With MULTICAST this is one store, which the switch repeats for all ranks, this one included. ``mask`` must then
    select whole quads, and CELLS must be false.
    """
    if MULTICAST:
        multicast_words(multicast_address(call, quads), offs, words, mask & (call.live != 0))
    else:
        for i in tl.static_range(COUNT):
            store_to(call, addresses[i], quads, offs, words, mask, CELLS)


@triton.jit
def arrival_masks(call, offs, span, step, total, COUNT: tl.constexpr, SKIP_SELF: tl.constexpr = False):
    """Return the masks of the words that arrive in COUNT tiles.

    In tile r these are the words up to ``min(span, total - r * step)``. With SKIP_SELF, there are none in the tile of
    this rank, which then sends nothing to itself.
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
    """Load COUNT tiles of this rank's region, ``stride`` quads apart. All loads are issued before any is used.

    Words outside ``masks`` read as arrived.
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
    """Return which words of a tile have not arrived."""
    if CELLS:
        hit = (part >> 32).to(tl.int32) != epoch.to(tl.int32)
    else:
        hit = part == SENTINEL
    return hit


@triton.jit
def any_missing(parts, epoch, CELLS: tl.constexpr, COUNT: tl.constexpr):
    """Return 1 while a word of any tile has not arrived, else 0.

    The sentinel is the largest word, so the maximum of many words shows whether one of them is the sentinel. That takes
    a fifth of the instructions that separate comparisons would.
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
    """Wait until all words of COUNT tiles (see :func:`load_parts`) have arrived. Returns (tiles, call).

    Tile r holds the words of rank ``(first + r) % WORLD``, as that rank pushed them in this call; this does not make
    anything else that the peer has stored visible. ``masks`` must select only words that a peer pushes in this call
    (:func:`arrival_masks`).

    Use the returned ``call`` from here on: if the call was stopped, the wait ends at once, ``live`` is 0 and the tiles
    are not valid. For EXTENDED_DEADLINE see :func:`check_deadline`.
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
                missing = missing_words(parts[r], call.epoch, CELLS)
                late_ranks = late_ranks | (tl.max(missing.to(tl.int32), axis=0) << ((first + r) % WORLD))
            started, live = check_deadline(call, started, late_ranks, True, WORLD, EXTENDED_DEADLINE)
            waiting = waiting & live
    call = with_status(call, live, started)
    words = ()
    for r in tl.static_range(COUNT):
        words = words + (parts[r].to(tl.int32),)
    return words, call


@triton.jit
def check_deadline(
    call,
    started,
    late_ranks,
    BY_HEADERS: tl.constexpr,
    WORLD: tl.constexpr,
    EXTENDED_DEADLINE: tl.constexpr = False,
    TELLS: tl.constexpr = False,
):
    """Check for a waiting program: has a peer stopped the call, or has the deadline passed? Returns (started, live).

    The deadline counts from the program's first check, over all waits of the call. When it passes, this rank stops the
    call on every rank. The fault names the ranks whose header is missing. If all headers came, or without BY_HEADERS,
    it names the ranks in the bit mask ``late_ranks``, whose data is missing. A rank whose process has ended is named at
    once. With TELLS, a program that has waited for WAIT_NOTICE_NS tells the host, at every check, which ranks it would
    name. Programs that hold tiles leave that to those that do not.

    Only long waits load the host's marks of ended processes, since a load from there holds up the peers of many
    programs. Warps could read different marks, so each program adds what it reads to a word of the region with one
    atomic, and reads that word with another.

    With EXTENDED_DEADLINE the program waits a quarter longer, for data that peers compute from the data of other ranks:
    a peer that lacks such data expires first, and names the rank that did not send it.
    """
    tl.atomic_max(call.own + CLOCK, now_ns(), sem="relaxed", scope="gpu")
    now = tl.atomic_max(call.own + CLOCK, call.epoch * 0, sem="relaxed", scope="gpu")
    timeout = tl.atomic_add(call.own + TIMEOUT, 0, sem="relaxed", scope="sys")
    if EXTENDED_DEADLINE:
        timeout += timeout // 4
    fault = tl.atomic_add(copy_to_read(call.own) + ABORT_WORD, 0, sem="relaxed", scope="sys")
    live = (fault == 0).to(tl.int32)
    if started == 0:
        started = now
    host = host_words(call.own)
    gone = live * 0
    if now - started > HOST_LOOK_NS:
        marks = tl.load(host + HOST_GONE, volatile=True)
        tl.atomic_or(call.own + GONE, marks, sem="relaxed", scope="gpu")
        gone = tl.atomic_or(call.own + GONE, marks * 0, sem="relaxed", scope="gpu").to(tl.int32)
    expired = now - started > timeout
    tells = expired & False
    if TELLS:
        tells = now - started > WAIT_NOTICE_NS
    if fault != 0:
        report_fault(call.own, fault)
    elif expired | tells | (gone != 0):
        named = late_ranks
        dead = gone & late_ranks
        if BY_HEADERS:
            lanes = tl.arange(0, MAX_WORLD if WORLD <= MAX_WORLD else MOST_RANKS)
            cells = call.own + header_row(call, WORLD) + lanes * HEADER_WORDS
            late = (lanes < 0) & True
            for word in tl.static_range(HEADER_WORDS):
                found = tl.load(cells + word, mask=lanes < WORLD, other=0, volatile=True)
                late = late | ((found >> 48) & 0xFFFF != call.epoch & 0xFFFF) | (found == 0)
            late = late & (lanes < WORLD) & (lanes != call.rank)
            missing_headers = tl.sum(late.to(tl.int32) << lanes, axis=0)
            named = tl.where(missing_headers == 0, late_ranks, missing_headers)
            dead = dead | (gone & missing_headers)  # the same in all warps, as the dead send nothing
        if dead != 0:
            stop(call, FAULT_DEAD, dead, WORLD)
            live = live * 0
        elif expired:
            stop(call, FAULT_TIMEOUT, named, WORLD)
            live = live * 0
        elif tells:
            tl.store(host + HOST_WAIT, fault_word(call, FAULT_TIMEOUT, named))
    return started, live


@triton.jit
def check_readers(call, started, WORLD: tl.constexpr):
    """Check for program 0 whether twice the deadline has passed. Returns (started, whether it waits on for readers).

    All programs of a grid count themselves, if need be when the deadline ends the calls of those before them. If one
    does not, its kernel is wrong, and this rank stops the call.
    """
    tl.atomic_max(call.own + CLOCK, now_ns(), sem="relaxed", scope="gpu")
    now = tl.atomic_max(call.own + CLOCK, call.epoch * 0, sem="relaxed", scope="gpu")
    timeout = tl.atomic_add(call.own + TIMEOUT, 0, sem="relaxed", scope="sys")
    if started == 0:
        started = now
    on = (now - started <= 2 * timeout).to(tl.int32)
    if on == 0:
        stop(call, FAULT_TIMEOUT, (call.rank * 0 + 1) << call.rank, WORLD)
    return started, on


@triton.jit
def fault_word(call, kind, ranks):
    """Return a fault of the call in the form of the abort word (:class:`shotcast.wire.Fault`)."""
    op = (call.header_call >> OP_AT) & 63
    fault = (call.epoch & 0xFFFFFFFF) | (ranks.to(tl.int64) << FAULT_MASK_AT)  # up to 16 ranks: block 0
    return fault | (op << FAULT_OP_AT) | (op * 0 + kind << FAULT_KIND_AT)


@triton.jit
def stop(call, kind, ranks, WORLD: tl.constexpr):
    """Stop the call on every rank: set the abort word in every region, and the copy on this host."""
    fault = fault_word(call, kind, ranks)
    for r in range(WORLD):
        region = region_address(call.peers, r)
        write_abort_words(region, fault, region != 0)
    report_fault(call.own, fault)


@triton.jit
def header_row(call, WORLD: tl.constexpr):
    """Return the offset, in words, of the header cells of this epoch in a region, which begin with rank 0's."""
    if WORLD <= MAX_WORLD:
        row = HEADERS + (call.epoch % 2) * (MAX_WORLD * HEADER_WORDS)
    else:
        row = WIDE_HEADERS + (call.epoch % 2) * (MOST_RANKS * HEADER_WORDS)
    return row


@triton.jit
def header_word(call, number):
    """Return the ``number``-th word of the header as it lies in memory, below 16 bits of the epoch."""
    return ((call.epoch & 0xFFFF) << 48) | tl.where(number == 0, call.header_size, call.header_call)


@triton.jit
def ranks_of_cells(mask, RANKS: tl.constexpr):
    """Return the bit mask of the ranks that have a cell in ``mask``, a bit mask of header cells."""
    ranks = mask * 0
    for r in tl.static_range(RANKS):
        ranks = ranks | (((mask >> (r * HEADER_WORDS)) & (2**HEADER_WORDS - 1)) != 0).to(tl.int32) << r
    return ranks


@triton.jit
def thread_ids(WARPS: tl.constexpr):
    """Return the numbers of the program's threads.

    A reduction over these passes through all warps, so all of them see the same result; over a shorter range, each warp
    reduces by itself, and the warps could diverge at a branch on it.
    """
    return tl.arange(0, 32 * WARPS)


@triton.jit
def raise_flags(call, quads, WORLD: tl.constexpr, WARPS: tl.constexpr):
    """Tell all ranks that what this program has stored in its own region so far may be read (a release).

    The flag of rank r is a 64-bit word at ``quads`` quads past the start of each region, plus r words. It is set to the
    epoch, which never repeats. Each program of the grid needs separate flags.
    """
    tl.debug_barrier()
    threads = thread_ids(WARPS)
    bases = tl.load(call.peers + threads % MAX_WORLD, mask=threads < WORLD, other=0)
    flags = bases.to(tl.pointer_type(tl.int64)) + quads * 2 + call.rank
    store_release(flags, call.epoch + threads * 0, (threads < WORLD) & (call.live != 0))


@triton.jit
def await_flags(call, quads, WORLD: tl.constexpr, WARPS: tl.constexpr):
    """Wait until every rank has raised its flag of this epoch (an acquire).

    Afterwards all threads may read what each rank stored before :func:`raise_flags`, through any address. If the call
    is stopped, it returns with ``live`` 0. A rank's next flag overwrites this one, so a program may wait only if no
    rank can end the call without it.
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
    return with_status(call, live, started)


@triton.jit
def raise_progress(call, quads, steps, WORLD: tl.constexpr, WARPS: tl.constexpr):
    """Tell all ranks that this program has done ``steps`` steps of the call (a release).

    Whoever sees it may read what the program has stored there in these steps, and may overwrite what the program has
    read in them. The word of rank r is at ``quads`` quads past the start of each region, plus r words; each program of
    the grid needs separate words. One warp waits for the stores of the program to arrive, while the others go on.
    """
    tl.debug_barrier()
    threads = thread_ids(WARPS)
    bases = tl.load(call.peers + threads % MAX_WORLD, mask=threads < WORLD, other=0)
    words = bases.to(tl.pointer_type(tl.int64)) + quads * 2 + call.rank
    store_release(words, (call.epoch << PROGRESS_STEP_BITS) + steps + threads * 0, (threads < WORLD) & (call.live != 0))


@triton.jit
def await_progress(call, quads, steps, WORLD: tl.constexpr, WARPS: tl.constexpr):
    """Wait until this program's namesake on every rank has done ``steps`` steps of this call (an acquire).

    A rank that has begun a later call has done all of them. If the call is stopped, it returns with ``live`` 0. Each
    thread has seen the word of one rank; the barrier combines what they know.
    """
    threads = thread_ids(WARPS)
    ranks = threads < WORLD
    wanted = (call.epoch << PROGRESS_STEP_BITS) + steps
    found = load_acquire(call.own + quads * 2 + threads % MAX_WORLD, ranks)
    late = ranks & (found - wanted < 0)  # the difference, as the epoch eventually passes the highest bit
    waiting = tl.max(late.to(tl.int32), axis=0) & call.live
    started = call.started
    live = call.live
    polls = 0
    while waiting != 0:
        yield_core()
        found = load_acquire(call.own + quads * 2 + threads % MAX_WORLD, ranks)
        late = ranks & (found - wanted < 0)
        waiting = tl.max(late.to(tl.int32), axis=0)
        polls += 1
        if polls % POLLS_PER_CHECK == 0:
            late_ranks = tl.sum(late.to(tl.int32) << (threads % MAX_WORLD), axis=0)
            started, live = check_deadline(call, started, late_ranks, True, WORLD)
            waiting = waiting & live
    tl.debug_barrier()
    return with_status(call, live, started)


@triton.jit
def tell_places(call, quads, places, WORLD: tl.constexpr, WARPS: tl.constexpr):
    """Tell all ranks the :class:`Places` of this rank's tensors.

    :func:`raise_progress` must follow. Whoever has seen that progress reads the words at ``quads`` quads past the start
    of its region. Each row serves every other call of a program.
    """
    threads = thread_ids(WARPS)
    ranks = threads // 2
    bases = tl.load(call.peers + ranks % MAX_WORLD, mask=ranks < WORLD, other=0)
    words = bases.to(tl.pointer_type(tl.int64)) + quads * 2 + call.rank * 2 + threads % 2
    tl.store(words, tl.where(threads % 2 == 0, places.x, places.out), mask=(ranks < WORLD) & (call.live != 0))


@triton.jit
def place_of(call, quads, rank, OUT: tl.constexpr):
    """Return the place of a rank's ``x``, or with OUT of its ``out``, as told by :func:`tell_places`."""
    return tl.load(call.own + quads * 2 + rank * 2 + (1 if OUT else 0), volatile=True)


@triton.jit
def tensor_at(call, blocks, quads, rank, OUT: tl.constexpr):
    """Return the address of a rank's tensor whose place is not 0; ``blocks`` has the addresses of all blocks."""
    place = place_of(call, quads, rank, OUT)
    table = blocks.to(tl.int64).to(tl.pointer_type(tl.int64))
    base = tl.load(table + rank * BLOCKS + ((place >> PLACE_AT) - 1).to(tl.int32))
    return base + (place & PLACE_MASK)


@triton.jit
def await_progress_by_warp(call, quads, steps, WORLD: tl.constexpr):
    """Wait as :func:`await_progress` does, each warp for itself. Returns (call, late ranks), which differ by warp.

    A warp gives up if the deadline has passed, a rank has ended, or the call was stopped: its ``live`` is then 0.
    :func:`join_warps` must follow.
    """
    lanes = tl.arange(0, 32)  # of a warp: each warp does the reductions here for itself
    ranks = lanes < WORLD
    wanted = (call.epoch << PROGRESS_STEP_BITS) + steps
    found = load_acquire(call.own + quads * 2 + lanes % MAX_WORLD, ranks)
    late = ranks & (found - wanted < 0)
    waiting = tl.max(late.to(tl.int32), axis=0) & call.live
    started = call.started
    live = call.live
    late_ranks = call.rank * 0
    polls = 0
    while waiting != 0:
        yield_core()
        found = load_acquire(call.own + quads * 2 + lanes % MAX_WORLD, ranks)
        late = ranks & (found - wanted < 0)
        waiting = tl.max(late.to(tl.int32), axis=0)
        polls += 1
        if polls % POLLS_PER_CHECK == 0:
            same = lanes.to(tl.int64) * 0
            now = tl.max(same + now_ns(), axis=0)
            started = tl.where(started == 0, now, started)
            late_ranks = tl.sum(late.to(tl.int32) << (lanes % MAX_WORLD), axis=0)
            timeout = tl.max(tl.load(call.own + TIMEOUT + same, volatile=True), axis=0)
            fault = tl.load(copy_to_read(call.own) + ABORT_WORD + same, volatile=True)
            ends = tl.max((fault != 0).to(tl.int32), axis=0) | (now - started > timeout).to(tl.int32)
            if now - started > HOST_LOOK_NS:
                marks = tl.max(tl.load(host_words(call.own) + HOST_GONE + same, volatile=True), axis=0)
                ends = ends | ((marks.to(tl.int32) & late_ranks) != 0).to(tl.int32)
            live = tl.where(ends != 0, 0, live)
            waiting = waiting & live
    sync_warp()
    return with_status(call, live, started), late_ranks


@triton.jit
def join_warps(call, late_ranks, running, WORLD: tl.constexpr, WARPS: tl.constexpr):
    """Join the warps after :func:`await_progress_by_warp`: if one has given up, all do, and the fault is reported.

    ``running`` is the previous ``live`` of the call. Returns the call, the same in all warps.
    """
    threads = thread_ids(WARPS)
    live = tl.min(threads * 0 + call.live, axis=0)
    started = call.started
    if (live == 0) & (running != 0):
        most = threads.to(tl.int64) * 0 + 0x7FFFFFFFFFFFFFFF
        started = tl.min(tl.where(started == 0, most, threads.to(tl.int64) * 0 + started), axis=0)
        late = call.rank * 0
        for r in tl.static_range(WORLD):
            late = late | (tl.max(threads * 0 + ((late_ranks >> r) & 1), axis=0) << r)
        started, live = check_deadline(call, started, late, True, WORLD)
        live = live * 0
    return with_status(call, live, started)


@triton.jit
def put_header(call, puts, row, WORLD: tl.constexpr):
    """Put this rank's header to all ranks whose regions are not mapped.

    It is put from its place in this rank's row, which the call after the next overwrites. By then all ranks have it,
    as no call ends before that.
    """
    if call.live != 0:
        offset = (row + call.rank * HEADER_WORDS) * 8
        for r in tl.static_range(WORLD):
            if tl.load(call.peers + r) == 0:
                target = region_address(puts, 2 * r) + offset
                pe = region_address(puts, 2 * r + 1).to(tl.int32)
                source = call.own.to(tl.int64) + offset
                put_nbi_block(target, source, tl.full((), 8 * HEADER_WORDS, tl.int64), pe)


@triton.jit
def exchange_headers(
    call,
    extent,
    SLOTS: tl.constexpr,
    WORLD: tl.constexpr,
    WARPS: tl.constexpr,
    RELEASE_NEXT: tl.constexpr,
    puts=0,
    PUTS: tl.constexpr = False,
    GATE: tl.constexpr = False,
):
    """Send this rank's header to every rank, and wait until every rank has sent the same one.

    It is for program 0 of the grid. A header of this epoch that differs stops the call with a mismatch. Meanwhile it
    advances the epoch, once all other programs have called :func:`leave_epoch` with the same ``extent`` and SLOTS.

    Each word of a header has a separate thread, so one instruction sends both words, and another polls both. With
    RELEASE_NEXT, the next kernel may launch before the wait. With PUTS, ranks whose regions are not mapped get the
    header by puts, through the table ``puts`` (:mod:`.network`).

    With GATE, the kernel of the call follows this one: the epoch stays, and the next kernel may launch only after the
    wait. That kernel sends the same header again, and finds the headers of all ranks.
    """
    RANKS: tl.constexpr = MAX_WORLD if WORLD <= MAX_WORLD else MOST_RANKS
    threads = thread_ids(WARPS)
    lanes = threads % (RANKS * HEADER_WORDS)
    ranks = lanes // HEADER_WORDS
    words = lanes % HEADER_WORDS
    present = ranks < WORLD
    row = header_row(call, WORLD)
    mine = header_word(call, words)
    bases = tl.load(call.peers + ranks, mask=present, other=0)
    first = threads < RANKS * HEADER_WORDS
    once = present & first & (call.live != 0)
    if PUTS:
        once = once & (bases != 0)
    tl.store(bases.to(tl.pointer_type(tl.int64)) + row + call.rank * HEADER_WORDS + words, mine, mask=once)
    if PUTS:
        put_header(call, puts, row, WORLD)
    READS: tl.constexpr = not (GATE or SERIAL)
    reading = call.live * 0 + READS  # 1 until all other programs have read the epoch
    if not GATE and SERIAL:
        leave_epoch(call, extent, SLOTS)
    else:
        report_fault_if_stopped(call)
    if READS:
        tl.debug_barrier()
    if not GATE:
        release_next_kernel(RELEASE_NEXT)
    waiting = call.live
    started = call.started
    polls = 0
    while (waiting | reading) != 0:
        cells = tl.load(call.own + row + lanes, mask=present, other=0, volatile=True)
        if READS:
            reading = still_reading(call, reading, threads, extent, SLOTS)
        cells = tl.where(present, cells, mine)
        waiting = waiting & tl.max((cells != mine).to(tl.int32), axis=0)
        if waiting != 0:
            came = ((cells >> 48) & 0xFFFF == call.epoch & 0xFFFF) & (cells != 0)  # 0 means never written
            different = (cells != mine) & came & first
            differing_cells = tl.sum(different.to(tl.int32) << lanes, axis=0)
            polls += 1
            if differing_cells != 0:
                stop(call, FAULT_MISMATCH, ranks_of_cells(differing_cells, RANKS), WORLD)
                waiting = waiting * 0
            elif polls % POLLS_PER_CHECK == 0:
                started, live = check_deadline(call, started, call.rank * 0, True, WORLD, TELLS=True)
                waiting = waiting & live
            yield_core()
        elif READS:
            polls += 1
            if (reading != 0) & (polls % POLLS_PER_CHECK == 0):
                started, reading = check_readers(call, started, WORLD)
    if GATE:
        release_next_kernel(RELEASE_NEXT)
