"""Frames between a rank and its peers on other nodes, over nonblocking TCP connections.

A connection carries the frames of its two ranks in the order of their calls, so the receiver knows the next frame: its
epoch, header, step and size. It reads exactly that many bytes, and any other frame ends the call as a mismatch. All
frames of a step are sent and received at once: no rank waits for a receiver before it sends.

A rank with nothing to move waits in ``poll``, with the deadline of the call. It wakes every few milliseconds to look
for a fault that another thread or rank has reported, and shows that it is alive.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import interrupted, load, load_acquire, monotonic_ns, store, store_release
from shotcast.device.cpu.lazy_numba import njit
from shotcast.transport.cpu.layout import ABORT, DEADLINE, EPOCH, HEADER_WORD, HEARTBEAT, INTERRUPT_NS, RANK, TIMEOUT
from shotcast.transport.cpu.waiting import ABORTED, DONE, INTERRUPTED, MISMATCHED, PEER_GONE, TIMED_OUT, region
from shotcast.transport.network.layout import (
    BYTES,
    DATA,
    DESCRIPTOR,
    DESCRIPTORS,
    ENTRIES,
    ENTRY_BYTES,
    EXPECTED,
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    IOVECS,
    LOOKED,
    LOST,
    LOST_ERROR,
    MESSAGE,
    MOVED,
    PEER,
    POLLED,
    READY,
    RECEIVES,
    SENDS,
    STEP_AT,
)
from shotcast.transport.network.libc import EAGAIN, EINTR, ENOBUFS, POLLIN, POLLOUT, poll, receive_message, send_message

_ENDED = -1_000_000
_POLL_MS = 5
"""Maximum time between checks for faults."""


@njit(error_model="numpy")
def begin_transfer(network: int) -> None:
    """Clear the frames of the last transfer."""
    store(network + SENDS, 0)
    store(network + RECEIVES, 0)


@njit(error_model="numpy")
def add_frame(
    network: int,
    kind: int,
    descriptor: int,
    node: int,
    number: int,
    header: int,
    word: int,
    data: int,
    nbytes: int,
    step: int,
) -> None:
    """Add a frame of ``nbytes`` at ``data`` to the transfer. ``kind`` is its counter, SENDS or RECEIVES.

    ``number``, ``header``, ``word`` and ``step`` are in the header of the frame.
    """
    entry = network + ENTRIES + (load(network + SENDS) + load(network + RECEIVES)) * ENTRY_BYTES
    store(entry + DESCRIPTOR, descriptor)
    store(entry + PEER, node)
    store(entry + DATA, data)
    store(entry + BYTES, nbytes)
    store(entry + MOVED, 0)
    store(entry + READY, 1)
    words = entry + (FRAME_HEADER if kind == SENDS else EXPECTED)
    store(words, number)
    store(words + 8, header)
    store(words + 16, word)
    store(words + 24, step << STEP_AT | nbytes)
    store(network + kind, load(network + kind) + 1)


@njit(error_model="numpy")
def _add(context: int, network: int, kind: int, word: int, node: int, data: int, nbytes: int, step: int) -> None:
    descriptor, header = load(network + DESCRIPTORS + 8 * node), load(context + HEADER_WORD)
    add_frame(network, kind, descriptor, node, load(context + EPOCH), header, word, data, nbytes, step)


@njit(error_model="numpy")
def add_send(context: int, network: int, word: int, node: int, data: int, nbytes: int, step: int) -> None:
    """Add a frame to the transfer: ``nbytes`` at ``data``, for ``node``. Add all sends before any receipt.

    ``word`` is the second word of the call's header, as ``begin`` returned it.
    """
    _add(context, network, SENDS, word, node, data, nbytes, step)


@njit(error_model="numpy")
def add_receipt(context: int, network: int, word: int, node: int, data: int, nbytes: int, step: int) -> None:
    """Add a frame that ``node`` sends to the transfer: ``nbytes``, stored at ``data``."""
    _add(context, network, RECEIVES, word, node, data, nbytes, step)


@njit(error_model="numpy")
def _move(network: int, entry: int, sends: bool) -> int:
    """Move as much of a frame as possible now.

    Returns 1 if some of it was moved, 0 if none, minus errno on an error, or _ENDED after the end of the connection.
    """
    moved, nbytes = load(entry + MOVED), load(entry + BYTES)
    if moved < FRAME_HEADER_BYTES:
        store(network + IOVECS, entry + FRAME_HEADER + moved)
        store(network + IOVECS + 8, FRAME_HEADER_BYTES - moved)
        store(network + IOVECS + 16, load(entry + DATA))
        store(network + IOVECS + 24, nbytes)
        vectors = 2 if nbytes > 0 else 1
    else:
        store(network + IOVECS, load(entry + DATA) + moved - FRAME_HEADER_BYTES)
        store(network + IOVECS + 8, nbytes + FRAME_HEADER_BYTES - moved)
        vectors = 1
    store(network + MESSAGE + 16, network + IOVECS)
    store(network + MESSAGE + 24, vectors)
    descriptor = load(entry + DESCRIPTOR)
    result = send_message(descriptor, network + MESSAGE) if sends else receive_message(descriptor, network + MESSAGE)
    if result > 0:
        store(entry + MOVED, moved + result)
        return 1
    if result in (-EAGAIN, -EINTR, -ENOBUFS):
        return 0
    return result if result < 0 else _ENDED


@njit(error_model="numpy")
def _is_expected(entry: int) -> bool:
    for offset in range(0, FRAME_HEADER_BYTES, 8):
        if load(entry + FRAME_HEADER + offset) != load(entry + EXPECTED + offset):
            return False
    return True


@njit(error_model="numpy", inline="never")
def _wait(context: int, network: int) -> int:
    """Wait until a frame can be moved, for a few milliseconds at most. Returns DONE, or why the call must end."""
    now = monotonic_ns()
    if load(context + DEADLINE) == 0:
        store(context + DEADLINE, now + load(context + TIMEOUT))
        store(network + LOOKED, now)
    own = region(context, load(context + RANK))
    store_release(own + HEARTBEAT, now)
    sends, total = load(network + SENDS), load(network + SENDS) + load(network + RECEIVES)
    count = 0
    for number in range(total):
        entry = network + ENTRIES + number * ENTRY_BYTES
        if load(entry + MOVED) < load(entry + BYTES) + FRAME_HEADER_BYTES:
            events = POLLOUT if number < sends else POLLIN
            store(network + POLLED + 8 * count, load(entry + DESCRIPTOR) | events << 32)
            count += 1
    if load_acquire(own + ABORT) != 0:
        return ABORTED
    if now > load(context + DEADLINE):
        return TIMED_OUT
    if now - load(network + LOOKED) > INTERRUPT_NS:
        store(network + LOOKED, now)
        if interrupted():
            return INTERRUPTED
    left_ms = (load(context + DEADLINE) - now) // 1_000_000 + 1
    poll(network + POLLED, count, min(_POLL_MS, left_ms))
    count = 0
    for number in range(total):
        entry = network + ENTRIES + number * ENTRY_BYTES
        if load(entry + MOVED) < load(entry + BYTES) + FRAME_HEADER_BYTES:
            store(entry + READY, load(network + POLLED + 8 * count) >> 48 & 0xFFFF)
            count += 1
    return DONE


@njit(error_model="numpy")
def transfer(context: int, network: int) -> int:
    """Send and receive all frames of the transfer. Returns DONE, or why the transfer failed."""
    sends = load(network + SENDS)
    total = sends + load(network + RECEIVES)
    left = total
    while True:
        for number in range(total):
            entry = network + ENTRIES + number * ENTRY_BYTES
            if load(entry + READY) == 0:
                continue
            store(entry + READY, 0)  # a partial transfer means that no more can be moved now
            whole = load(entry + BYTES) + FRAME_HEADER_BYTES
            before = load(entry + MOVED)
            result = _move(network, entry, number < sends)
            if result < 0:
                store(network + LOST, load(entry + PEER) + 1)
                store(network + LOST_ERROR, 0 if result == _ENDED else -result)
                return PEER_GONE
            if result > 0:
                after = load(entry + MOVED)
                if number >= sends and before < FRAME_HEADER_BYTES <= after and not _is_expected(entry):
                    return MISMATCHED
                if after == whole:
                    left -= 1
        if left == 0:
            return DONE
        status = _wait(context, network)
        if status != DONE:
            return status
