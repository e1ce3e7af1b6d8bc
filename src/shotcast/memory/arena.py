"""The arena: one device's symmetric memory in this process, in blocks that are leased to communicators.

A *block* is mapped among some processes, its members. A *lease* is a part of a block for one communicator, all of whose
ranks are members. Each rank takes the first sufficiently large part of its memory, so a lease may begin at different
offsets on different ranks. If no block has room on every rank, the ranks allocate a new one.

A rank that closes its lease does not wait, but other ranks may still store into its memory. So every rank that closes
leaves a mark in the memory of all ranks of the lease, after the communicator's part, and memory is leased again once
all its marks are set, which a killed rank never does.

A block without open leases is released; small ones are kept while other blocks have open leases. Releasing GPU memory
waits for all work on the GPU, and is not allowed in a graph capture. So GPU blocks stay available for leasing until a
communicator that has already waited for the GPU calls :meth:`Arena.release`, or a new lease needs their memory.
"""

from __future__ import annotations

import functools
import itertools
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from shotcast.errors import ClosedError, ConfigError
from shotcast.memory.holdings import HeldMemory, Notice
from shotcast.memory.host_group import StoreGroup
from shotcast.memory.symmetric import Part, ShareTarget, SymmetricBuffer, nbytes_of_view, raise_failures, take_first
from shotcast.units import align_up

PAGE = 4096
"""The alignment of leases in bytes; one page of each is for the marks of ranks that have closed it."""
KEPT_BYTES = 128 << 20
"""The most bytes of empty blocks to keep while other blocks are in use."""

Allocate = Callable[[StoreGroup, int], SymmetricBuffer]
"""``allocate(group, nbytes)`` maps new memory among the ranks of ``group``, or raises on all of them. Collective."""


class Process:
    """A process that may be a member of blocks, with its arenas by device."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(8)
        self.numbers = itertools.count()
        self.arenas: dict[str, Arena] = {}
        self.notice = Notice()


@dataclass(slots=True, eq=False)
class _Block:
    """Memory that is mapped among its members."""

    name: str  # the same on all members
    members: tuple[str, ...]  # the processes, in the order of the buffer's ranks
    own: int  # this process's place among the members
    buffer: SymmetricBuffer
    multicast: bool  # the memory of every member has a multicast address
    parts: list[Part] = field(default_factory=list)  # in the order in which they lie

    def reserve(self, nbytes: int) -> Part | None:
        """Take the first free part of ``nbytes``; return None if there is none."""
        return take_first(self.parts, self._is_free, self.buffer.nbytes, nbytes)

    def marks(self, member: int, start: int, nbytes: int, ranks: int) -> torch.Tensor:
        """Return the words, in a member's memory, that mark which ranks have closed a lease."""
        return self.buffer.view(member, start + nbytes - PAGE, (ranks,), torch.int64)

    def _is_free(self, part: Part) -> bool:
        return all(self.marks(self.own, part.start, part.nbytes, part.ranks).tolist())

    @property
    def in_use(self) -> bool:
        return any(part.open for part in self.parts)


class Lease:
    """A communicator's part of a block; a :class:`~shotcast.memory.symmetric.SymmetricBuffer` with any content.

    ``multicast_address`` is 0 on all ranks if a rank has none. There are no puts to mapped memory.
    """

    targets: tuple[ShareTarget, ...] = ()

    def __init__(self, arena: Arena, block: _Block, part: Part, rank: int, places: Sequence[tuple[int, int]], mc: bool):
        self._arena, self._block, self._part, self._rank = arena, block, part, rank
        self._places = tuple(places)
        self.nbytes = part.nbytes - PAGE
        self.addresses = tuple(block.buffer.addresses[member] + start for member, start in places)
        self.multicast_address = block.buffer.multicast_address + part.start if mc else 0

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if not self._part.open:
            raise ClosedError("this lease of symmetric memory is closed")
        nbytes_of_view("lease", self.nbytes, offset, shape, dtype)
        member, start = self._places[rank]
        return self._block.buffer.view(member, start + offset, shape, dtype)

    def close(self) -> None:
        """Return the memory for good. This rank's work on it must have ended; other ranks' may not. Later calls do
        nothing.
        """
        if not self._part.open:
            return
        for member, start in self._places:
            self._marks(member, start)[self._rank] = 1
        self._marks(*self._places[self._rank]).tolist()  # the marks before this one have landed too
        self._arena.give_back(self._part)

    def abandon(self) -> None:
        """Leave the memory without this rank's mark, so that it is never reused, since work on it may continue."""
        if self._part.open:
            self._arena.give_back(self._part)

    def __del__(self) -> None:
        self.abandon()

    def _marks(self, member: int, start: int) -> torch.Tensor:
        return self._block.marks(member, start, self._part.nbytes, len(self._places))


class Arena:
    """One device's blocks in this process.

    Args:
        granularity: block sizes are multiples of this many bytes.
        wait: waits for all work of the device before a block is released; None if no wait is needed.
    """

    def __init__(
        self, process: Process, granularity: int = PAGE, name: str = "cpu", wait: Callable[[], None] | None = None
    ):
        self._process, self._granularity, self._name, self._wait = process, granularity, name, wait
        self._blocks: list[_Block] = []
        self._communicators = {False: 0, True: 0}
        self._lock = threading.Lock()

    def count(self, exclusive: bool, more: int) -> None:
        """Count a GPU communicator that was created (1) or closed (-1)."""
        with self._lock:
            self._communicators[exclusive] += more
            self._process.notice.say(self._name, self._held())

    @property
    def held(self) -> HeldMemory:
        """The bytes leased now, the bytes of all blocks, and the communicators that use them."""
        self._drop_empty()
        with self._lock:
            return self._held()

    def _held(self) -> HeldMemory:
        leased = sum(part.nbytes for block in self._blocks for part in block.parts if part.open)
        blocks = sum(block.buffer.nbytes for block in self._blocks)
        return HeldMemory(leased, blocks, self._communicators[False], self._communicators[True])

    def lease(self, group: StoreGroup, nbytes: int, allocate: Allocate, multicast: bool) -> Lease:
        """Lease ``nbytes`` on every rank of ``group``. Collective. No rank may still be closing a communicator.

        With ``multicast`` this rank requests a multicast address if there is one. Such an address covers all members of
        a block, at one offset. So if a block has one and all ranks request it, the communicator must have exactly the
        members of the block, and the lease begins at the same offset on all ranks.

        Raises ConfigError on all ranks if one has too little memory; CollectiveTimeout naming ranks that did not
        arrive.
        """
        nbytes = align_up(nbytes, PAGE) + PAGE
        self._drop_empty()
        with self._lock:
            reserved = {block.name: (block, part) for block in self._blocks if (part := block.reserve(nbytes))}
        offered = {name: part.start for name, (_, part) in reserved.items()}
        new_name = f"{self._process.name}/{next(self._process.numbers)}"
        taken: tuple[_Block, Part] | None = None
        try:
            offers = group.all_gather((self._process.name, new_name, offered, multicast))
            members = tuple(offer[0] for offer in offers)
            multicast = all(offer[3] for offer in offers)
            for name in offers[0][2]:
                starts = [offer[2].get(name, -1) for offer in offers]
                if min(starts) >= 0 and _serves(reserved[name][0], members, starts, multicast):
                    taken = reserved.pop(name)
                    break
            else:
                name = offers[0][1]
                starts = [0] * len(members)
        finally:
            with self._lock:
                for block, part in reserved.values():
                    block.parts.remove(part)
        if taken is None:
            taken = self._new_block(group, name, members, nbytes, allocate)
        block, part = taken
        part.ranks = len(members)
        places = [(block.members.index(member), start) for member, start in zip(members, starts, strict=True)]
        lease = Lease(self, block, part, group.rank, places, multicast and block.multicast)
        lease._marks(*places[group.rank]).zero_()
        with self._lock:
            self._process.notice.say(self._name, self._held())
        return lease

    def _new_block(
        self, group: StoreGroup, name: str, members: tuple[str, ...], nbytes: int, allocate: Allocate
    ) -> tuple[_Block, Part]:
        buffer = self._allocated(group, align_up(nbytes, self._granularity), allocate)
        try:
            multicast = all(group.all_gather(bool(buffer.multicast_address)))
        except BaseException:
            buffer.close()
            raise
        block = _Block(name, members, group.rank, buffer, multicast)
        part = block.reserve(nbytes)
        assert part is not None
        with self._lock:
            self._blocks.append(block)
        return block, part

    def _allocated(self, group: StoreGroup, nbytes: int, allocate: Allocate) -> SymmetricBuffer:
        """Allocate a block's buffer. If a rank has too little memory, all ranks first release what they can.

        All must, since a rank's memory is not freed while another has it mapped.
        """
        try:
            return allocate(group, nbytes)
        except ConfigError:
            if self._wait is None or not any(group.all_gather(self._has_empty())):
                raise
        failure = ""
        try:
            self.release()
        except RuntimeError as error:
            failure = f"memory of {self._name} cannot be released now: {error}"
        raise_failures(group, failure)
        return allocate(group, nbytes)

    def _has_empty(self) -> bool:
        with self._lock:
            return not all(block.in_use for block in self._blocks)

    def give_back(self, part: Part) -> None:
        """Record that this rank has closed a lease, and release blocks not worth keeping if that needs no wait.

        A lease may be garbage-collected at any moment. If the arena is in use then, its next use releases the blocks.
        """
        part.open = False
        self._drop_empty(blocking=False)

    def release(self) -> None:
        """Wait for the device, and release the blocks not worth keeping. Raises RuntimeError, and releases nothing, if
        it cannot wait for the device, such as during a graph capture.
        """
        if self._wait is not None and self._has_empty():
            self._wait()
        with self._lock:
            unused = self._take_empty()
        for block in unused:  # without the lock, as it may wait for work of other threads
            block.buffer.close()

    def _drop_empty(self, blocking: bool = True) -> None:
        if self._lock.acquire(blocking):
            try:
                for block in () if self._wait else self._take_empty():
                    block.buffer.close()
                self._process.notice.say(self._name, self._held())
            finally:
                self._lock.release()

    def _take_empty(self) -> list[_Block]:
        """Remove and return the blocks not worth keeping, for the caller to close."""
        empty = [block for block in self._blocks if not block.in_use]
        kept = KEPT_BYTES if len(empty) < len(self._blocks) else 0
        taken = []
        for block in reversed(empty):  # the latest first
            kept -= block.buffer.nbytes
            if kept < 0:
                self._blocks.remove(block)
                taken.append(block)
        self._process.notice.say(self._name, self._held())
        return taken


def _serves(block: _Block, members: Sequence[str], starts: Sequence[int], multicast: bool) -> bool:
    """Return whether ``block`` can serve a lease of ``members`` with room at ``starts``."""
    if not multicast or not block.multicast:
        return set(members) <= set(block.members)
    return set(members) == set(block.members) and len(set(starts)) == 1


_process = Process()
_forked: list[Process] = []
"""The states of parent processes. A child must not release them."""


def _after_fork() -> None:
    global _process
    _process.notice.forget()
    _forked.append(_process)
    _process = Process()


os.register_at_fork(after_in_child=_after_fork)


def arena_of(device: torch.device) -> Arena:
    """Return this process's arena for a device; there is one for all CPU ranks' shared memory."""
    name = str(device)
    if device.type == "cpu":
        return _process.arenas.setdefault(name, Arena(_process, PAGE, name))
    wait = functools.partial(torch.cuda.synchronize, device)
    return _process.arenas.setdefault(name, Arena(_process, 2 << 20, name, wait))


def held() -> dict[str, HeldMemory]:
    """Return the symmetric memory that this process holds, by device."""
    return {name: arena.held for name, arena in _process.arenas.items()}
