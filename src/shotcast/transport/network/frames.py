"""Frames between a rank and its peers on other nodes, over nonblocking TCP connections.

The receiver knows the next frame of a connection: its epoch, header, step and size. It reads exactly that many bytes,
and any other frame ends the call as a mismatch. All frames of a step are sent and received at once: no rank waits for a
receiver before it sends. A rank with nothing to move waits in ``poll``, and wakes every few milliseconds to look for a
fault that another thread or rank has reported, and to show that it is alive.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import interrupted, load, load_acquire, monotonic_ns, store, store_release
from shotcast.device.cpu.lazy_numba import njit
from shotcast.transport.cpu.layout import ABORT, DEADLINE, EPOCH, HEADER_WORD, HEARTBEAT, INTERRUPT_NS, RANK, TIMEOUT
from shotcast.transport.cpu.waiting import ABORTED, DONE, INTERRUPTED, MISMATCHED, PEER_GONE, TIMED_OUT, region
from shotcast.transport.network import layout
from shotcast.transport.network.libc import EAGAIN, EINTR, ENOBUFS, POLLIN, POLLOUT, poll, receive_message, send_message

_ENDED = -1_000_000
_POLL_MS = 5
"""Maximum time between checks for faults."""


@njit(error_model="numpy")
def begin_transfer(network: int) -> None:
    """Clear the frames of the last transfer."""
    store(network + layout.SENDS, 0)
    store(network + layout.RECEIVES, 0)


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
    entry = (
        network + layout.ENTRIES + (load(network + layout.SENDS) + load(network + layout.RECEIVES)) * layout.ENTRY_BYTES
    )
    store(entry + layout.DESCRIPTOR, descriptor)
    store(entry + layout.PEER, node)
    store(entry + layout.DATA, data)
    store(entry + layout.BYTES, nbytes)
    store(entry + layout.MOVED, 0)
    store(entry + layout.READY, 1)
    words = entry + (layout.FRAME_HEADER if kind == layout.SENDS else layout.EXPECTED)
    store(words, number)
    store(words + 8, header)
    store(words + 16, word)
    store(words + 24, step << layout.STEP_AT | nbytes)
    store(network + kind, load(network + kind) + 1)


@njit(error_model="numpy")
def _add(context: int, network: int, kind: int, word: int, node: int, data: int, nbytes: int, step: int) -> None:
    descriptor, header = load(network + layout.DESCRIPTORS + 8 * node), load(context + HEADER_WORD)
    add_frame(network, kind, descriptor, node, load(context + EPOCH), header, word, data, nbytes, step)


@njit(error_model="numpy")
def add_send(context: int, network: int, word: int, node: int, data: int, nbytes: int, step: int) -> None:
    """Add a frame to the transfer: ``nbytes`` at ``data``, for ``node``. Add all sends before any receipt.

    ``word`` is the second word of the call's header, as ``begin`` returned it.
    """
    _add(context, network, layout.SENDS, word, node, data, nbytes, step)


@njit(error_model="numpy")
def add_receipt(context: int, network: int, word: int, node: int, data: int, nbytes: int, step: int) -> None:
    """Add a frame that ``node`` sends to the transfer: ``nbytes``, stored at ``data``."""
    _add(context, network, layout.RECEIVES, word, node, data, nbytes, step)


@njit(error_model="numpy")
def _move(network: int, entry: int, sends: bool) -> int:
    """Move as much of a frame as possible now.

    Returns 1 if some of it was moved, 0 if none, minus errno on an error, or _ENDED after the end of the connection.
    """
    moved, nbytes = load(entry + layout.MOVED), load(entry + layout.BYTES)
    if moved < layout.FRAME_HEADER_BYTES:
        store(network + layout.IOVECS, entry + layout.FRAME_HEADER + moved)
        store(network + layout.IOVECS + 8, layout.FRAME_HEADER_BYTES - moved)
        store(network + layout.IOVECS + 16, load(entry + layout.DATA))
        store(network + layout.IOVECS + 24, nbytes)
        vectors = 2 if nbytes > 0 else 1
    else:
        store(network + layout.IOVECS, load(entry + layout.DATA) + moved - layout.FRAME_HEADER_BYTES)
        store(network + layout.IOVECS + 8, nbytes + layout.FRAME_HEADER_BYTES - moved)
        vectors = 1
    store(network + layout.MESSAGE + 16, network + layout.IOVECS)
    store(network + layout.MESSAGE + 24, vectors)
    descriptor = load(entry + layout.DESCRIPTOR)
    result = (
        send_message(descriptor, network + layout.MESSAGE)
        if sends
        else receive_message(descriptor, network + layout.MESSAGE)
    )
    if result > 0:
        store(entry + layout.MOVED, moved + result)
        return 1
    if result in (-EAGAIN, -EINTR, -ENOBUFS):
        return 0
    return result if result < 0 else _ENDED


@njit(error_model="numpy")
def _is_expected(entry: int) -> bool:
    for offset in range(0, layout.FRAME_HEADER_BYTES, 8):
        if load(entry + layout.FRAME_HEADER + offset) != load(entry + layout.EXPECTED + offset):
            return False
    return True


@njit(error_model="numpy", inline="never")
def _wait(context: int, network: int) -> int:
    """Wait until a frame can be moved, for a few milliseconds at most. Returns DONE, or why the call must end."""
    now = monotonic_ns()
    if load(context + DEADLINE) == 0:
        store(context + DEADLINE, now + load(context + TIMEOUT))
        store(network + layout.LOOKED, now)
    own = region(context, load(context + RANK))
    store_release(own + HEARTBEAT, now)
    sends, total = load(network + layout.SENDS), load(network + layout.SENDS) + load(network + layout.RECEIVES)
    count = 0
    for number in range(total):
        entry = network + layout.ENTRIES + number * layout.ENTRY_BYTES
        if load(entry + layout.MOVED) < load(entry + layout.BYTES) + layout.FRAME_HEADER_BYTES:
            events = POLLOUT if number < sends else POLLIN
            store(network + layout.POLLED + 8 * count, load(entry + layout.DESCRIPTOR) | events << 32)
            count += 1
    if load_acquire(own + ABORT) != 0:
        return ABORTED
    if now > load(context + DEADLINE):
        return TIMED_OUT
    if now - load(network + layout.LOOKED) > INTERRUPT_NS:
        store(network + layout.LOOKED, now)
        if interrupted():
            return INTERRUPTED
    left_ms = (load(context + DEADLINE) - now) // 1_000_000 + 1
    poll(network + layout.POLLED, count, min(_POLL_MS, left_ms))
    count = 0
    for number in range(total):
        entry = network + layout.ENTRIES + number * layout.ENTRY_BYTES
        if load(entry + layout.MOVED) < load(entry + layout.BYTES) + layout.FRAME_HEADER_BYTES:
            store(entry + layout.READY, load(network + layout.POLLED + 8 * count) >> 48 & 0xFFFF)
            count += 1
    return DONE


@njit(error_model="numpy")
def transfer(context: int, network: int) -> int:
    """Send and receive all frames of the transfer. Returns DONE, or why the transfer failed."""
    sends = load(network + layout.SENDS)
    total = sends + load(network + layout.RECEIVES)
    left = total
    while True:
        for number in range(total):
            entry = network + layout.ENTRIES + number * layout.ENTRY_BYTES
            if load(entry + layout.READY) == 0:
                continue
            store(entry + layout.READY, 0)  # a partial transfer means that no more can be moved now
            whole = load(entry + layout.BYTES) + layout.FRAME_HEADER_BYTES
            before = load(entry + layout.MOVED)
            result = _move(network, entry, number < sends)
            if result < 0:
                store(network + layout.LOST, load(entry + layout.PEER) + 1)
                store(network + layout.LOST_ERROR, 0 if result == _ENDED else -result)
                return PEER_GONE
            if result > 0:
                after = load(entry + layout.MOVED)
                if number >= sends and before < layout.FRAME_HEADER_BYTES <= after and not _is_expected(entry):
                    return MISMATCHED
                if after == whole:
                    left -= 1
        if left == 0:
            return DONE
        status = _wait(context, network)
        if status != DONE:
            return status
