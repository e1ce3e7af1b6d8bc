"""The block manager: the contents of the blocks of the paged cache, and the sequences that use them.

It works with block numbers only; the memory belongs to the ranks.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from hashlib import blake2b


class PrefixMatch:
    """The blocks of the longest known prefix of one sequence, kept up to date while the sequence waits."""

    __slots__ = ("_positions", "blocks", "digests", "idle")

    def __init__(self, digests: Sequence[bytes]):
        self.digests = digests  # of the sequence
        self.blocks: list[int] = []  # the published blocks of its first digests, in order
        self.idle = 0  # how many of ``blocks`` have no references
        self._positions: dict[int, int] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._positions

    def append(self, block: int, idle: bool) -> None:
        """Add the block of the next digest."""
        self._positions[block] = len(self.blocks)
        self.blocks.append(block)
        self.idle += idle

    def cut(self, block: int, idle_blocks: Container[int]) -> None:
        """Remove ``block`` and all blocks after it."""
        start = self._positions[block]
        for later in self.blocks[start:]:
            del self._positions[later]
            self.idle -= later in idle_blocks
        del self.blocks[start:]


class BlockManager:
    """Hands out cache blocks, counts their references, and finds blocks that hold a known prefix.

    A full block is identified by a digest of 128 bits of its tokens and all tokens before them. A block without
    references keeps its contents until it is handed out again, least recently used first.

    Args:
        prefix_caching: reuse known prefixes; otherwise every block without references is empty.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._ref_counts = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # published blocks without references, longest idle first
        self._match = PrefixMatch(())

    @property
    def free(self) -> int:
        """Blocks that :meth:`allocate` can hand out."""
        return len(self._empty) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks with references."""
        return self.num_blocks - self.free

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks this many tokens need."""
        return -(-tokens // self.block_size)

    def extend_digests(self, digests: list[bytes], tokens: Sequence[int], count: int) -> None:
        """Append the missing digests of full blocks of ``tokens``, until ``digests`` has ``count`` of them."""
        for block in range(len(digests), count):
            content = array("q", tokens[block * self.block_size : (block + 1) * self.block_size]).tobytes()
            digests.append(blake2b(content, digest_size=16, key=digests[-1] if digests else b"").digest())

    def match(self, digests: Sequence[bytes], count: int) -> PrefixMatch:
        """Return the longest known prefix of the first ``count`` of ``digests``.

        This adds no references; see :meth:`acquire`. The match of one list of digests is kept up to date until another
        list is matched, so matching the head of a queue again takes no time.
        """
        if self._match.digests is not digests:
            self._match = PrefixMatch(digests)
        match = self._match
        if len(match.blocks) > count:
            match.cut(match.blocks[count], self._idle)
        while len(match.blocks) < count and (block := self._published.get(digests[len(match.blocks)])) is not None:
            match.append(block, block in self._idle)
        return match

    def fits(self, match: PrefixMatch, count: int) -> bool:
        """Return whether ``count`` blocks could be handed out after acquiring the blocks of ``match``."""
        return self.free - match.idle >= count

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of ``blocks``, which :meth:`match` found."""
        for block in blocks:
            self._ref_counts[block] += 1
            if block in self._idle:
                del self._idle[block]
                self._match.idle -= block in self._match

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks, at most :attr:`free`, with one reference each."""
        return [self._allocate_one() for _ in range(count)]

    def _allocate_one(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block = next(iter(self._idle))
            self._forget(block)
            del self._idle[block]
            digest = self._digests[block]
            assert digest is not None
            del self._published[digest]
            self._digests[block] = None
        self._ref_counts[block] = 1
        return block

    def publish(self, block: int, digest: bytes) -> None:
        """Make ``block``, which is full and held by the caller, available to :meth:`match` under its digest.

        If another block is already published under this digest, it stays.
        """
        if digest not in self._published:
            self._published[digest] = block
            self._digests[block] = digest

    def withdraw(self, digests: Iterable[bytes]) -> None:
        """Withdraw the blocks of ``digests``, whose contents must not be reused."""
        for digest in digests:
            block = self._published.pop(digest, None)
            if block is None:
                continue
            self._forget(block)
            self._digests[block] = None
            if block in self._idle:
                del self._idle[block]
                self._empty.append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each of a sequence's ``blocks``, which are in order.

        The ends of prefixes are reused before their beginnings.
        """
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            if self._digests[block] is None:
                self._empty.append(block)
            else:
                self._idle[block] = None
                self._match.idle += block in self._match

    def _forget(self, block: int) -> None:
        """Remove a block that can no longer be found from the match."""
        if block in self._match:
            self._match.cut(block, self._idle)
