"""Shared memory for tensors: the part of a rank's segment after the workspace.

It serves CPU ranks as :mod:`shotcast.memory.block_heap` serves GPUs, but all ranks map all of it from the start. Pages
are reserved when a tensor is created, so a full tmpfs gives an error instead of killing a process that writes.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import logging
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from shotcast.units import about_size, align_up

logger = logging.getLogger(__name__)

KEPT_BYTES = 128 << 20
"""The most bytes of dead tensors to keep reserved for new ones. A training step allocates the same sizes again."""


class MappedHeap:
    """Creates tensors in memory that all ranks map.

    The memory extends from byte ``start``, a multiple of the page size, to the end of ``mapping``, this rank's segment.
    """

    def __init__(self, mapping: mmap.mmap, descriptor: int, start: int):
        self._mapping, self._process = mapping, os.getpid()
        self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor)
        self.start, self.end = start, len(mapping)
        self._free = [(start, self.end)]  # without pages, in the order in which they lie
        self._kept: dict[int, list[int]] = {}  # with pages, by size
        self._kept_bytes = 0
        self._dead: collections.deque[tuple[int, int]] = collections.deque()
        self._withheld: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self._refused = False
        self.is_stopped: Callable[[], bool] = lambda: False
        """Returns whether a call has failed since the ranks last met."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Allocate an uninitialized tensor, whose last view frees its memory; None if there is no memory for it."""
        count = math.prod(shape)
        size = align_up(count * dtype.itemsize, mmap.PAGESIZE)
        if size == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        with self._lock:
            self._collect()
            start = self._take(size)
        if start < 0:
            if not self._refused:
                self._refused = True
                logger.warning("no shared memory for a tensor of %s; calls will stage it", about_size(size))
            return None
        block = (ctypes.c_char * (count * dtype.itemsize)).from_buffer(self._mapping, start)
        weakref.finalize(block, self._give_back, start, size).atexit = False
        return torch.frombuffer(block, dtype=dtype, count=count).view(tuple(shape))

    def resume(self) -> None:
        """Free the memory that died since a call failed: all ranks have met, and none is in a call."""
        with self._lock:
            self._collect()
            withheld, self._withheld = self._withheld, []
            for start, size in withheld:
                self._put(start, size)

    def _give_back(self, start: int, size: int) -> None:
        """Free the memory of a dead tensor, which may happen at any moment, on any thread."""
        if os.getpid() != self._process:
            return
        self._dead.append((start, size))
        if self._lock.acquire(False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        while self._dead:
            block = self._dead.popleft()
            if self.is_stopped():
                self._withheld.append(block)
            else:
                self._put(*block)

    def _take(self, size: int) -> int:
        """Return the offset of ``size`` reserved bytes; -1 if there are none."""
        if starts := self._kept.get(size):
            self._kept_bytes -= size
            return starts.pop()
        start = self._reserve(size)
        if start < 0 and self._kept_bytes:
            kept, self._kept, self._kept_bytes = self._kept, {}, 0
            for nbytes, starts in kept.items():
                for each in starts:
                    self._put(each, nbytes, keep=False)
            start = self._reserve(size)
        return start

    def _reserve(self, size: int) -> int:
        for number, (start, end) in enumerate(self._free):
            if end - start >= size:
                try:
                    os.posix_fallocate(self._descriptor, start, size)
                except OSError:
                    return -1
                self._free[number : number + 1] = [(start + size, end)] if end - start > size else []
                return start
        return -1

    def _put(self, start: int, size: int, keep: bool = True) -> None:
        """Free memory: keep its pages for the next tensor, or return them to the system."""
        if keep and self._kept_bytes + size <= KEPT_BYTES:
            self._kept.setdefault(size, []).append(start)
            self._kept_bytes += size
            return
        with contextlib.suppress(OSError):  # a file system without holes keeps them reserved
            self._mapping.madvise(mmap.MADV_REMOVE, start, size)
        end = start + size
        place = next((number for number, (low, _) in enumerate(self._free) if low >= end), len(self._free))
        if place < len(self._free) and self._free[place][0] == end:
            end = self._free.pop(place)[1]
        if place > 0 and self._free[place - 1][1] == start:
            place -= 1
            start = self._free.pop(place)[0]
        self._free.insert(place, (start, end))
