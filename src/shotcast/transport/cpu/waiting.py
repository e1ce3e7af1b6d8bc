"""Synchronization between ranks: how they wait for each other, and the events that end a wait.

A call consists of the same number of steps on every rank. In step ``t`` a rank writes its staging generation ``t % 2``
and releases ``progress = t + 1``. ``docs/reference/protocols.md`` ("CPU ranks: publish and pull") says what that
promises. A call ends only when the promise holds for the next step.

A call begins with the header of its epoch, and no rank finishes before it has seen an equal one from every peer. No
rank is therefore ever more than one call ahead, and two headers suffice.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import (
    interrupted,
    load,
    load_acquire,
    monotonic_ns,
    pause,
    sleep_ns,
    store,
    store_release,
)
from shotcast.device.cpu.lazy_numba import njit
from shotcast.transport.cpu import layout

DONE, TIMED_OUT, MISMATCHED, ABORTED, PEER_GONE, INTERRUPTED = 0, 1, 2, 3, 4, 5
"""The statuses that a schedule returns."""
PARTS_DIFFER = 6
"""An additional status of an uneven all_to_all: a peer sends a part of a different size than this rank expects."""


@njit(error_model="numpy")
def region(context: int, rank: int) -> int:
    """Return the address of the shared region of rank ``rank``."""
    return load(context + layout.REGIONS + 8 * rank)


@njit(error_model="numpy")
def _hopeless(context: int, peer: int, collective: bool) -> bool:
    """Check whether a rank whose process has ended keeps this call from completing.

    This is so if it is ``peer``, whose word this rank waits for, or if it has not begun this collective.
    """
    gone = load_acquire(context + layout.GONE)
    if gone == 0:
        return False
    if gone >> peer & 1:
        return True
    epoch = load(context + layout.EPOCH)
    if collective:
        for rank in range(load(context + layout.WORLD)):
            header = load_acquire(region(context, rank) + layout.HEADERS + 16 * (epoch & 1))
            if gone >> rank & 1 and (header == 0 or (header ^ epoch << 48) >> 48 != 0):
                return True
    return False


@njit(error_model="numpy", inline="never")
def _wait_long(context: int, peer: int, collective: bool, address: int, target: int) -> int:
    # The deadline starts with the first long wait, so calls without one never read the clock.
    """Wait like :func:`wait`, with a deadline, and let other threads run meanwhile."""
    begun = monotonic_ns()
    if load(context + layout.DEADLINE) == 0:
        store(context + layout.DEADLINE, begun + load(context + layout.TIMEOUT))
    deadline = load(context + layout.DEADLINE)
    own = region(context, load(context + layout.RANK))
    abort = own + layout.ABORT
    looked = begun
    store(own + layout.WAITS_FOR, 0 if collective else peer + 1)
    while True:
        hopeless = _hopeless(context, peer, collective)  # before the word, which may be the rank's last
        if load_acquire(address) - target >= 0:
            return DONE
        if load_acquire(abort) != 0:
            return ABORTED
        if hopeless:
            return PEER_GONE
        now = monotonic_ns()
        store_release(own + layout.HEARTBEAT, now)
        if now > deadline:
            return TIMED_OUT
        if now - looked > layout.INTERRUPT_NS:
            looked = now
            if interrupted():
                return INTERRUPTED
        waited = now - begun
        # Let other threads run. After a while sleep for about 3% of the time waited so far.
        sleep_ns(0 if waited < layout.YIELD_NS else min(waited >> 5, 1_000_000))


@njit(error_model="numpy")
def wait(context: int, peer: int, collective: bool, address: int, target: int) -> int:
    """Wait until the word of ``peer`` at ``address`` is not below ``target``.

    Returns DONE, or the reason why it will not get there. ``collective`` says that the call needs all ranks.
    """
    for _ in range(load(context + layout.SPINS)):
        if load_acquire(address) - target >= 0:
            return DONE
        pause()
    return _wait_long(context, peer, collective, address, target)


@njit(error_model="numpy")
def is_stopped(context: int) -> bool:
    """Check whether a known fault has stopped the communicator."""
    return load_acquire(region(context, load(context + layout.RANK)) + layout.ABORT) != 0


@njit(error_model="numpy")
def begin(context: int, plan: int) -> tuple[int, int, int, int]:
    """Start a collective call: count the epoch and publish the header.

    Returns the second word of the header, or 0 if the communicator is stopped; the rank; the number of ranks; and the
    first step.
    """
    rank, world_size, step = load(context + layout.RANK), load(context + layout.WORLD), load(context + layout.STEP)
    own = region(context, rank)
    if is_stopped(context):
        return 0, rank, world_size, step
    epoch = load(context + layout.EPOCH) + 1
    store(context + layout.EPOCH, epoch)
    store(context + layout.DEADLINE, 0)
    first_word = (epoch << 48) | load(plan + layout.HEADER)
    second_word = (epoch << 48) | load(plan + layout.HEADER + 8)
    store(context + layout.HEADER_WORD, first_word)
    store_release(own + layout.HEADERS + 16 * (epoch & 1), first_word)
    store_release(own + layout.HEADERS + 16 * (epoch & 1) + 8, second_word)
    return second_word, rank, world_size, step


@njit(error_model="numpy")
def publish(context: int, step: int) -> int:
    """Publish the writes of step ``step``, and return the next step."""
    store_release(region(context, load(context + layout.RANK)) + layout.PROGRESS, step + 1)
    return step + 1


@njit(error_model="numpy")
def await_peer(context: int, peer: int, step: int, word: int) -> int:
    """Wait until ``peer`` has published the steps below ``step``. Returns MISMATCHED for another call."""
    control = region(context, peer)
    status = wait(context, peer, True, control + layout.PROGRESS, step)
    if status == DONE:
        header = control + layout.HEADERS + 16 * (load(context + layout.EPOCH) & 1)
        if load_acquire(header) != load(context + layout.HEADER_WORD) or load_acquire(header + 8) != word:
            return MISMATCHED
    return status


@njit(error_model="numpy")
def await_all(context: int, step: int, word: int) -> int:
    """Wait for every peer like :func:`await_peer`."""
    rank, world_size = load(context + layout.RANK), load(context + layout.WORLD)
    for distance in range(1, world_size):
        peer = rank + distance
        if peer >= world_size:
            peer -= world_size
        status = await_peer(context, peer, step, word)
        if status != DONE:
            return status
    return DONE


@njit(error_model="numpy")
def finish(context: int, step: int) -> int:
    """End a call that was published up to ``step``."""
    store(context + layout.STEP, step)
    return DONE


@njit(error_model="numpy")
def meet(context: int, step: int, word: int) -> int:
    """End a call, or a phase of it, with a step without data, once all ranks have reached it."""
    step = publish(context, step)
    status = await_all(context, step, word)
    return status if status != DONE else finish(context, step)
