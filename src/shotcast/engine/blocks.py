"""Which blocks of the paged cache hold what, and who may read them. Numbers only: the memory is the ranks'."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from shotcast.errors import ConfigError


class BlockManager:
    """Hands out blocks of the cache, counts who holds them, and finds those that hold a prefix again.

    A full block is known by a digest of 128 bits of its tokens and all before them. A block that nobody holds keeps its
    contents until it is handed out again, the one longest out of use first.

    Args:
        num_blocks: of the cache.
        block_size: tokens a block.
        prefix_caching: find prefixes again; otherwise every block that nobody holds is empty.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._holders = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # held by nobody, contents published; longest idle first

    @property
    def free(self) -> int:
        """Blocks that :meth:`allocate` can hand out."""
        return len(self._empty) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.free

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-tokens // self.block_size)

    def extend_digests(self, digests: list[bytes], tokens: Sequence[int], count: int) -> None:
        """Append the digests of the full blocks of ``tokens`` that ``digests`` lacks, up to ``count`` of them."""
        for block in range(len(digests), count):
            content = array("q", tokens[block * self.block_size : (block + 1) * self.block_size]).tobytes()
            digests.append(blake2b(content, digest_size=16, key=digests[-1] if digests else b"").digest())

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """The published blocks of the longest prefix of ``digests``. They are not held yet: see :meth:`hold`."""
        blocks = []
        for digest in digests:
            block = self._published.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def fits(self, matched: Iterable[int], count: int) -> bool:
        """Whether ``count`` blocks could be handed out after ``matched`` are held."""
        return self.free - sum(block in self._idle for block in matched) >= count

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holds each of ``blocks``, found by :meth:`match`."""
        for block in blocks:
            self._holders[block] += 1
            self._idle.pop(block, None)

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks, each held once. What they held is forgotten.

        Raises:
            ConfigError: fewer are free.
        """
        if count > self.free:
            raise ConfigError(f"{count} blocks are asked for and {self.free} of {self.num_blocks} are free")
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            digest = self._digests[block]
            assert digest is not None
            del self._published[digest]
            self._digests[block] = None
        self._holders[block] = 1
        return block

    def publish(self, block: int, digest: bytes) -> None:
        """From now on ``block``, which the caller holds and which is full, is found by its digest.

        If another block is found by it already, that one stays.
        """
        if digest not in self._published:
            self._published[digest] = block
            self._digests[block] = digest

    def withdraw(self, digests: Iterable[bytes]) -> None:
        """The blocks of ``digests`` are not found any more: what they hold is not to be used again."""
        for digest in digests:
            block = self._published.pop(digest, None)
            if block is None:
                continue
            self._digests[block] = None
            if block in self._idle:
                del self._idle[block]
                self._empty.append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """One fewer holds each of ``blocks``, a sequence's in order: the ends of prefixes are reused before the starts.

        Raises:
            ConfigError: nobody holds one of them.
        """
        for block in reversed(blocks):
            if not self._holders[block]:
                raise ConfigError(f"block {block} is released, and nobody holds it")
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if self._digests[block] is None:
                self._empty.append(block)
            else:
                self._idle[block] = None
