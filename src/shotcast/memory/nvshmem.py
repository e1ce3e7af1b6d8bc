"""NVSHMEM's symmetric heap: GPU memory that other nodes can put into, leased in parts to communicators.

The processes that initialize NVSHMEM together are its *PEs*: the ranks of the first communicator that leases here.
Later communicators must use ranks of that set. NVSHMEM allocates only with all PEs at once, so memory comes in
*blocks*, one per PE, of which communicators lease parts.

NVSHMEM's collective functions have no deadline. Ranks meet through the job's store before they call one, so that an
absent rank is named, and the call runs on a thread that ranks stop waiting for at their deadline. NVSHMEM is never
finalized, which would wait for all PEs: process exit releases everything.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shotcast.errors import ClosedError, ConfigError
from shotcast.memory import driver, nvshmem_library
from shotcast.memory.host_group import StoreGroup
from shotcast.memory.symmetric import Part, ShareTarget, nbytes_of_view, raise_failures, take_first
from shotcast.units import about_size, align_up

T = TypeVar("T")

PAGE = 4096
"""The alignment of leases in bytes."""
BLOCK_BYTES = 64 << 20
"""Block sizes are multiples of this many bytes."""
_DEADLINE_S = 120.0
"""The time limit of a collective NVSHMEM function once all ranks have arrived."""
_QUIET_S = 2.0
"""The time limit for events that may never occur: completion of puts, and ranks waiting with one that died."""


@dataclass(slots=True, eq=False)
class _HeapBlock:
    """Memory that all PEs have: its address here, and this process's part as bytes."""

    address: int
    memory: torch.Tensor
    parts: list[Part] = field(default_factory=list)

    def reserve(self, nbytes: int) -> Part | None:
        """Take the first free part of ``nbytes``; return None if there is none."""
        return take_first(self.parts, _is_free, self.memory.numel(), nbytes)


def _is_free(part: Part) -> bool:
    try:
        return part.ranks > 0 and part.closings() == part.ranks
    except RuntimeError:  # the store has gone, and with it the word of the others
        return False


class HeapLease:
    """A communicator's part of the heap, uninitialized, into which ranks of other nodes can put.

    It is the :class:`~shotcast.memory.symmetric.SymmetricBuffer` of a node's ranks: ``addresses`` are 0 for ranks on
    other nodes. ``targets`` cover all ranks, including this one. NVSHMEM's multicast addresses belong to teams and are
    not used.
    """

    multicast_address = 0

    def __init__(
        self,
        library: nvshmem_library.Library,
        block: _HeapBlock,
        part: Part,
        rank: int,
        mates: Collection[int],
        targets: Sequence[ShareTarget],
        closings: dist.Store,
    ):
        self._library, self._block, self._part, self._closings = library, block, part, closings
        self._rank = rank
        self.nbytes = part.nbytes
        self.targets = tuple(targets)
        self.addresses = tuple(target.mapped if other in mates else 0 for other, target in enumerate(self.targets))

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if rank != self._rank:
            raise ConfigError(f"rank {self._rank} has no tensor of rank {rank}'s memory of NVSHMEM")
        if not self._part.open:
            raise ClosedError("this lease of NVSHMEM's memory is closed")
        nbytes = nbytes_of_view("lease", self.nbytes, offset, shape, dtype)
        start = self._part.start + offset
        return self._block.memory[start : start + nbytes].view(dtype).view(tuple(shape))

    def close(self) -> None:
        """Return the memory for good. This rank's kernels must have ended; other ranks' may not. Later calls do
        nothing.

        The memory is leased again once all ranks have returned it with their puts complete.
        """
        if not self._part.open:
            return
        self._part.open = False
        if self.settle():
            with contextlib.suppress(RuntimeError):  # the store has gone: nobody leases any more
                self._closings.add("closed", 1)

    def abandon(self) -> None:
        """Leave the memory without this rank's mark, so that it is never reused, since work on it may continue."""
        self._part.open = False

    def __del__(self) -> None:
        self.abandon()

    def settle(self) -> bool:
        """Return whether this GPU's puts complete soon. Puts to a killed rank may never complete."""
        if all(target.mapped for target in self.targets):
            return True  # they are stores, which end with their kernel
        with torch.cuda.device(self._block.memory.device):
            stream = torch.cuda.Stream()
            self._library.complete_puts(stream.cuda_stream)
            deadline = time.monotonic() + _QUIET_S
            while not stream.query():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
        return True


class Heap:
    """This process's symmetric heap.

    ``library`` raises ConfigError if NVSHMEM is missing; ``memory_at(address, nbytes, device)`` returns the bytes at an
    address as a tensor.
    """

    def __init__(
        self,
        library: Callable[[], nvshmem_library.Library],
        memory_at: Callable[[int, int, torch.device], torch.Tensor],
    ):
        self._find, self._memory_at = library, memory_at
        self._set = ""
        """The name of the set of PEs; empty before this process joins one, or if another NVSHMEM user made it a PE."""
        self._device: torch.device | None = None
        self._broken = ""
        self._blocks: list[_HeapBlock] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def lease(self, group: StoreGroup, nbytes: int, device: torch.device, mates: Collection[int]) -> HeapLease:
        """Lease ``nbytes`` on every rank of ``group``. Collective.

        ``mates`` are the ranks of this rank's node, including itself, which store to each other's memory. Raises
        ConfigError on all ranks if NVSHMEM is missing, cannot be initialized, has too little memory or does not map the
        memory of ``mates``; raises CollectiveTimeout for ranks that did not arrive.
        """
        library, pes = self._join(group, device)
        nbytes = align_up(nbytes, PAGE)
        with self._lock:
            reserved = {number: part for number, block in enumerate(self._blocks) if (part := block.reserve(nbytes))}
        chosen = None
        try:
            offers = group.all_gather({number: part.start for number, part in reserved.items()})
            chosen = next((number for number in reserved if all(number in offer for offer in offers)), None)
        finally:
            with self._lock:
                for number, unused in reserved.items():
                    if number != chosen:
                        self._blocks[number].parts.remove(unused)
        if chosen is None:
            self._add_block(group, nbytes, library, device)
            chosen, starts = len(self._blocks) - 1, [0] * group.world_size
            part = self._blocks[chosen].reserve(nbytes)
            assert part is not None
        else:
            part, starts = reserved[chosen], [offer[chosen] for offer in offers]
        name = group.all_gather(f"{secrets.token_hex(8)}/{next(self._numbers)}")[0]
        closings, block = group.store(f"nvshmem/{name}"), self._blocks[chosen]
        part.ranks, part.closings = group.world_size, lambda: int(closings.add("closed", 0))
        targets = [
            ShareTarget(pe, block.address + start, library.mapped(block.address + start, pe))
            for pe, start in zip(pes, starts, strict=True)
        ]
        lease = HeapLease(library, block, part, group.rank, mates, targets, closings)
        unmapped = [mate for mate in mates if not lease.addresses[mate]]
        raise_failures(group, f"NVSHMEM does not map the memory of ranks {unmapped} of this node" if unmapped else "")
        return lease

    def _join(self, group: StoreGroup, device: torch.device) -> tuple[nvshmem_library.Library, list[int]]:
        """Make the ranks PEs if they are not yet; return the library and their PE numbers by rank."""
        failure, library = self._broken, None
        try:
            library = self._find()
        except (ConfigError, OSError) as error:
            failure = str(error)
        if self._device not in (None, device):
            failure = f"this process uses NVSHMEM on {self._device}, so not on {device}"
        raise_failures(group, failure)
        assert library is not None
        states = group.all_gather((library.initialised, self._set, library.pes if library.initialised else 0))
        if not any(state[0] for state in states):
            unique_id = group.all_gather(library.unique_id() if group.rank == 0 else b"")[0]

            def initialise() -> None:
                library.initialise(group.rank, group.world_size, unique_id)

            self._together(group, device, initialise, "initialising NVSHMEM")
            self._set = unique_id.hex()
        elif len(set(states)) > 1:
            raise ConfigError(
                "the ranks are not all in one set of NVSHMEM's PEs, and a process cannot join a second one; let the "
                "first communicator that uses NVSHMEM have all the ranks of later ones"
            )
        self._device = device
        return library, group.all_gather(library.pe)

    def _add_block(
        self, group: StoreGroup, nbytes: int, library: nvshmem_library.Library, device: torch.device
    ) -> None:
        if group.world_size < library.pes:
            raise ConfigError(
                f"NVSHMEM's memory has no {about_size(nbytes)} more for {group.world_size} of its {library.pes} PEs, "
                f"and only all PEs together can allocate; let the communicator of all of them take more (max_bytes) "
                f"before it is split, and close it"
            )
        nbytes = align_up(nbytes, BLOCK_BYTES)
        address = self._together(group, device, lambda: library.allocate(nbytes), "allocating memory of NVSHMEM")
        memory = self._memory_at(address, nbytes, device)
        memory.zero_()
        with self._lock:
            self._blocks.append(_HeapBlock(address, memory))

    def _together(self, group: StoreGroup, device: torch.device, call: Callable[[], T], what: str) -> T:
        """Run ``call``, a collective NVSHMEM function, and return its result once it has returned on all ranks."""
        done: list[T] = []
        failures: list[str] = []

        def run() -> None:
            try:
                with _current(device):
                    done.append(call())
            except RuntimeError as error:
                failures.append(str(error))

        thread = threading.Thread(target=run, name=what, daemon=True)
        thread.start()
        deadline = time.monotonic() + _DEADLINE_S
        while thread.is_alive():
            thread.join(0.05)
            if group.gone:
                deadline = min(deadline, time.monotonic() + _QUIET_S)
            if thread.is_alive() and time.monotonic() > deadline:
                self._broken = f"{what} did not end, as another rank did not take part; start the processes again"
                gone = sorted(group.gone)
                raise group.timeout(gone, what, 0, _DEADLINE_S, "dead" if gone else "late")
        if failures:
            self._broken = failures[0]
        raise_failures(group, "; ".join(failures))
        return done[0]


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a GPU and its context current on this thread within the block."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    torch.cuda.synchronize(device)  # the runtime makes its context current on this thread
    return torch.cuda.device(device)


def _memory_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Wrap GPU memory in a tensor that does not own it."""
    return torch.as_tensor(driver.GpuBytes(address, nbytes), device=device)


HEAP = Heap(nvshmem_library.library, _memory_at)
"""This process's symmetric heap."""
