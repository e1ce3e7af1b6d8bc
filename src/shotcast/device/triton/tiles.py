"""Row tiles: how many words and warps a program uses to hold a row, for host and kernels."""

from __future__ import annotations

MAX_ROW_WORDS = 8192
"""The most 32-bit words in a row that one program normalizes: 16 words a thread with 16 warps."""


def row_tile(words: int) -> tuple[int, int]:
    """Return (words of the tile, warps of the program) for a row of ``words`` words.

    They depend on nothing else, so the order in which a row's squares are summed does not either: fused or not, in one
    shot or two, the bits are the same. A thread holds 8 words, or 16 for the longest rows.
    """
    block = max(16, 1 << (words - 1).bit_length())
    return block, max(1, min(16, block // 256))
