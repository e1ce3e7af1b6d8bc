"""Send and receive between two ranks, whatever the others do.

Each pair of ranks has a mailbox at the receiver, in lanes; a program carries the chunks of its lane. A chunk travels
as flag cells numbered by lane, so data needs no fence. Two chunks a lane are under way: the sender waits for the
receiver's credit before it uses a place again. A message begins with the lane after the last one's, so 64 chunks are
under way however many messages they belong to. Each has a header, which the receiver compares with its own; of these 16
are under way. So a send completes when what is left of it lies in the mailbox.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import kernel, release_next_kernel, yield_core
from shotcast.device.triton.words import load_words, nan_unless, store_words
from shotcast.transport.triton import layout
from shotcast.transport.triton.sync import (
    FAULT_MISMATCH,
    POLLS_PER_CHECK,
    Call,
    check_deadline,
    enter,
    report_fault_if_stopped,
    stop,
    thread_ids,
)

SENT = tl.constexpr(layout.SENT)
RECEIVED = tl.constexpr(layout.RECEIVED)
CREDITS = tl.constexpr(layout.CREDITS)
MESSAGE_HEADERS = tl.constexpr(layout.MESSAGE_HEADERS)
RECEIVES_BEGUN = tl.constexpr(layout.RECEIVES_BEGUN)
PLACES = tl.constexpr(layout.MESSAGE_SLOTS)
MESSAGE_COUNTS = tl.constexpr(layout.MESSAGE_COUNTS)
MESSAGE_MISMATCH = tl.constexpr(layout.MESSAGE_MISMATCH)
MESSAGE_READERS = tl.constexpr(layout.MESSAGE_READERS)
LANES = tl.constexpr(layout.CHANNELS)
CHUNK = tl.constexpr(layout.CHUNK_WORDS)


@triton.jit
def with_state(call, live, started):
    return Call(call.own, call.peers, call.rank, call.header, call.epoch, call.generation, live, started)


@triton.jit
def tagged(call):
    """The header as it lies in memory, with the number of the message."""
    return ((call.epoch & 0xFFFF) << 48) | call.header


@triton.jit
def send_header(call, peer, theirs, WORLD: tl.constexpr, WARPS: tl.constexpr):
    """Put the header into ``theirs``, the peer's region, once it has begun the message whose place it takes."""
    call = await_count(call, RECEIVES_BEGUN + peer, call.epoch - PLACES + 1, peer, WORLD, WARPS)
    if call.live != 0:
        tl.store(theirs + MESSAGE_HEADERS + call.rank * PLACES + call.epoch % PLACES, tagged(call))


@triton.jit
def await_header(call, peer, theirs, WORLD: tl.constexpr, WARPS: tl.constexpr):
    """Wait for the peer's header, which must be as mine, and tell ``theirs``, its region, that I have begun."""
    cell = MESSAGE_HEADERS + peer * PLACES + call.epoch % PLACES
    mine = tagged(call)
    threads = thread_ids(WARPS)
    seen = tl.max(tl.load(call.own + cell + threads * 0, volatile=True), axis=0)
    waiting = (seen != mine).to(tl.int32) & call.live
    started = call.started
    live = call.live
    polls = 0
    while waiting != 0:
        yield_core()
        seen = tl.max(tl.load(call.own + cell + threads * 0, volatile=True), axis=0)
        waiting = (seen != mine).to(tl.int32)
        polls += 1
        if (waiting != 0) & (seen != 0) & ((seen >> 48) & 0xFFFF == call.epoch & 0xFFFF):
            tl.store(call.own + MESSAGE_MISMATCH, seen)
            tl.store(call.own + MESSAGE_MISMATCH + 1, mine)
            stop(call, FAULT_MISMATCH, (call.rank * 0 + 1) << peer, WORLD)
            waiting = waiting * 0
        elif polls % POLLS_PER_CHECK == 0:
            started, live = check_deadline(call, started, (call.rank * 0 + 1) << peer, False, WORLD)
            waiting = waiting & live
    if (seen == mine) & (call.live != 0):
        tl.store(theirs + RECEIVES_BEGUN + call.rank, call.epoch + 1)


@triton.jit
def await_count(call, cell, needed, peer, WORLD: tl.constexpr, WARPS: tl.constexpr):
    """Wait until the peer has counted up to ``needed`` in ``cell``."""
    threads = thread_ids(WARPS)
    taken = tl.max(tl.load(call.own + cell + threads * 0, volatile=True), axis=0)
    waiting = (taken < needed).to(tl.int32) & call.live
    started = call.started
    live = call.live
    polls = 0
    while waiting != 0:
        yield_core()
        taken = tl.max(tl.load(call.own + cell + threads * 0, volatile=True), axis=0)
        waiting = (taken < needed).to(tl.int32)
        polls += 1
        if polls % POLLS_PER_CHECK == 0:
            started, live = check_deadline(call, started, (call.rank * 0 + 1) << peer, False, WORLD)
            waiting = waiting & live
    return with_state(call, live, started)


@triton.jit
def await_chunk(call, box, offs, mask, flag, peer, WORLD: tl.constexpr):
    """Wait for the cells of one chunk; returns (words, call)."""
    cells = tl.load(box + offs, mask=mask, other=0, volatile=True)
    waiting = tl.max((((cells >> 32).to(tl.int32) != flag) & mask).to(tl.int32), axis=0) & call.live
    started = call.started
    live = call.live
    polls = 0
    while waiting != 0:
        yield_core()
        cells = tl.load(box + offs, mask=mask, other=0, volatile=True)
        waiting = tl.max((((cells >> 32).to(tl.int32) != flag) & mask).to(tl.int32), axis=0)
        polls += 1
        if polls % POLLS_PER_CHECK == 0:
            started, live = check_deadline(call, started, (call.rank * 0 + 1) << peer, False, WORLD)
            waiting = waiting & live
    return cells.to(tl.int32), with_state(call, live, started)


@kernel
def send_recv(
    data,
    own,
    peers,
    rank,
    header,
    peer,
    nbytes,
    mailboxes_at,
    SENDING: tl.constexpr,
    DTYPE: tl.constexpr,
    UNIT: tl.constexpr,
    WORLD: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Send ``data`` to ``peer``, or receive it. One program a lane, and program 0 for the headers."""
    call = enter(own, peers, rank, header, WARPS, PDL)
    side: tl.constexpr = 0 if SENDING else 1
    counter = call.own + MESSAGE_COUNTS + peer * 4 + side * 2
    message = tl.load(counter, volatile=True)
    begin = tl.load(counter + 1, volatile=True)
    span = (nbytes + 15) // 16 * 4
    call = Call(call.own, call.peers, call.rank, call.header, message, call.generation, call.live, call.started)
    theirs = tl.multiple_of(tl.load(call.peers + peer).to(tl.pointer_type(tl.int64)), 16)
    if tl.program_id(0) == 0:
        if SENDING:
            send_header(call, peer, theirs, WORLD, WARPS)
        else:
            await_header(call, peer, theirs, WORLD, WARPS)
    else:
        first = tl.program_id(0) - 1
        lanes = tl.num_programs(0) - 1
        lane = (first + (begin % LANES).to(tl.int32)) % LANES
        if SENDING:
            progress = call.own + SENT + peer * LANES + lane
            box_of = theirs + mailboxes_at * 2 + (rank * LANES + lane) * (2 * CHUNK)
        else:
            progress = call.own + RECEIVED + peer * LANES + lane
            box_of = call.own + mailboxes_at * 2 + (peer * LANES + lane) * (2 * CHUNK)
        count = tl.load(progress, volatile=True)
        for start in range(first * CHUNK, span, lanes * CHUNK):
            offs = tl.arange(0, CHUNK)
            box = box_of + (count % 2) * CHUNK
            mask = start + offs < span
            flag = (count + 1).to(tl.int32)
            if SENDING:
                call = await_count(call, CREDITS + peer * LANES + lane, count - 1, peer, WORLD, WARPS)
                words = load_words(data, 0, start + offs, nbytes, UNIT)
                cells = (words.to(tl.int64) & 0xFFFFFFFF) | ((count + 1) << 32)
                tl.store(box + offs, cells, mask=mask & (call.live != 0))
            else:
                words, call = await_chunk(call, box, offs, mask, flag, peer, WORLD)
                store_words(data, 0, start + offs, nan_unless(call.live, words, DTYPE), nbytes, UNIT)
                tl.debug_barrier()  # every thread has its cells before the sender may overwrite them
                if call.live != 0:
                    tl.store(theirs + CREDITS + rank * LANES + lane, count + 1)
            count += 1
        tl.debug_barrier()
        tl.store(progress, count)
    tl.debug_barrier()
    report_fault_if_stopped(call)
    readers = tl.atomic_add(call.own + MESSAGE_READERS, 1, sem="relaxed", scope="gpu")
    if readers == tl.num_programs(0) - 1:
        tl.store(call.own + MESSAGE_READERS, readers * 0)
        tl.store(counter, message + 1)
        tl.store(counter + 1, begin + (span + CHUNK - 1) // CHUNK)
    release_next_kernel(PDL)
