"""The limits of a multiprocessor (SM), how many blocks it holds at once, and what one kernel leaves to another.

An SM gives each block registers, warps, shared memory and barriers for as long as the block runs. A block starts where
all of these are free, so a kernel that communicates can run beside a product if the product's blocks leave enough of
each. All SMs are taken to have as much shared memory as they can have, as products of
:mod:`matmuls` ask for: an SM cannot change that share while a block runs.

Blocks are placed one by one, and each warp in the sub-partition that has most registers free. For blocks of one kernel
that gives exactly what CUDA's occupancy calculator gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shotcast.errors import ConfigError, UnsupportedError

WARP_THREADS = 32


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """The limits of one SM. Registers, of 32 bits, and warps are divided equally among its sub-partitions.

    Attributes:
        max_threads: of all blocks.
        max_blocks: blocks at once.
        max_barriers: named barriers of all blocks; None for no limit.
        shared_bytes: shared memory of all blocks, where as little as possible is cache.
        registers: of all blocks.
        sub_partitions: parts, each with a scheduler, warps and registers of its own.
        register_unit: registers that are allocated to a warp together.
        shared_unit: bytes of shared memory that are allocated to a block together.
        reserved_shared_bytes: shared memory of each block that the driver takes for itself.
        max_block_threads: threads of one block.
        max_thread_registers: registers of one thread.
    """

    max_threads: int
    max_blocks: int
    max_barriers: int | None
    shared_bytes: int
    registers: int = 65536
    sub_partitions: int = 4
    register_unit: int = 256
    shared_unit: int = 128
    reserved_shared_bytes: int = 1024
    max_block_threads: int = 1024
    max_thread_registers: int = 255

    @property
    def max_block_shared_bytes(self) -> int:
        """Shared memory that one block may ask for."""
        return self.shared_bytes - self.reserved_shared_bytes


MULTIPROCESSORS = {
    (8, 0): Multiprocessor(2048, 32, None, 164 << 10),
    (8, 6): Multiprocessor(1536, 16, None, 100 << 10),
    (8, 9): Multiprocessor(1536, 24, None, 100 << 10),
    (9, 0): Multiprocessor(2048, 32, 64, 228 << 10),
    (10, 0): Multiprocessor(2048, 32, 64, 228 << 10),
    (12, 0): Multiprocessor(1536, 24, 24, 100 << 10),
}
"""By compute capability. Source: CUDA C++ Programming Guide, technical specifications per compute capability; units of
allocation and barriers from the occupancy calculator of CUDA 13 (cuda_occupancy.h)."""


def multiprocessor(compute_capability: tuple[int, int]) -> Multiprocessor:
    """Return the limits of an SM of this compute capability.

    Raises:
        UnsupportedError: they are not known.
    """
    try:
        return MULTIPROCESSORS[compute_capability]
    except KeyError:
        known = ", ".join(f"{major}.{minor}" for major, minor in MULTIPROCESSORS)
        raise UnsupportedError(
            f"the limits of an SM of compute capability {compute_capability[0]}.{compute_capability[1]} are not known; "
            f"those of {known} are"
        ) from None


@dataclass(frozen=True, slots=True)
class Kernel:
    """The needs of one block of a kernel on an SM.

    Attributes:
        registers: of a thread.
        threads: of a block.
        shared_bytes: static and dynamic shared memory of a block, without what the driver reserves.
        barriers: named barriers of a block.
    """

    registers: int
    threads: int
    shared_bytes: int
    barriers: int = 1

    def __post_init__(self) -> None:
        if self.threads < 1 or min(self.registers, self.shared_bytes, self.barriers) < 0:
            raise ConfigError(f"a block has at least one thread, and nothing below zero: {self}")

    @property
    def warps(self) -> int:
        return math.ceil(self.threads / WARP_THREADS)


Resident = Sequence[tuple[Kernel, int]]
"""Kernels that run on an SM, each with its number of blocks there."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """The part of an SM that is left.

    Attributes:
        blocks: how many blocks may still start.
        threads: threads that these may have in all.
        registers: registers, in all sub-partitions together.
        shared_bytes: the most shared memory that one more block may ask for.
    """

    blocks: int
    threads: int
    registers: int
    shared_bytes: int


class _State:
    """An SM on which blocks are placed."""

    def __init__(self, sm: Multiprocessor):
        self.sm = sm
        self.blocks = sm.max_blocks
        self.barriers = math.inf if sm.max_barriers is None else sm.max_barriers
        self.shared_bytes = sm.shared_bytes
        self.registers = [sm.registers // sm.sub_partitions] * sm.sub_partitions
        self.warps = [sm.max_threads // WARP_THREADS // sm.sub_partitions] * sm.sub_partitions

    def place(self, kernel: Kernel) -> bool:
        """Place a block and return True, or return False if it does not fit."""
        sm = self.sm
        warp_registers = _round_up(kernel.registers * WARP_THREADS, sm.register_unit)
        shared_bytes = _round_up(kernel.shared_bytes + sm.reserved_shared_bytes, sm.shared_unit)
        if (
            kernel.threads > sm.max_block_threads
            or kernel.registers > sm.max_thread_registers
            or self.blocks < 1
            or self.barriers < kernel.barriers
            or self.shared_bytes < shared_bytes
        ):
            return False
        registers, warps = list(self.registers), list(self.warps)
        for _ in range(kernel.warps):
            place = max(range(sm.sub_partitions), key=lambda part: (warps[part] > 0, registers[part], warps[part]))
            if not warps[place] or registers[place] < warp_registers:
                return False
            registers[place] -= warp_registers
            warps[place] -= 1
        self.registers, self.warps = registers, warps
        self.blocks -= 1
        self.barriers -= kernel.barriers
        self.shared_bytes -= shared_bytes
        return True

    @classmethod
    def with_blocks(cls, resident: Resident, sm: Multiprocessor) -> _State:
        state = cls(sm)
        for kernel, blocks in resident:
            for _ in range(blocks):
                if not state.place(kernel):
                    raise ConfigError(f"{blocks} blocks of {kernel} do not fit on an SM with the others of {resident}")
        return state


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def resident_blocks(kernel: Kernel, sm: Multiprocessor) -> int:
    """Return how many blocks of a kernel an SM holds at once, if it runs nothing else."""
    return fits_beside(kernel, (), sm)


def fits_beside(kernel: Kernel, resident: Resident, sm: Multiprocessor) -> int:
    """Return how many blocks of a kernel fit on an SM that holds ``resident``.

    Raises:
        ConfigError: those do not fit together.
    """
    state, count = _State.with_blocks(resident, sm), 0
    while state.place(kernel):
        count += 1
    return count


def room_beside(resident: Resident, sm: Multiprocessor) -> Leftover:
    """Return what is left of an SM that holds ``resident``.

    Raises:
        ConfigError: those do not fit together.
    """
    state = _State.with_blocks(resident, sm)
    free = state.shared_bytes // sm.shared_unit * sm.shared_unit - sm.reserved_shared_bytes
    return Leftover(state.blocks, sum(state.warps) * WARP_THREADS, sum(state.registers), max(0, free))


@dataclass(frozen=True, slots=True)
class Room:
    """The part of a GPU that a product leaves while it runs.

    Attributes:
        sm: the limits of each SM.
        free_sms: SMs that run none of its blocks.
        busy_sms: SMs that run its blocks.
        resident: its blocks on each of those; None if they are not known, which counts as a full SM.
    """

    sm: Multiprocessor
    free_sms: int
    busy_sms: int
    resident: Resident | None

    @property
    def beside(self) -> Leftover:
        """The part of each busy SM that is left."""
        return Leftover(0, 0, 0, 0) if self.resident is None else room_beside(self.resident, self.sm)

    def blocks_of(self, kernel: Kernel) -> int:
        """Return how many blocks of a kernel run at once beside the product."""
        beside = 0 if self.resident is None else fits_beside(kernel, self.resident, self.sm)
        return self.free_sms * resident_blocks(kernel, self.sm) + self.busy_sms * beside
