"""Tensors in memory that all ranks map, for ranks that cannot map address space ahead of memory, such as GPUs.

The memory comes in *blocks*. A rank that creates one sends its file descriptor to the other ranks, which map the memory
on their watch's thread, whatever else they are doing, and answer. The block is usable once all have answered. So a rank
creates and frees tensors independently of the others. Each call tells the ranks which block its tensors are in
(:meth:`BlockHeap.place`).

The memory of a dead tensor is free for later work on the stream that allocated the tensor; other streams get the memory
once that stream has caught up, and so do all streams if another one has used it (:func:`record_use`, since PyTorch's
``Tensor.record_stream`` only works for its own memory). After a failed call a late rank may still access the memory, so
it stays unused until all ranks have met again.
"""

from __future__ import annotations

import collections
import ctypes
import logging
import math
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from shotcast.memory import driver
from shotcast.units import about_size, align_up

logger = logging.getLogger(__name__)

LEAST_BYTES, MOST_BYTES = 64 << 20, 1 << 30
"""The size of the first block, and the most to which blocks double the total. Longer tensors get their own."""
UNIT = 512
"""The alignment of tensors in bytes."""
_PATIENCE_S = 2.0
"""The longest wait for the other ranks to map a block."""
_GRANULE = 2 << 20
"""Block sizes are multiples of this many bytes, the granularity of drivers."""


class Peers(Protocol):
    """The channel to the other ranks' processes; see :class:`shotcast.collectives.peer_watch.PeerWatch`."""

    def hear(self, name: str, told: Callable[[int, int], None]) -> None: ...
    def send(self, rank: int, name: str, number: int, descriptor: int = -1) -> None: ...


class HostBlock:
    """Memory that CPU ranks of this machine map, in an anonymous file. Raises OSError if there is no memory.

    ``descriptor`` refers to another rank's block, or is -1 to create one. As an attribute, it is the descriptor that
    other processes use to map this block, and -1 once closed.
    """

    def __init__(self, nbytes: int, descriptor: int = -1):
        self.descriptor = descriptor
        if descriptor < 0:
            self.descriptor = os.memfd_create("shotcast")
            os.ftruncate(self.descriptor, nbytes)
        self._mapping = mmap.mmap(self.descriptor, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def view(self, start: int, nbytes: int) -> tuple[torch.Tensor, Any]:
        """Return bytes of the block as a tensor, and an object that lives as long as its storage."""
        owner = (ctypes.c_char * nbytes).from_buffer(self._mapping, start)
        return torch.frombuffer(owner, dtype=torch.uint8), owner

    def release(self) -> None:
        """Do nothing: the memory is unmapped with its last tensor."""


class GpuBlock(driver.SharedMemory):
    """The GPU counterpart of :class:`HostBlock`; another rank's block may be on another GPU."""

    def __init__(self, device: torch.device, nbytes: int, descriptor: int = -1):
        super().__init__(device.index, nbytes, descriptor)
        self._device = device

    def view(self, start: int, nbytes: int) -> tuple[torch.Tensor, Any]:
        """Return bytes of the block as a tensor, like :meth:`HostBlock.view`."""
        owner = driver.GpuBytes(self.address + start, nbytes)
        return torch.as_tensor(owner, device=self._device), owner


Block = HostBlock | GpuBlock


_uses: dict[int, set[Any]] = {}
"""The streams that use a live tensor, other than its allocating stream, by storage address."""


def record_use(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Keep a tensor's memory from being reused before the current work of ``stream`` has ended."""
    streams = _uses.get(tensor.untyped_storage().data_ptr())
    if streams is None:
        tensor.record_stream(stream)
    else:
        streams.add(stream)


class _Dead(NamedTuple):
    """Memory of a dead tensor: its block, offset, size, stream, and other streams that used it."""

    block: _Own
    start: int
    size: int
    stream: Any
    others: frozenset[Any]


class _Kept(NamedTuple):
    """Memory of a dead tensor, available to ``stream`` at once and to others after the events."""

    block: _Own
    start: int
    stream: Any
    events: tuple[Any, ...]

    def is_free(self, stream: Any) -> bool:
        return self.stream == stream or all(event.query() for event in self.events)


class _Own:
    """A block that this rank created.

    Attributes:
        waits: the ranks that have not mapped it yet.
        used: the number of bytes at its beginning that tensors use or used.
        live: the number of live tensors.
    """

    def __init__(self, number: int, block: Block, nbytes: int, waits: set[int]):
        self.number, self.block, self.nbytes, self.waits = number, block, nbytes, waits
        self.used = self.live = 0


class BlockHeap:
    """Creates tensors in memory that all ranks map. Not collective to construct; calls need one on every rank.

    Args:
        most_blocks: the most blocks per rank.
        make: ``make(nbytes)`` creates a block and ``make(nbytes, descriptor)`` maps another rank's block.
        tell: ``tell(rank, number, address)`` is called with the address at which a rank's block is mapped here, on any
            thread.
        current_stream: returns the current stream of the device; None if work ends before calls return.
    """

    def __init__(
        self,
        peers: Peers,
        rank: int,
        world_size: int,
        most_blocks: int,
        make: Callable[..., Block],
        tell: Callable[[int, int, int], None],
        current_stream: Callable[[], Any] | None = None,
    ):
        self._peers, self._rank, self._world_size, self._most = peers, rank, world_size, most_blocks
        self._make, self._tell, self._current_stream = make, tell, current_stream
        self.ranges: list[tuple[int, int, int]] = []
        """(first address, end, number) of the usable blocks. Calls read it without the lock."""
        self._own: list[_Own] = []
        self._theirs: list[Block] = []
        self._kept: dict[int, list[_Kept]] = {}
        self._dead: collections.deque[_Dead] = collections.deque()
        self._withheld: list[_Dead] = []
        self._lock = threading.Lock()
        self._mapped = threading.Condition(self._lock)
        self._refused = self._closed = False
        self.is_stopped: Callable[[], bool] = lambda: False
        """Returns whether a call has failed since the ranks last met."""
        me = weakref.WeakMethod(self._map), weakref.WeakMethod(self._hear)
        peers.hear("block", lambda number, descriptor: _call(me[0], number, descriptor))
        peers.hear("mapped", lambda number, _: _call(me[1], number))

    # -- tensors ------------------------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Allocate an uninitialized tensor, whose last view frees its memory; None if there is no memory for it.

        If a new block is needed, waits for the other ranks' processes, but not for their calls.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        size = align_up(nbytes, UNIT)
        if size == 0:
            return None
        stream = self._current_stream() if self._current_stream is not None else None
        with self._lock:
            self._collect()
            place = self._take(size, stream)
            if place is None and not self._refused and self._grow(size):
                place = self._take(size, stream)
            if place is None:
                return None
            own, start = place
            own.live += 1
            view, owner = own.block.view(start, nbytes)
        _uses[view.data_ptr()] = set()
        weakref.finalize(owner, _die, weakref.ref(self), view.data_ptr(), own, start, size, stream).atexit = False
        return view.view(dtype).view(tuple(shape))

    def place(self, address: int) -> tuple[int, int] | None:
        """Return the number of the block that contains an address, and the offset in it; None for other addresses."""
        for first, end, number in self.ranges:
            if first <= address < end:
                return number, address - first
        return None

    def resume(self) -> None:
        """Free the memory that died since a call failed: all ranks have met, and none is in a call."""
        with self._lock:
            self._collect()
            withheld, self._withheld = self._withheld, []
            for dead in withheld:
                self._keep(dead)

    def _collect(self) -> None:
        while self._dead:
            dead = self._dead.popleft()
            if self.is_stopped():
                self._withheld.append(dead)
            else:
                self._keep(dead)

    def _keep(self, dead: _Dead) -> None:
        dead.block.live -= 1
        streams = set() if dead.stream is None else {dead.stream, *dead.others}
        events = tuple(stream.record_event() for stream in streams)
        kept = _Kept(dead.block, dead.start, None if dead.others else dead.stream, events)
        self._kept.setdefault(dead.size, []).append(kept)

    def _take(self, size: int, stream: Any) -> tuple[_Own, int] | None:
        """Return a block and an offset in it for ``size`` bytes; None if no usable block has room."""
        kept = self._kept.get(size, [])
        for number, each in enumerate(kept):
            if each.is_free(stream):
                del kept[number]
                return each.block, each.start
        for own in self._own:
            if not own.waits and own.nbytes - own.used < size <= own.nbytes and own.live == 0:
                self._empty(own, stream)
            if not own.waits and own.nbytes - own.used >= size:
                own.used += size
                return own, own.used - size
        return None

    def _empty(self, own: _Own, stream: Any) -> None:
        """Reset a block without live tensors, if all of its memory is free."""
        parts = [each for kept in self._kept.values() for each in kept if each.block is own]
        if all(each.is_free(stream) for each in parts):
            own.used = 0
            self._kept = {size: [each for each in kept if each.block is not own] for size, kept in self._kept.items()}

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _grow(self, size: int) -> bool:
        """Create a block for ``size`` bytes; return whether it is usable. Releases the caller's lock meanwhile."""
        total = sum(own.nbytes for own in self._own)
        nbytes = align_up(max(size, LEAST_BYTES, min(total, MOST_BYTES)), _GRANULE)
        number = len(self._own)
        failure = f"there are {number} blocks already" if number == self._most else ""
        if not failure:
            try:
                block = self._make(nbytes)
            except (OSError, RuntimeError) as error:
                failure = str(error)
        if failure:
            return self._refuse(f"no memory that all ranks map for a tensor of {about_size(size)} ({failure})")
        own = _Own(number, block, nbytes, set(range(self._world_size)) - {self._rank})
        self._own.append(own)
        self._tell(self._rank, number, block.address)
        for rank in sorted(own.waits):
            message = (nbytes // _GRANULE << 16) | (self._rank << 8) | number
            self._peers.send(rank, "block", message, block.descriptor)
        until = time.monotonic() + _PATIENCE_S
        while own.waits and (left := until - time.monotonic()) > 0:
            self._mapped.wait(left)
        os.close(block.descriptor)
        block.descriptor = -1
        if own.waits:
            return self._refuse(f"ranks {sorted(own.waits)} have not mapped a block of {about_size(nbytes)}")
        self.ranges = [*self.ranges, (block.address, block.address + nbytes, number)]
        return True

    def _refuse(self, why: str) -> bool:
        self._refused = True
        logger.warning("%s; calls will stage it and later ones", why)
        return False

    def _map(self, message: int, descriptor: int) -> None:
        """Map another rank's block, and confirm it. Runs on the watch's thread."""
        rank, number, nbytes = message >> 8 & 0xFF, message & 0xFF, (message >> 16) * _GRANULE
        with self._lock:
            try:
                if self._closed or descriptor < 0:
                    return
                block = self._make(nbytes, descriptor)
                self._theirs.append(block)
                self._tell(rank, number, block.address)
            except (OSError, RuntimeError) as error:
                logger.warning("a block of %s of rank %d cannot be mapped: %s", about_size(nbytes), rank, error)
                return
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
        self._peers.send(rank, "mapped", (self._rank << 8) | number)

    def _hear(self, message: int) -> None:
        """Record that a rank has mapped one of this rank's blocks. Runs on the watch's thread."""
        with self._lock:
            if (number := message & 0xFF) < len(self._own):
                self._own[number].waits.discard(message >> 8)
                self._mapped.notify_all()

    def close(self) -> None:
        """Unmap the other ranks' blocks, and release this rank's without live tensors, once all work has ended."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.ranges = []
            theirs, self._theirs = self._theirs, []
            own, self._own = self._own, []
            withheld, self._withheld, self._kept = self._withheld, [], {}
            for dead in withheld:
                dead.block.live -= 1
            while self._dead:
                self._dead.popleft().block.live -= 1
        for each in theirs:
            each.release()
        _unused.extend(own)
        for block in [each for each in _unused if each.live == 0]:
            _unused.remove(block)
            block.block.release()


_unused: list[_Own] = []
"""Blocks of closed heaps, kept until they hold no live tensors and another heap is closed, whose work has ended."""


def _die(heap: weakref.ref[BlockHeap], address: int, own: _Own, start: int, size: int, stream: Any) -> None:
    """Record that a tensor has died, which may happen at any moment, on any thread."""
    others = frozenset(_uses.pop(address, ()))
    alive = heap()
    if alive is not None and not alive._closed:
        alive._dead.append(_Dead(own, start, size, stream, others))
    else:
        own.live -= 1


def _call(method: weakref.WeakMethod[Any], *arguments: int) -> None:
    found = method()
    if found is not None:
        found(*arguments)
    elif len(arguments) > 1 and arguments[1] >= 0:
        os.close(arguments[1])
