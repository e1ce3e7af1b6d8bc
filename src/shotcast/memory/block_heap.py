"""Tensors in memory that all ranks map, for ranks that cannot map address space ahead of its memory, such as GPUs.

The memory comes in *blocks*. A rank that makes one sends its file descriptor to the other ranks, which map the memory
on the thread of their watch, whatever they do meanwhile, and answer. The block serves once all have answered. So a rank
makes and frees tensors without the others, and no call is a condition of another. Each call tells the ranks in which
block its tensors lie (:meth:`BlockHeap.place`).

A rank ends a call once all ranks have read and written what they want of its tensors, so the memory of a tensor that
dies is free for work that is enqueued later. As with PyTorch's own memory, that is work on the stream on which the
tensor was made; other streams get it once that one has come so far, and all do if another has used it
(:func:`record_use`, as PyTorch's ``Tensor.record_stream`` knows none but its own memory). After a call that failed a
late rank may still access it: then it stays unused until all ranks have met again.
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
"""The size of the first block, and the size up to which blocks become as large as all before them. A longer tensor has
a block of its own."""
UNIT = 512
"""Tensors begin at multiples of this many bytes."""
_PATIENCE_S = 2.0
"""The longest wait for the other ranks to map a block."""
_GRANULE = 2 << 20
"""Blocks have multiples of this many bytes, which is what drivers map."""


class Peers(Protocol):
    """The way to the other ranks' processes; see :class:`shotcast.collectives.peer_watch.PeerWatch`."""

    def hear(self, name: str, told: Callable[[int, int], None]) -> None: ...
    def send(self, rank: int, name: str, number: int, descriptor: int = -1) -> None: ...


class HostBlock:
    """Memory that CPU ranks of this machine map, in a file without a name.

    ``descriptor`` is that of another rank's block, or -1 to make one; as an attribute, that by which other processes
    map this one, and -1 once it is closed. Raises OSError if there is no memory for it.
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
        """Do nothing: the memory is unmapped with the last tensor in it."""


class GpuBlock:
    """The same of a GPU's memory.

    ``nbytes`` is a multiple of what the driver maps; another rank's block may lie on another GPU. Raises RuntimeError
    if there is no memory for it, or it cannot be mapped.
    """

    def __init__(self, device: torch.device, nbytes: int, descriptor: int = -1):
        self._device, self._memory = device, driver.SharedMemory(device.index, nbytes, descriptor)
        self.address, self.descriptor = self._memory.address, self._memory.descriptor

    def view(self, start: int, nbytes: int) -> tuple[torch.Tensor, Any]:
        """Do what :meth:`HostBlock.view` does."""
        owner = driver.GpuBytes(self.address + start, nbytes)
        return torch.as_tensor(owner, device=self._device), owner

    def release(self) -> None:
        """Unmap the memory, of which no work is left."""
        self._memory.release()


Block = HostBlock | GpuBlock


_uses: dict[int, set[Any]] = {}
"""The streams that use a living tensor beside the one on which it was made, by the address of its storage."""


def record_use(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Let the memory of a tensor not be used again before the work that ``stream`` has now has ended."""
    streams = _uses.get(tensor.untyped_storage().data_ptr())
    if streams is None:
        tensor.record_stream(stream)
    else:
        streams.add(stream)


class _Dead(NamedTuple):
    """Memory of a dead tensor: its block, its first byte there, its size, its stream, and others that used it."""

    block: _Own
    start: int
    size: int
    stream: Any
    others: frozenset[Any]


class _Kept(NamedTuple):
    """Memory of a dead tensor, which a tensor on ``stream`` may have at once, others when the events have come."""

    block: _Own
    start: int
    stream: Any
    events: tuple[Any, ...]

    def is_free(self, stream: Any) -> bool:
        return self.stream == stream or all(event.query() for event in self.events)


class _Own:
    """A block that this rank has made.

    Attributes:
        waits: the ranks that have not mapped it yet.
        used: the bytes that tensors have or had, from its beginning.
        live: the tensors that live.
    """

    def __init__(self, number: int, block: Block, nbytes: int, waits: set[int]):
        self.number, self.block, self.nbytes, self.waits = number, block, nbytes, waits
        self.used = self.live = 0


class BlockHeap:
    """Makes tensors in memory that all ranks map. Construction needs no other rank; calls follow once all have one.

    Args:
        most_blocks: the blocks that a rank may have.
        make: ``make(nbytes)`` makes a block and ``make(nbytes, descriptor)`` maps that of another rank.
        tell: ``tell(rank, number, address)`` is told where a block of a rank is mapped here, on any thread.
        current_stream: returns the current stream of the device; None where work ends before calls return.
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
        """(first address, end, number) of the blocks that serve. Calls read it without the lock."""
        self._own: list[_Own] = []
        self._theirs: list[Block] = []
        self._kept: dict[int, list[_Kept]] = {}
        self._dead: collections.deque[_Dead] = collections.deque()
        self._withheld: list[_Dead] = []
        self._lock = threading.Lock()
        self._mapped = threading.Condition(self._lock)
        self._refused = self._closed = False
        self.is_stopped: Callable[[], bool] = lambda: False
        """Tells whether a call has failed since the ranks last met."""
        me = weakref.WeakMethod(self._map), weakref.WeakMethod(self._hear)
        peers.hear("block", lambda number, descriptor: _call(me[0], number, descriptor))
        peers.hear("mapped", lambda number, _: _call(me[1], number))

    # -- tensors ------------------------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return a tensor with any content, whose last view frees its memory; None if there is no memory for it.

        Waits for the other ranks' processes, not for their calls, where a new block is needed.
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
        """Return the number of the block in which an address lies, and which byte there it is; None for others."""
        for first, end, number in self.ranges:
            if first <= address < end:
                return number, address - first
        return None

    def resume(self) -> None:
        """Free what died since a call failed: all ranks have met, and none is in a call."""
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
        """Return a block and a place in it for ``size`` bytes; None if no block that serves has room."""
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
        """Begin a block without live tensors anew, if all of its memory is free."""
        parts = [each for kept in self._kept.values() for each in kept if each.block is own]
        if all(each.is_free(stream) for each in parts):
            own.used = 0
            self._kept = {size: [each for each in kept if each.block is not own] for size, kept in self._kept.items()}

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _grow(self, size: int) -> bool:
        """Make a block for ``size`` bytes; return whether it serves. The caller holds the lock, which is let go of."""
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
        """Map a block of another rank, and say so. On the thread of the watch."""
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
        """Note that a rank has mapped a block of this one. On the thread of the watch."""
        with self._lock:
            if (number := message & 0xFF) < len(self._own):
                self._own[number].waits.discard(message >> 8)
                self._mapped.notify_all()

    def close(self) -> None:
        """Unmap the other ranks' blocks, and release those of this rank in which no tensor lives.

        All work of the device has ended. Tensors that live stay as they are.
        """
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
        _release_unused()


_unused: list[_Own] = []
"""Blocks of heaps that are closed, until no tensor lives in them and a heap is closed, for which work has ended."""


def _release_unused() -> None:
    for own in list(_unused):
        if own.live == 0:
            _unused.remove(own)
            own.block.release()


def _die(heap: weakref.ref[BlockHeap], address: int, own: _Own, start: int, size: int, stream: Any) -> None:
    """Note that a tensor has died, which may be at any moment, on any thread."""
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
