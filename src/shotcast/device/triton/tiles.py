"""The numbers of words and warps with which a program holds a row, for host and kernels."""

from __future__ import annotations

MAX_ROW_WORDS = 8192
"""The largest number of 32-bit words of a row that one program normalizes: 16 a thread, of 16 warps."""


def row_tile(words: int) -> tuple[int, int]:
    """Return (words of the tile, warps of the program) for a row of ``words`` words.

    They depend on nothing else, so neither does the order in which a row's squares are summed: fused or not, in one
    shot or two, the bits are the same. A thread holds 8 words, for the longest rows 16.
    """
    block = max(16, 1 << (words - 1).bit_length())
    return block, max(1, min(16, block // 256))


def slots_at_once(block: int, warps: int) -> int:
    """Return the number of tiles of a row that a program polls at once: 32 words a thread, a quarter of its
    registers."""
    return 32 * 32 * warps // block
