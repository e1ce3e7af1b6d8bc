"""The number of blocks that a multiprocessor (SM) holds at once, and what one kernel leaves to another.

An SM gives each block registers, warps, shared memory and barriers for as long as the block runs. A block starts where
all of these are free, so a kernel that communicates can run beside a product if the product's blocks leave enough of
each. All SMs are taken to have as much shared memory as they can have, as products of
:mod:`shotcast.overlap.products` ask for: an SM cannot change that share while a block runs.

Blocks are placed one by one, and each warp in the sub-partition that has most registers free. For blocks of one kernel
that gives exactly what CUDA's occupancy calculator gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shotcast.errors import ConfigError
from shotcast.hardware.multiprocessor import WARP_THREADS, Multiprocessor


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
