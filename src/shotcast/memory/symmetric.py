"""The interface of symmetric memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from shotcast.errors import ConfigError
from shotcast.memory.host_group import StoreGroup
from shotcast.units import about_size


class SymmetricBuffer(Protocol):
    """``nbytes`` of memory on every rank, mapped by all of them.

    ``addresses[r]`` is the address of rank r's bytes in *this* process (or on this process's GPU);
    ``multicast_address`` is an address whose stores reach all ranks at once, or 0. New memory is zero. The owner closes
    it, which ends its views.
    """

    @property
    def nbytes(self) -> int: ...

    @property
    def addresses(self) -> tuple[int, ...]: ...

    @property
    def multicast_address(self) -> int: ...

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return rank ``rank``'s bytes from ``offset`` on as a tensor. Raises ConfigError beyond the end."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Part:
    """A part of this process's memory of a block, reserved or leased."""

    start: int  # where it lies in the block
    nbytes: int
    ranks: int = 0  # of the communicator; 0 until it is known
    open: bool = True  # this rank has not closed it
    closings: Callable[[], int] = int  # counts the ranks that have closed it, where they leave no marks in it


def take_first(parts: list[Part], is_free: Callable[[Part], bool], size: int, nbytes: int) -> Part | None:
    """Add the first part of ``nbytes`` that ``parts`` leave free in ``size`` bytes; return None if there is none.

    First drops parts that this rank has closed and that are free.
    """
    parts[:] = [part for part in parts if part.open or not is_free(part)]
    end = 0
    for position, part in enumerate((*parts, Part(size, 0))):
        if part.start - end >= nbytes:
            parts.insert(position, taken := Part(end, nbytes))
            return taken
        end = part.start + part.nbytes
    return None


def nbytes_of_view(owner: str, nbytes: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the size in bytes of a view from ``offset``. Raises ConfigError if it exceeds its owner's ``nbytes``."""
    viewed = math.prod(shape) * dtype.itemsize
    if offset < 0 or offset + viewed > nbytes:
        raise ConfigError(f"{list(shape)} of {dtype} at byte {offset} exceeds the {owner}'s {nbytes} bytes")
    return viewed


class ShareTarget(NamedTuple):
    """A rank's part of symmetric memory, as another rank sees it."""

    pe: int  # the rank's number in NVSHMEM
    address: int  # for puts: where the part would be in this process's memory
    mapped: int  # where this GPU has it; 0 where only puts reach it


def shortage(device: torch.device, what: str, error: RuntimeError) -> str:
    """Describe a failure to allocate memory for ``what`` on ``device``, with the free memory if it is a GPU."""
    why = str(error).partition("\n")[0]
    if device.type != "cuda":
        return f"{device} cannot hold {what}: {why}"
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"{device} cannot hold {what}: {about_size(free)} of {about_size(total)} are free ({why}). Use a smaller "
        "max_bytes, or leave more memory free"
    )


def raise_failures(group: StoreGroup, failure: str) -> None:
    """Raise ConfigError on every rank if any rank reports a failure, naming all failed ranks. Collective.

    ``failure`` is empty if nothing failed on this rank.
    """
    failures = group.all_gather(failure)
    if message := "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text):
        raise ConfigError(message)
