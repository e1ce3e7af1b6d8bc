"""Tensors in blocks that all ranks map: where they lie, when their memory serves again, and when there is none."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shotcast.memory import block_heap
from shotcast.memory.block_heap import LEAST_BYTES, UNIT, BlockHeap, HostBlock, record_use

RANKS = 3


class Mail:
    """The way between ranks of one process; what ``deaf`` ranks are sent is lost."""

    def __init__(self) -> None:
        self.told: dict[tuple[int, str], Callable[[int, int], None]] = {}
        self.deaf: set[int] = set()

    def of(self, rank: int) -> Any:
        mail = self

        class Peers:
            def hear(self, name: str, told: Callable[[int, int], None]) -> None:
                mail.told[rank, name] = told

            def send(self, other: int, name: str, number: int, descriptor: int = -1) -> None:
                if other not in mail.deaf:
                    on_a_thread(mail.told[other, name], number, os.dup(descriptor) if descriptor >= 0 else -1)

        return Peers()


def on_a_thread(told: Callable[[int, int], None], number: int, descriptor: int) -> None:
    """Tell on another thread, as the watch of a process does."""
    threading.Thread(target=told, args=(number, descriptor)).start()


class Heaps:
    """A heap of each rank, and where each rank finds all blocks: ``places[here][rank, number]``."""

    def __init__(self, most_blocks: int = 8, current_stream: Callable[[], Any] | None = None, make: Any = HostBlock):
        self.mail = Mail()
        self.places: list[dict[tuple[int, int], int]] = [{} for _ in range(RANKS)]
        self.heaps = [
            BlockHeap(self.mail.of(rank), rank, RANKS, most_blocks, make, self._teller(rank), current_stream)
            for rank in range(RANKS)
        ]

    def _teller(self, here: int) -> Callable[[int, int, int], None]:
        def tell(rank: int, number: int, address: int) -> None:
            self.places[here][rank, number] = address

        return tell

    def address(self, here: int, rank: int, x: torch.Tensor) -> int:
        """Return where rank ``here`` finds a tensor of rank ``rank``."""
        place = self.heaps[rank].place(x.data_ptr())
        assert place is not None
        return self.places[here][rank, place[0]] + place[1]


@pytest.fixture
def heaps() -> Iterator[Heaps]:
    made = Heaps()
    yield made
    for heap in made.heaps:
        heap.close()


def test_all_ranks_map_a_tensor_of_each(heaps: Heaps) -> None:
    for rank, heap in enumerate(heaps.heaps):
        x = heap.empty((3, 5), torch.bfloat16)
        assert x is not None
        assert (x.shape, x.dtype, x.is_contiguous()) == ((3, 5), torch.bfloat16, True)
        x.fill_(rank + 1)
        for here in range(RANKS):
            found = ctypes.c_int16.from_address(heaps.address(here, rank, x[1:])).value
            assert found == x.view(torch.int16)[1, 0]
            ctypes.c_uint16.from_address(heaps.address(here, rank, x)).value = 0x4000 + here
            assert x.view(torch.int16)[0, 0] == 0x4000 + here
        assert heaps.places[(rank + 1) % RANKS][rank, 0] != x.data_ptr()


def test_no_rank_needs_a_call_of_another(heaps: Heaps) -> None:
    first = heaps.heaps[0].empty((7,), torch.float64)
    assert first is not None
    assert heaps.heaps[1].ranges == []
    assert heaps.heaps[0].empty((0, 4), torch.float32) is None, "there is nothing to map"


@given(st.lists(st.tuples(st.integers(1, 40 << 10), st.booleans()), max_size=60))
def test_living_tensors_do_not_overlap(steps: list[tuple[int, bool]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_heap, "LEAST_BYTES", 64 << 10)
        patch.setattr(block_heap, "_GRANULE", 64 << 10)
        made = Heaps()
        heap, live = made.heaps[0], []
        for count, dies in steps:
            x = heap.empty((count,), torch.uint8)
            if x is None:
                assert len(heap._own) == 8
                continue
            live.append(x.fill_(len(live) % 251))
            if dies:
                live.pop(count % len(live))
            x = None
            spans = sorted((y.data_ptr(), y.data_ptr() + y.numel()) for y in live)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
            assert all(y.data_ptr() % UNIT == 0 for y in live)
        for each in made.heaps:
            each.close()


def test_the_same_tensors_again_and_again_take_one_block(heaps: Heaps) -> None:
    heap = heaps.heaps[0]
    for step in range(300):
        tensors = [heap.empty((1 << 20,), torch.float32) for _ in range(4 + step % 3)]
        assert all(x is not None for x in tensors)
    assert len(heap._own) == 1
    # a block whose tensors have all died serves tensors of another size
    tensors = []
    assert heap.empty((LEAST_BYTES // 4,), torch.float32) is not None
    assert len(heap._own) == 1


def test_blocks_grow_and_a_long_tensor_has_its_own(heaps: Heaps) -> None:
    heap = heaps.heaps[0]
    held = [heap.empty((LEAST_BYTES + 1,), torch.uint8), heap.empty((5,), torch.uint8), heap.empty((5,), torch.uint8)]
    assert all(x is not None for x in held)
    sizes = [own.nbytes for own in heap._own]
    assert sizes == [LEAST_BYTES + (2 << 20)], "the others find room behind it"
    held.append(heap.empty((LEAST_BYTES,), torch.uint8))
    assert [own.nbytes for own in heap._own][1:] == [LEAST_BYTES + (2 << 20)]


def test_a_rank_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(block_heap, "_PATIENCE_S", 1.0)
    made = Heaps()
    made.mail.deaf = {2}
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert made.heaps[0].empty((5,), torch.float32) is None
    assert caplog.text.count("ranks [2] have not mapped a block") == 1
    assert made.heaps[0].ranges == []
    assert len(made.heaps[0]._own) == 1, "it is asked once"
    assert len(os.listdir("/proc/self/fd")) <= before + 2, "mappings may keep one file each"


def test_there_is_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    def none(nbytes: int, descriptor: int = -1) -> Any:
        raise RuntimeError("out of memory")

    heap = Heaps(make=none).heaps[0]
    assert heap.empty((5,), torch.float32) is None
    assert heap.empty((5,), torch.float32) is None
    assert caplog.text.count("out of memory") == 1


def test_blocks_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    heap = Heaps(most_blocks=1).heaps[0]
    held = heap.empty((LEAST_BYTES,), torch.uint8)
    assert held is not None
    assert heap.empty((1,), torch.uint8) is None
    assert "1 blocks already" in caplog.text


class Event:
    def __init__(self) -> None:
        self.came = False

    def query(self) -> bool:
        return self.came


class Stream:
    """A stream whose work ends when the test says so."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record_event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]


def test_memory_serves_another_stream_once_its_own_has_come_so_far() -> None:
    one, other = Stream(), Stream()
    current = [one]
    heap = Heaps(current_stream=lambda: current[0]).heaps[0]
    first = heap.empty((9,), torch.float32)
    assert first is not None
    place = first.data_ptr()
    del first
    current[0] = other
    second = heap.empty((9,), torch.float32)
    assert second is not None
    assert second.data_ptr() != place
    for event in one.events:
        event.came = True
    third = heap.empty((9,), torch.float32)
    assert third is not None
    assert third.data_ptr() == place
    del third
    fourth = heap.empty((9,), torch.float32)
    assert fourth is not None
    assert fourth.data_ptr() == place, "on its own stream at once"


def test_memory_that_another_stream_has_used_waits_for_that() -> None:
    one, other = Stream(), Stream()
    heap = Heaps(current_stream=lambda: one).heaps[0]
    first = heap.empty((9,), torch.float32)
    assert first is not None
    place = first.data_ptr()
    record_use(first[3:], other)  # type: ignore[arg-type]
    del first
    second = heap.empty((9,), torch.float32)
    assert second is not None
    assert second.data_ptr() != place
    for event in (*one.events, *other.events):
        event.came = True
    third = heap.empty((9,), torch.float32)
    assert third is not None
    assert third.data_ptr() == place


def test_after_a_fault_memory_waits_until_the_ranks_have_met(heaps: Heaps) -> None:
    heap = heaps.heaps[0]
    stopped = False
    heap.is_stopped = lambda: stopped
    first = heap.empty((9,), torch.float32)
    assert first is not None
    place = first.data_ptr()
    stopped = True
    del first
    second = heap.empty((9,), torch.float32)
    assert second is not None
    assert second.data_ptr() != place
    stopped = False
    heap.resume()
    third = heap.empty((9,), torch.float32)
    assert third is not None
    assert third.data_ptr() == place


class Counted(HostBlock):
    """A block that counts those that have been released."""

    released = 0

    def release(self) -> None:
        Counted.released += 1


def test_blocks_are_released_once_no_tensor_lives_in_them() -> None:
    Counted.released = 0
    made = Heaps(make=Counted)
    x = made.heaps[0].empty((9,), torch.float32)
    assert x is not None
    x.fill_(3)
    for heap in made.heaps:
        heap.close()
    assert Counted.released == RANKS - 1, "the other ranks' mappings"
    assert x.sum() == 27
    assert made.heaps[0].place(x.data_ptr()) is None
    del x
    gc.collect()
    assert Counted.released == RANKS - 1, "work on it may be under way"
    Heaps(make=Counted).heaps[0].close()
    assert Counted.released == RANKS
