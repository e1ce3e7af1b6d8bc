"""The block manager: references, prefixes that are found again, and the order of eviction."""

from __future__ import annotations

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from shotcast.engine.block_manager import BlockManager


def filled(manager: BlockManager, tokens: list[int]) -> tuple[list[int], list[bytes]]:
    """Allocate and publish the full blocks of ``tokens``."""
    digests: list[bytes] = []
    manager.extend_digests(digests, tokens, len(tokens) // manager.block_size)
    blocks = manager.allocate(len(digests))
    for block, digest in zip(blocks, digests, strict=True):
        manager.publish(block, digest)
    return blocks, digests


def found(manager: BlockManager, digests: list[bytes]) -> list[int]:
    return list(manager.match(digests, len(digests)).blocks)


def test_a_prefix_is_found_again_and_a_block_in_use_stays() -> None:
    manager = BlockManager(3, 2)
    blocks, digests = filled(manager, [1, 2, 3, 4])
    manager.release(blocks)
    assert (manager.free, manager.used) == (3, 0)
    assert found(manager, digests) == blocks
    manager.acquire(blocks[:1])
    others = manager.allocate(2)
    assert blocks[0] not in others
    assert found(manager, digests) == blocks[:1]
    assert manager.free == 0


def test_the_longest_idle_block_is_evicted_first_and_ends_before_starts() -> None:
    manager = BlockManager(4, 1)
    old, old_digests = filled(manager, [1, 2])
    new, new_digests = filled(manager, [3, 4])
    manager.release(old)
    manager.release(new)
    assert manager.allocate(1) == old[1:]
    assert found(manager, old_digests) == old[:1]
    assert manager.allocate(1) == old[:1]
    assert found(manager, old_digests) == []
    assert found(manager, new_digests) == new


def test_an_empty_block_is_handed_out_before_a_published_one() -> None:
    manager = BlockManager(2, 1)
    blocks, digests = filled(manager, [1])
    manager.release(blocks)
    manager.allocate(1)
    assert found(manager, digests) == blocks


def test_a_block_that_is_handed_out_again_is_not_found() -> None:
    manager = BlockManager(2, 1)
    blocks, digests = filled(manager, [1, 2])
    manager.release(blocks)
    manager.release(manager.allocate(2))  # nothing was published
    assert found(manager, digests) == []
    filled(manager, [1, 2])
    assert len(found(manager, digests)) == 2


def test_matched_idle_blocks_are_not_counted_twice() -> None:
    manager = BlockManager(3, 1)
    blocks, digests = filled(manager, [1, 2])
    manager.release(blocks)
    match = manager.match(digests, 2)
    assert manager.fits(match, 1)
    assert not manager.fits(match, 2)
    manager.acquire(blocks)
    assert manager.fits(match, 1)


def test_blocks_are_shared_until_the_last_release() -> None:
    manager = BlockManager(2, 1)
    blocks, _ = filled(manager, [1])
    manager.acquire(blocks)
    manager.release(blocks)
    assert manager.used == 1
    manager.release(blocks)
    assert manager.used == 0


def test_the_first_of_two_blocks_with_the_same_contents_is_found() -> None:
    manager = BlockManager(3, 1)
    first, digests = filled(manager, [1])
    second, _ = filled(manager, [1])
    assert found(manager, digests) == first
    manager.release(second)
    manager.release(first)
    assert manager.allocate(2) != first  # the second is empty, and so is the third
    assert found(manager, digests) == first


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8), st.integers(1, 3))
def test_a_digest_identifies_the_block_and_all_before_it(a: list[int], b: list[int], size: int) -> None:
    manager = BlockManager(1, size)

    def digests(tokens: list[int]) -> list[bytes]:
        found: list[bytes] = []
        for count in range(1, len(tokens) // size + 1):  # one by one gives the same as all at once
            manager.extend_digests(found, tokens, count)
        return found

    at_once: list[bytes] = []
    manager.extend_digests(at_once, a, len(a) // size)
    assert at_once == digests(a)
    for block, (x, y) in enumerate(zip(digests(a), digests(b), strict=False)):
        end = (block + 1) * size
        assert (x == y) == (a[:end] == b[:end])


def test_withdrawn_blocks_are_not_found_and_can_be_handed_out() -> None:
    blocks = BlockManager(2, 1)
    digests: list[bytes] = []
    blocks.extend_digests(digests, [5, 6], 2)
    held = blocks.allocate(2)
    for block, digest in zip(held, digests, strict=True):
        blocks.publish(block, digest)
    blocks.release(held[1:])  # one idle, one held
    blocks.withdraw([*digests, b"nobody's"])
    assert found(blocks, digests) == []
    assert blocks.free == 1
    blocks.release(held[:1])
    assert sorted(blocks.allocate(2)) == sorted(held)


class CountedDigests(list[bytes]):
    """Digests that count how often one is looked at."""

    reads = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        self.reads += 1
        return super().__getitem__(index)


def test_matching_again_looks_at_one_digest() -> None:
    manager = BlockManager(1000, 1)
    _, digests = filled(manager, list(range(900)))
    counted = CountedDigests(digests + [b"unknown"] * 99)
    assert len(manager.match(counted, 999).blocks) == 900
    before = counted.reads
    assert len(manager.match(counted, 999).blocks) == 900
    assert counted.reads - before == 1


@given(st.data())
def test_a_kept_match_is_that_of_a_new_search(data: st.DataObject) -> None:
    """This holds whatever is published, acquired, released, evicted and withdrawn in between."""
    kept, fresh = BlockManager(6, 1), BlockManager(6, 1)
    held: list[list[int]] = []
    prompts = [[1, 2, 3, 4], [1, 2, 5], [7, 8, 9, 10, 11]]
    digests_of = []
    for prompt in prompts:
        digests: list[bytes] = []
        kept.extend_digests(digests, prompt, len(prompt))
        digests_of.append(digests)
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["run", "release", "evict", "withdraw"]))
        digests = data.draw(st.sampled_from(digests_of))
        for manager in (kept, fresh):
            if action == "run":
                published = map(manager._published.get, digests)
                matched = list(takewhile(lambda block: block is not None, published))
                count = len(digests) - len(matched)
                if manager.free >= len(digests):
                    manager.acquire(matched)
                    blocks = matched + manager.allocate(count)
                    for block, digest in zip(blocks, digests, strict=True):
                        manager.publish(block, digest)
                    held += [blocks] if manager is kept else []
            elif action == "release":
                if held:
                    manager.release(held[0])
                    if manager is fresh:
                        held.pop(0)
            elif action == "evict":
                manager.release(manager.allocate(min(2, manager.free)))
            else:
                manager.withdraw(digests)
        match = kept.match(digests_of[0], 4)
        assert match.blocks == found(fresh, list(digests_of[0]))
        assert match.idle == sum(kept._ref_counts[block] == 0 for block in match.blocks)
