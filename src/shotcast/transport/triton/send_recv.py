"""Send and receive between two ranks, independent of what the other ranks do.

Each ordered pair of ranks has a mailbox at the receiver, divided into channels; one program carries the chunks of a
channel. A chunk travels as flag cells with the chunk's number in its channel. A message begins with the channel after
the last one of the previous message. ``docs/reference/protocols.md`` ("Send and receive") has the protocol.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import kernel, release_next_kernel, yield_core
from shotcast.device.triton.words import load_words, nan_unless, store_words
from shotcast.transport.triton import layout, sync
from shotcast.transport.triton.binding import CallShape, KernelContext, KernelLaunch
from shotcast.transport.triton.sync import FAULT_MISMATCH, POLLS_PER_CHECK, Call, Entry
from shotcast.wire import CallPlan, Op

SENT = tl.constexpr(layout.SENT)
RECEIVED = tl.constexpr(layout.RECEIVED)
CREDITS = tl.constexpr(layout.CREDITS)
MESSAGE_HEADERS = tl.constexpr(layout.MESSAGE_HEADERS)
RECEIVES_BEGUN = tl.constexpr(layout.RECEIVES_BEGUN)
MESSAGE_SLOTS = tl.constexpr(layout.MESSAGE_SLOTS)
HEADER_WORDS = tl.constexpr(layout.HEADER_WORDS)
MESSAGE_COUNTS = tl.constexpr(layout.MESSAGE_COUNTS)
MESSAGE_MISMATCH = tl.constexpr(layout.MESSAGE_MISMATCH)
MESSAGE_READERS = tl.constexpr(layout.MESSAGE_READERS)
CHANNELS = tl.constexpr(layout.CHANNELS)
CHUNK_WORDS = tl.constexpr(layout.CHUNK_WORDS)


@triton.jit
def send_header(call, peer, peer_region, WORLD: tl.constexpr, WARPS: tl.constexpr):
    """Store the header in ``peer_region``, the region of the receiver.

    It reuses the slot of an earlier message, so it first waits until the receiver has begun that one.
    """
    call = await_count(call, RECEIVES_BEGUN + peer, call.epoch - MESSAGE_SLOTS + 1, peer, WORLD, WARPS)
    if call.live != 0:
        words = tl.arange(0, HEADER_WORDS)
        cells = MESSAGE_HEADERS + (call.rank * MESSAGE_SLOTS + call.epoch % MESSAGE_SLOTS) * HEADER_WORDS
        tl.store(peer_region + cells + words, sync.header_word(call, words))


@triton.jit
def await_header(call, peer, peer_region, WORLD: tl.constexpr, WARPS: tl.constexpr):
    """Wait for the sender's header, which must equal this rank's.

    Then tell the sender, whose region is ``peer_region``, that this rank has begun to receive the message.
    """
    words = sync.thread_ids(WARPS) % HEADER_WORDS
    cells = call.own + MESSAGE_HEADERS + (peer * MESSAGE_SLOTS + call.epoch % MESSAGE_SLOTS) * HEADER_WORDS + words
    own_header = sync.header_word(call, words)
    received_header = tl.load(cells, volatile=True)
    waiting = tl.max((received_header != own_header).to(tl.int32), axis=0) & call.live
    started = call.started
    live = call.live
    polls = 0
    while waiting != 0:
        yield_core()
        received_header = tl.load(cells, volatile=True)
        waiting = tl.max((received_header != own_header).to(tl.int32), axis=0)
        came = (received_header != 0) & ((received_header >> 48) & 0xFFFF == call.epoch & 0xFFFF)
        polls += 1
        if (waiting != 0) & (tl.min(came.to(tl.int32), axis=0) != 0):
            tl.store(call.own + MESSAGE_MISMATCH + words, received_header)
            tl.store(call.own + MESSAGE_MISMATCH + HEADER_WORDS + words, own_header)
            sync.stop(call, FAULT_MISMATCH, (call.rank * 0 + 1) << peer, WORLD)
            waiting = waiting * 0
        elif polls % POLLS_PER_CHECK == 0:
            started, live = sync.check_deadline(call, started, (call.rank * 0 + 1) << peer, False, WORLD, TELLS=True)
            waiting = waiting & live
    if (waiting == 0) & (live != 0) & (call.live != 0):
        tl.store(peer_region + RECEIVES_BEGUN + call.rank, call.epoch + 1)


@triton.jit
def await_count(call, cell, needed, peer, WORLD: tl.constexpr, WARPS: tl.constexpr):
    """Wait until the peer's count in ``cell`` reaches ``needed``."""
    threads = sync.thread_ids(WARPS)
    counted = tl.max(tl.load(call.own + cell + threads * 0, volatile=True), axis=0)
    waiting = (counted < needed).to(tl.int32) & call.live
    started = call.started
    live = call.live
    polls = 0
    while waiting != 0:
        yield_core()
        counted = tl.max(tl.load(call.own + cell + threads * 0, volatile=True), axis=0)
        waiting = (counted < needed).to(tl.int32)
        polls += 1
        if polls % POLLS_PER_CHECK == 0:
            started, live = sync.check_deadline(call, started, (call.rank * 0 + 1) << peer, False, WORLD, TELLS=True)
            waiting = waiting & live
    return sync.with_status(call, live, started)


@triton.jit
def await_chunk(call, slot, offs, mask, flag, peer, WORLD: tl.constexpr):
    """Wait for the cells of one chunk. Returns (words, call)."""
    cells = tl.load(slot + offs, mask=mask, other=0, volatile=True)
    waiting = tl.max((((cells >> 32).to(tl.int32) != flag) & mask).to(tl.int32), axis=0) & call.live
    started = call.started
    live = call.live
    polls = 0
    while waiting != 0:
        yield_core()
        cells = tl.load(slot + offs, mask=mask, other=0, volatile=True)
        waiting = tl.max((((cells >> 32).to(tl.int32) != flag) & mask).to(tl.int32), axis=0)
        polls += 1
        if polls % POLLS_PER_CHECK == 0:
            started, live = sync.check_deadline(call, started, (call.rank * 0 + 1) << peer, False, WORLD)
            waiting = waiting & live
    return cells.to(tl.int32), sync.with_status(call, live, started)


@dataclass(frozen=True, slots=True)
class MessageShape(CallShape):
    """One side of a message."""

    SENDING: bool


@kernel(shape=MessageShape)
def send_recv(data, entry: Entry, peer, nbytes, mailboxes_at, SHAPE: tl.constexpr):
    """Send ``data`` to ``peer``, or receive it from ``peer``.

    Program 0 handles the header; every other program carries the chunks of one channel.
    """
    call = sync.enter(entry, SHAPE.WARPS, SHAPE.PDL)
    SIDE: tl.constexpr = 0 if SHAPE.SENDING else 1
    counter = call.own + MESSAGE_COUNTS + peer * 4 + SIDE * 2
    message_number = tl.load(counter, volatile=True)
    chunks_begun = tl.load(counter + 1, volatile=True)
    span = (nbytes.to(tl.int64) + 15) // 16 * 4  # words; there may be more than 2^31
    # the epoch of this call is the number of the message
    call = Call(
        call.own,
        call.peers,
        call.rank,
        call.header_size,
        call.header_call,
        message_number,
        call.generation,
        call.dirty,
        call.live,
        call.started,
    )
    peer_region = tl.multiple_of(tl.load(call.peers + peer).to(tl.pointer_type(tl.int64)), 16)
    if tl.program_id(0) == 0:
        if SHAPE.SENDING:
            send_header(call, peer, peer_region, SHAPE.WORLD, SHAPE.WARPS)
        else:
            await_header(call, peer, peer_region, SHAPE.WORLD, SHAPE.WARPS)
    else:
        worker = tl.program_id(0) - 1
        workers = tl.num_programs(0) - 1
        channel = (worker + (chunks_begun % CHANNELS).to(tl.int32)) % CHANNELS
        if SHAPE.SENDING:
            progress = call.own + SENT + peer * CHANNELS + channel
            mailbox = peer_region + mailboxes_at * 2 + (call.rank * CHANNELS + channel) * (2 * CHUNK_WORDS)
        else:
            progress = call.own + RECEIVED + peer * CHANNELS + channel
            mailbox = call.own + mailboxes_at * 2 + (peer * CHANNELS + channel) * (2 * CHUNK_WORDS)
        count = tl.load(progress, volatile=True)
        for start in range(worker * CHUNK_WORDS, span, workers * CHUNK_WORDS):
            offs = tl.arange(0, CHUNK_WORDS)
            slot = mailbox + (count % 2) * CHUNK_WORDS
            mask = start + offs < span
            flag = (count + 1).to(tl.int32)
            if SHAPE.SENDING:
                call = await_count(call, CREDITS + peer * CHANNELS + channel, count - 1, peer, SHAPE.WORLD, SHAPE.WARPS)
                words = load_words(data, start * 4, offs, nbytes - start * 4, SHAPE.UNIT)
                cells = (words.to(tl.int64) & 0xFFFFFFFF) | ((count + 1) << 32)
                tl.store(slot + offs, cells, mask=mask & (call.live != 0))
            else:
                words, call = await_chunk(call, slot, offs, mask, flag, peer, SHAPE.WORLD)
                store_words(
                    data, start * 4, offs, nan_unless(call.live, words, SHAPE.DTYPE), nbytes - start * 4, SHAPE.UNIT
                )
                tl.debug_barrier()  # every thread has its cells before the sender may overwrite them
                if call.live != 0:
                    tl.store(peer_region + CREDITS + call.rank * CHANNELS + channel, count + 1)
            count += 1
        tl.debug_barrier()
        tl.store(progress, count)
    tl.debug_barrier()
    sync.report_fault_if_stopped(call)
    readers = tl.atomic_add(call.own + MESSAGE_READERS, 1, sem="relaxed", scope="gpu")
    if readers == tl.num_programs(0) - 1:
        tl.store(call.own + MESSAGE_READERS, readers * 0)
        tl.store(counter, message_number + 1)
        tl.store(counter + 1, chunks_begun + (span + CHUNK_WORDS - 1) // CHUNK_WORDS)
    release_next_kernel(SHAPE.PDL)


def bind(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of a send or a recv; ``plan.root`` is the peer."""
    return _bind(plan, context, plan.nbytes)


def bind_header(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch that sends or receives the header of a message, and none of its data."""
    return _bind(plan, context, 0)


def _bind(plan: CallPlan, context: KernelContext, nbytes: int) -> KernelLaunch:
    chunks = max(1, math.ceil(nbytes / (4 * layout.CHUNK_WORDS)))
    sending = plan.op is Op.SEND
    return context.launch(
        send_recv,
        plan,
        programs=1 + min(chunks, layout.CHANNELS),
        num_warps=4,
        tensors="x" if sending else "out",
        peer=plan.root,
        nbytes=nbytes,
        SENDING=sending,
    )
