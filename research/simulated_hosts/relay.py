"""The relay: one thread that carries the packets of all hosts, each delivered a given time after it was sent.

It runs compiled, without the interpreter lock. It sleeps in ``ppoll`` until a host sends or a packet is due. Packets
for a host wait in one queue in the order in which they came, so packets between two hosts never overtake each other.
Memory is bounded: while no slot is free the relay does not read, and packets wait in the queues of the TUN devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit, typeof, types

from shotcast.device.cpu.atomics import load_acquire, monotonic_ns
from simulated_hosts.linux import PACKET_HEADER_BYTES

SLOTS = 4096
SLOT_BYTES = 65536 + 64

STOP, DELAY_NS, BYTES_PER_S, SPIN_NS = range(4)
"""Words that the relay obeys: whether to end, the one-way delay, the bandwidth of a host's link (0: unlimited), and how
long before a packet is due it stops sleeping."""
BUSY_NS, RUN_NS, UNKNOWN, FAILED, LATENESS = 4, 5, 6, 7, 8
"""Words that it writes: time outside ``ppoll``, time since it started, packets for no host, packets that could not be
delivered, and a histogram: word LATENESS + b counts packets delivered less than 2**b ns after they were due."""
BUCKETS = 32
CUT = LATENESS + BUCKETS
"""The first of the words that cut hosts: 1 for each host whose packets are lost."""
SENT, NBYTES, DELIVERED, LOST = range(4)
"""Counters of each host: packets and bytes it sent, packets delivered to it, packets lost as it was cut or down."""
COUNTERS = 4

_BATCH = 16
"""Packets that are read from a host before due packets are looked at again."""
_EIO, _POLLIN, _PR_SET_TIMERSLACK = 5, 1, 29
_ADDRESS = PACKET_HEADER_BYTES + 16
"""Place of the destination's address in a packet; its last two bytes are the host's number + 1."""

_read = types.ExternalFunction("read", types.int64(types.int32, types.int64, types.int64))
_write = types.ExternalFunction("write", types.int64(types.int32, types.int64, types.int64))
_ppoll = types.ExternalFunction("ppoll", types.int32(types.int64, types.int64, types.int64, types.int64))
_errno = types.ExternalFunction("__errno_location", types.CPointer(types.int32)())

_DUE_LAST = 1 << 62


@njit(nogil=True, cache=True, error_model="numpy")
def _run(
    words: Any,
    counters: Any,
    polled: Any,
    memory: Any,
    free: Any,
    due: Any,
    slots: Any,
    lengths: Any,
    sources: Any,
) -> None:
    """Carry packets until the word STOP is set.

    Args:
        words: the words above. ``counters``: [hosts, COUNTERS].
        polled: one ``struct pollfd`` for each TUN device and one for the descriptor that wakes the relay, as int64.
        memory: [slots, bytes]. ``free``: the stack of free slots, its height last.
        due, slots, lengths, sources: [hosts, slots]: the queues.
    """
    hosts = counters.shape[0]
    capacity = due.shape[1]
    base = words.ctypes.data
    room = memory.shape[1]
    packets = memory.ctypes.data
    descriptors = np.empty(hosts, np.int32)
    for host in range(hosts):
        descriptors[host] = polled[host] & 0x7FFFFFFF
    head, tail = np.zeros(hosts, np.int64), np.zeros(hosts, np.int64)
    out_free, in_free = np.zeros(hosts, np.int64), np.zeros(hosts, np.int64)
    wait = np.zeros(2, np.int64)
    drain = np.zeros(1, np.int64)
    height = free[capacity]
    started = monotonic_ns()
    idle = 0
    while load_acquire(base + 8 * STOP) == 0:
        # deliver what is due
        now = monotonic_ns()
        earliest = _DUE_LAST
        for host in range(hosts):
            while head[host] != tail[host]:
                place = head[host] % capacity
                if due[host, place] > now:
                    earliest = min(earliest, due[host, place])
                    break
                slot, source = slots[host, place], sources[host, place]
                if words[CUT + host] != 0 or words[CUT + source] != 0:
                    counters[host, LOST] += 1
                elif _write(descriptors[host], packets + slot * room, lengths[host, place]) < 0:
                    if _errno()[0] == _EIO:  # its interface is down
                        counters[host, LOST] += 1
                    else:
                        words[FAILED] += 1
                else:
                    counters[host, DELIVERED] += 1
                    late = monotonic_ns() - due[host, place]
                    bucket = 0
                    while late >> bucket != 0 and bucket < BUCKETS - 1:
                        bucket += 1
                    words[LATENESS + bucket] += 1
                free[height] = slot
                height += 1
                head[host] += 1
        words[RUN_NS] = now - started
        words[BUSY_NS] = now - started - idle

        # sleep until a host sends or the next packet is due
        rest = max(0, earliest - words[SPIN_NS] - now)
        wait[0], wait[1] = rest // 1_000_000_000, rest % 1_000_000_000
        first = 0 if height > 0 else hosts  # without a free slot, wait for due packets alone
        if rest > 0:
            before = monotonic_ns()
            ready = _ppoll(
                polled.ctypes.data + 8 * first, hosts + 1 - first, 0 if earliest == _DUE_LAST else wait.ctypes.data, 0
            )
            idle += monotonic_ns() - before
        else:
            ready = _ppoll(polled.ctypes.data + 8 * first, hosts + 1 - first, wait.ctypes.data, 0)
        if ready <= 0:
            continue
        if polled[hosts] >> 48 != 0:
            _read(polled[hosts] & 0x7FFFFFFF, drain.ctypes.data, 8)
        if first == hosts:
            continue

        # read what was sent
        for host in range(hosts):
            if polled[host] >> 48 == 0:
                continue
            for _ in range(_BATCH):
                if height == 0:
                    break
                slot = free[height - 1]
                now = monotonic_ns()  # the packet was there before it was read
                nbytes = _read(descriptors[host], packets + slot * room, room)
                if nbytes <= 0:
                    break
                counters[host, SENT] += 1
                counters[host, NBYTES] += nbytes
                to = (np.int64(memory[slot, _ADDRESS + 2]) << 8 | memory[slot, _ADDRESS + 3]) - 1
                if memory[slot, PACKET_HEADER_BYTES] >> 4 != 4 or to < 0 or to >= hosts:
                    words[UNKNOWN] += 1
                    continue
                if words[CUT + host] != 0 or words[CUT + to] != 0:
                    counters[to, LOST] += 1
                    continue
                when = now + words[DELAY_NS]
                if words[BYTES_PER_S] > 0:
                    lasts = nbytes * 1_000_000_000 // words[BYTES_PER_S]
                    out_free[host] = max(now, out_free[host]) + lasts
                    in_free[to] = max(out_free[host] + words[DELAY_NS], in_free[to] + lasts)
                    when = in_free[to]
                if tail[to] != head[to]:  # a delay that has become shorter lets no packet overtake another
                    when = max(when, due[to, (tail[to] - 1) % capacity])
                place = tail[to] % capacity
                due[to, place], slots[to, place], lengths[to, place], sources[to, place] = when, slot, nbytes, host
                tail[to] += 1
                height -= 1
    free[capacity] = height


@dataclass(frozen=True, slots=True)
class RelayCounters:
    """Counts of what the relay has carried.

    Attributes:
        packets, nbytes: sent by each host.
        lost: packets for each host that were lost because a host was cut off.
        failed: packets that could not be delivered for another reason.
        busy_ns, run_ns: the time in which the relay worked, and all time.
        late: how many packets were delivered less than 2**b ns after they were due, for each b that is the first.
    """

    packets: tuple[int, ...]
    nbytes: tuple[int, ...]
    lost: tuple[int, ...]
    failed: int
    busy_ns: int
    run_ns: int
    late: tuple[int, ...]

    def since(self, earlier: RelayCounters) -> RelayCounters:
        """Return what was counted after ``earlier``."""

        def added(now: tuple[int, ...], then: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(a - b for a, b in zip(now, then, strict=True))

        return RelayCounters(
            added(self.packets, earlier.packets),
            added(self.nbytes, earlier.nbytes),
            added(self.lost, earlier.lost),
            self.failed - earlier.failed,
            self.busy_ns - earlier.busy_ns,
            self.run_ns - earlier.run_ns,
            added(self.late, earlier.late),
        )

    @property
    def busy(self) -> float:
        """The share of the time in which the relay worked."""
        return self.busy_ns / max(1, self.run_ns)

    def late_us(self, share: float) -> float:
        """Return a bound of the time by which this share of the packets was delivered after they were due."""
        sums = np.cumsum(self.late)
        return 2.0 ** int(np.searchsorted(sums, share * sums[-1])) / 1e3 if sums[-1] else 0.0


class Relay:
    """The relay's thread.

    Args:
        tuns: the TUN devices of the hosts, or other descriptors that read and write whole packets; non-blocking. They
            stay the caller's.
        slots: the packets that wait in the relay at most.
    """

    def __init__(
        self,
        tuns: Sequence[int],
        delay_us: float,
        bandwidth_gbps: float = 0.0,
        spin_us: float = 0.0,
        slots: int = SLOTS,
    ):
        hosts = len(tuns)
        self._words = np.zeros(CUT + hosts, np.int64)
        self._counters = np.zeros((hosts, COUNTERS), np.int64)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        polled = np.array([tun | _POLLIN << 32 for tun in (*tuns, self._wake)], np.int64)
        free = np.arange(slots + 1, dtype=np.int64)  # the last word is the height of the stack
        memory = np.empty((slots, SLOT_BYTES), np.uint8)  # its pages are taken when they are first written
        queues = [np.zeros((hosts, slots), np.int64) for _ in range(4)]
        self._arguments = (self._words, self._counters, polled, memory, free, *queues)
        self._words[BYTES_PER_S] = int(bandwidth_gbps * 1e9 / 8)
        self._words[SPIN_NS] = int(spin_us * 1e3)
        self.set_delay(delay_us)
        _run.compile(tuple(map(typeof, self._arguments)))
        self._thread = threading.Thread(target=self._carry, name="shotcast relay", daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        # ahead of the ranks, and woken in time: both for this thread alone. Containers may not let root do the first.
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        except PermissionError:
            with contextlib.suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -20)
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1))
        _run(*self._arguments)

    def set_delay(self, delay_us: float) -> None:
        self._set(DELAY_NS, int(delay_us * 1e3))

    def set_cut(self, host: int, cut: bool) -> None:
        """Lose all packets from and to a host, those on their way too, or carry them again."""
        self._set(CUT + host, int(cut))

    def _set(self, word: int, value: int) -> None:
        self._words[word] = value
        os.eventfd_write(self._wake, 1)

    def counters(self) -> RelayCounters:
        words, counters = self._words.tolist(), self._counters.T.tolist()
        return RelayCounters(
            tuple(counters[SENT]),
            tuple(counters[NBYTES]),
            tuple(counters[LOST]),
            words[FAILED],
            words[BUSY_NS],
            words[RUN_NS],
            tuple(words[LATENESS : LATENESS + BUCKETS]),
        )

    def close(self) -> None:
        """End the thread."""
        self._set(STOP, 1)
        self._thread.join()
        os.close(self._wake)
