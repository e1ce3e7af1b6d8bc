"""Send and receive through an outbox of ``OUTBOX_SLOTS`` chunks for each ordered pair of ranks.

The sender fills slots of its outbox and counts them in ``sent``. The receiver copies them out and counts them in
``received``, which is the sender's credit. Other ranks and collectives are not affected. A send returns once its last
chunk is in the outbox.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import copy, load, load_acquire, store, store_release
from shotcast.device.cpu.compilation import CompiledSchedule
from shotcast.device.cpu.lazy_numba import njit
from shotcast.transport.cpu import layout
from shotcast.transport.cpu.host_call import HostCall
from shotcast.transport.cpu.waiting import ABORTED, DONE, MISMATCHED, region, wait


@njit(error_model="numpy")
def outbox_offset(context: int, receiver: int, piece_number: int) -> int:
    """Compute the offset, in the sender's region, of the slot of a piece for a receiver."""
    slot_bytes = layout.OUTBOX_HEADER_BYTES + load(context + layout.OUTBOX_CHUNK)
    slot = receiver * layout.OUTBOX_SLOTS + piece_number % layout.OUTBOX_SLOTS
    return layout.CONTROL_BYTES + 2 * load(context + layout.GENERATION) + slot * slot_bytes


def send(context: int, plan: int, x: int, out: int) -> int:
    """Send nbytes at x to the plan's root; ``out`` is unused."""
    rank, peer = load(context + layout.RANK), load(plan + layout.ROOT)
    own = region(context, rank)
    if load_acquire(own + layout.ABORT) != 0:
        return ABORTED
    store(context + layout.DEADLINE, 0)
    nbytes, chunk = load(plan + layout.NBYTES), load(context + layout.OUTBOX_CHUNK)
    sent = load(own + layout.SENT + layout.LINE * peer)
    received = region(context, peer) + layout.RECEIVED + layout.LINE * rank
    done = 0
    while True:
        status = wait(context, peer, False, received, sent - layout.OUTBOX_SLOTS + 1)
        if status != DONE:
            return status
        size = min(chunk, nbytes - done)
        slot = own + outbox_offset(context, peer, sent)
        store(slot, load(plan + layout.HEADER))
        store(slot + 8, load(plan + layout.HEADER + 8))
        copy(slot + layout.OUTBOX_HEADER_BYTES, x + done, size)
        sent += 1
        store_release(own + layout.SENT + layout.LINE * peer, sent)
        done += size
        if done >= nbytes:
            return DONE


def recv(context: int, plan: int, x: int, out: int) -> int:
    """Receive nbytes from the plan's root into out; ``x`` is unused.

    Returns MISMATCHED if another message is next.
    """
    rank, peer = load(context + layout.RANK), load(plan + layout.ROOT)
    own = region(context, rank)
    if load_acquire(own + layout.ABORT) != 0:
        return ABORTED
    store(context + layout.DEADLINE, 0)
    nbytes, chunk = load(plan + layout.NBYTES), load(context + layout.OUTBOX_CHUNK)
    sent = region(context, peer) + layout.SENT + layout.LINE * rank
    received = load(own + layout.RECEIVED + layout.LINE * peer)
    done = 0
    while True:
        status = wait(context, peer, False, sent, received + 1)
        if status != DONE:
            return status
        size = min(chunk, nbytes - done)
        slot = region(context, peer) + outbox_offset(context, rank, received)
        if load(slot) != load(plan + layout.HEADER) or load(slot + 8) != load(plan + layout.HEADER + 8):
            return MISMATCHED
        copy(out + done, slot + layout.OUTBOX_HEADER_BYTES, size)
        received += 1
        store_release(own + layout.RECEIVED + layout.LINE * peer, received)
        done += size
        if done >= nbytes:
            return DONE


_SENDING = CompiledSchedule(send)
_RECEIVING = CompiledSchedule(recv)

SEND = HostCall(schedule=_SENDING)
RECV = HostCall(schedule=_RECEIVING)
SEND_HEADER = HostCall(schedule=_SENDING, header_only=True)
RECV_HEADER = HostCall(schedule=_RECEIVING, header_only=True)
