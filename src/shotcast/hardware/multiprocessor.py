"""Limits of a multiprocessor (SM) by compute capability: how much of it blocks of threads can hold at once."""

from __future__ import annotations

from dataclasses import dataclass

from shotcast.errors import UnsupportedError

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
