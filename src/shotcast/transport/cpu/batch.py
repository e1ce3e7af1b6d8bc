"""Batches of messages, sent and received concurrently through the outboxes of :mod:`.send_recv`.

Every message makes progress whenever it can, regardless of what the others wait for, so the order of a batch cannot
deadlock ranks. Messages from one rank to another stay in order. The peer sees ordinary messages, and may send and
receive them one by one.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import (
    copy,
    interrupted,
    load,
    load_acquire,
    monotonic_ns,
    pause,
    sleep_ns,
    store,
    store_release,
)
from shotcast.device.cpu.compilation import CompiledSchedule
from shotcast.device.cpu.lazy_numba import njit
from shotcast.transport.cpu.layout import (
    ABORT,
    GONE,
    HEARTBEAT,
    INTERRUPT_NS,
    LINE,
    MESSAGE_PEER,
    OUTBOX_CHUNK,
    OUTBOX_HEADER_BYTES,
    OUTBOX_SLOTS,
    RANK,
    RECEIVED,
    SENT,
    SPINS,
    TIMEOUT,
    YIELD_NS,
)
from shotcast.transport.cpu.send_recv import outbox_offset
from shotcast.transport.cpu.waiting import ABORTED, DONE, INTERRUPTED, MISMATCHED, PEER_GONE, TIMED_OUT, region

MESSAGES = 8
MESSAGE_BYTES = 64
PEER, SENDING, ADDRESS, NBYTES, FIRST_WORD, SECOND_WORD, PASSED, BEFORE = range(0, 64, 8)
"""The record of a batch: the number of messages; then, for each message, its peer, whether it is sent, its address and
size in bytes, its header, the bytes transferred so far (-1 once it is complete), and the index of the message that must
go before it, or -1."""

_WAITING, _MOVED, _DIFFERS = 0, 1, 2


@njit(error_model="numpy")
def _pass(message: int, address: int, size: int, outgoing: bool) -> None:
    """Copy the next ``size`` bytes of a message to or from ``address``, and count them."""
    passed, nbytes = load(message + PASSED), load(message + NBYTES)
    if outgoing:
        copy(address, load(message + ADDRESS) + passed, size)
    else:
        copy(load(message + ADDRESS) + passed, address, size)
    passed += size
    store(message + PASSED, passed if passed < nbytes else -1)


@njit(error_model="numpy")
def _send_chunk(context: int, message: int) -> int:
    rank, peer, chunk = load(context + RANK), load(message + PEER), load(context + OUTBOX_CHUNK)
    own = region(context, rank)
    sent = load(own + SENT + LINE * peer)
    if load_acquire(region(context, peer) + RECEIVED + LINE * rank) - (sent - OUTBOX_SLOTS + 1) < 0:
        return _WAITING
    slot = own + outbox_offset(context, peer, sent)
    store(slot, load(message + FIRST_WORD))
    store(slot + 8, load(message + SECOND_WORD))
    size = min(chunk, load(message + NBYTES) - load(message + PASSED))
    _pass(message, slot + OUTBOX_HEADER_BYTES, size, True)
    store_release(own + SENT + LINE * peer, sent + 1)
    return _MOVED


@njit(error_model="numpy")
def _receive_chunk(context: int, message: int) -> int:
    rank, peer, chunk = load(context + RANK), load(message + PEER), load(context + OUTBOX_CHUNK)
    own = region(context, rank)
    received = load(own + RECEIVED + LINE * peer)
    if load_acquire(region(context, peer) + SENT + LINE * rank) - (received + 1) < 0:
        return _WAITING
    slot = region(context, peer) + outbox_offset(context, rank, received)
    if load(slot) != load(message + FIRST_WORD) or load(slot + 8) != load(message + SECOND_WORD):
        return _DIFFERS
    size = min(chunk, load(message + NBYTES) - load(message + PASSED))
    _pass(message, slot + OUTBOX_HEADER_BYTES, size, False)
    store_release(own + RECEIVED + LINE * peer, received + 1)
    return _MOVED


@njit(error_model="numpy")
def _hopeless(plan: int, gone: int) -> bool:
    """Check whether the peer process of an unfinished message has ended."""
    for i in range(load(plan)):
        message = plan + MESSAGES + MESSAGE_BYTES * i
        if load(message + PASSED) >= 0 and gone >> load(message + PEER) & 1:
            return True
    return False


def exchange(context: int, plan: int, x: int, out: int) -> int:
    """Send and receive the messages of a batch, whose record is ``plan``; ``x`` and ``out`` are unused."""
    own = region(context, load(context + RANK))
    count = load(plan)
    left, spins, begun, looked = count, load(context + SPINS), 0, 0
    while True:
        gone = load_acquire(context + GONE)  # read before the words, which a rank may have written just before it ended
        moved = False
        for i in range(count):
            message = plan + MESSAGES + MESSAGE_BYTES * i
            before = load(message + BEFORE)
            if load(message + PASSED) < 0:
                continue
            if before >= 0 and load(plan + MESSAGES + MESSAGE_BYTES * before + PASSED) >= 0:
                continue
            state = _send_chunk(context, message) if load(message + SENDING) else _receive_chunk(context, message)
            if state == _DIFFERS:
                store(context + MESSAGE_PEER, load(message + PEER))
                return MISMATCHED
            if state == _MOVED:
                moved = True
                if load(message + PASSED) < 0:
                    left -= 1
        if load_acquire(own + ABORT) != 0:
            return ABORTED
        if left == 0:
            return DONE
        if moved:
            continue
        if spins > 0:
            spins -= 1
            pause()
            continue
        if _hopeless(plan, gone):
            return PEER_GONE
        now = monotonic_ns()
        if begun == 0:
            begun, looked = now, now
        store_release(own + HEARTBEAT, now)
        if now - begun > load(context + TIMEOUT):
            return TIMED_OUT
        if now - looked > INTERRUPT_NS:
            looked = now
            if interrupted():
                return INTERRUPTED
        sleep_ns(0 if now - begun < YIELD_NS else min(now - begun >> 5, 1_000_000))


EXCHANGE = CompiledSchedule(exchange)
