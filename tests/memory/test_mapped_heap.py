"""The memory of tensors that all ranks map: what is given out, freed and kept, and when there is none."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import resource
import threading
from pathlib import Path

import pytest
import torch

from local_ranks import run_ranks
from shotcast.memory import mapped_heap
from shotcast.memory.shm import ShmBuffer

PAGE = mmap.PAGESIZE


def heap_of(pages: int = 1 << 10) -> tuple[ShmBuffer, mapped_heap.MappedHeap]:
    class Alone:
        rank, world_size = 0, 1

        def all_gather(self, value, timeout_s=None):
            return [value]

        def barrier(self, timeout_s=None): ...

    buffer = ShmBuffer(Alone(), PAGE, pages * PAGE)
    assert buffer.heap is not None
    return buffer, buffer.heap


def pages(heap: mapped_heap.MappedHeap) -> int:
    """Return the pages of the heap that have memory."""
    return os.fstat(heap._descriptor).st_blocks * 512 // PAGE - 1


def test_a_tensor_is_one_like_any_other() -> None:
    _, heap = heap_of()
    for shape, dtype in (((3, 5), torch.bfloat16), ((7,), torch.int64), ((), torch.float32), ((2, 0), torch.float16)):
        tensor = heap.empty(shape, dtype)
        assert tensor is not None
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
    weight = torch.nn.Parameter(heap.empty((64, 32), torch.float32).fill_(0.5))
    optimizer = torch.optim.AdamW([weight])
    torch.nn.functional.linear(torch.ones(2, 32), weight).sum().backward()
    optimizer.step()
    assert weight.grad.eq(2).all()
    assert weight.lt(0.5).all()
    assert weight.view(-1)[5:].t().data_ptr() == weight.data_ptr() + 20


@pytest.mark.full
def test_tensors_do_not_overlap_and_memory_is_used_again() -> None:
    _, heap = heap_of(160)
    generator = torch.Generator().manual_seed(1)
    live: list[torch.Tensor] = []
    for turn in range(2000):
        if live and (len(live) > 6 or torch.rand((), generator=generator) < 0.5):
            gone = live.pop(int(torch.randint(len(live), (), generator=generator)))
            assert gone.unique().numel() == 1
            del gone
        tensor = heap.empty((int(torch.randint(1, 8 * PAGE, (), generator=generator)),), torch.uint8)
        assert tensor is not None, turn
        live.append(tensor.fill_(turn % 251))
    assert all(tensor.unique().numel() == 1 for tensor in live)
    places = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in live)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


def test_the_last_view_frees_the_memory(monkeypatch) -> None:
    _, heap = heap_of()
    monkeypatch.setattr(mapped_heap, "KEPT_BYTES", 4 * PAGE)
    tensor = heap.empty((2 * PAGE,), torch.uint8)
    place, view = tensor.data_ptr(), tensor[5:]
    del tensor
    gc.collect()
    other = heap.empty((2 * PAGE,), torch.uint8)
    assert other.data_ptr() != place
    assert pages(heap) == 4
    del view, other
    assert heap.empty((2 * PAGE,), torch.uint8).data_ptr() in (place, place + 2 * PAGE)
    assert pages(heap) == 4, "kept for the next tensor"
    large = heap.empty((64 * PAGE,), torch.uint8)
    assert pages(heap) == 68
    del large
    assert pages(heap) == 4, "more than is kept"


def test_freed_memory_is_whole_again() -> None:
    _, heap = heap_of(8)
    parts = [heap.empty((PAGE,), torch.uint8) for _ in range(8)]
    assert heap.empty((1,), torch.uint8) is None
    del parts[::2]
    assert heap.empty((2 * PAGE,), torch.uint8) is None, "four single pages are no two"
    del parts
    assert heap.empty((8 * PAGE,), torch.uint8) is not None


def test_a_full_file_system_refuses(monkeypatch, caplog) -> None:
    _, heap = heap_of()

    def full(descriptor, start, nbytes):
        raise OSError(28, os.strerror(28))

    kept = heap.empty((PAGE,), torch.uint8)
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert heap.empty((4 * PAGE,), torch.uint8) is None
    assert heap.empty((4 * PAGE,), torch.uint8) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    del kept
    assert heap.empty((PAGE,), torch.uint8) is not None, "this memory is there"


def test_memory_stays_unused_while_a_late_rank_may_write_to_it() -> None:
    _, heap = heap_of()
    heap.is_stopped = lambda: True
    tensor = heap.empty((PAGE,), torch.uint8)
    place = tensor.data_ptr()
    del tensor
    others = [heap.empty((PAGE,), torch.uint8) for _ in range(3)]
    assert place not in [other.data_ptr() for other in others]
    heap.is_stopped = lambda: False
    heap.resume()
    assert heap.empty((PAGE,), torch.uint8).data_ptr() == place


def test_a_tensor_outlives_its_buffer() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    buffer, heap = heap_of()
    tensor = heap.empty((PAGE,), torch.uint8).fill_(7)
    buffer.close()
    del buffer, heap
    gc.collect()
    assert tensor.eq(7).all()
    del tensor
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_make_and_free_tensors() -> None:
    _, heap = heap_of(4096)
    wrong: list[str] = []

    def work(number: int) -> None:
        for turn in range(300):
            tensor = heap.empty((PAGE * (1 + turn % 5),), torch.uint8)
            tensor.fill_(number)
            if not tensor.eq(number).all():
                wrong.append(f"thread {number}, turn {turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_process_frees_nothing() -> None:
    _, heap = heap_of()
    tensor = heap.empty((PAGE,), torch.uint8).fill_(3)
    child = os.fork()
    if child == 0:
        del tensor
        gc.collect()
        heap._collect()
        os._exit(len(heap._kept))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tensor.eq(3).all()


def check_little_address_space(group):
    if group.rank == 1:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
    buffer = ShmBuffer(group, PAGE, 2 << 30)
    assert buffer.heap is None
    buffer.view(group.rank, 0, (1,), torch.int64).fill_(group.rank + 1)
    group.barrier()
    assert [int(buffer.view(rank, 0, (1,), torch.int64)) for rank in range(2)] == [1, 2]
    group.barrier()


def test_no_rank_has_a_heap_where_one_has_too_little_address_space():
    run_ranks(2, check_little_address_space)


def check_little_file(group):
    if group.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    assert ShmBuffer(group, PAGE, 2 << 30).heap is None
    assert ShmBuffer(group, PAGE, 1 << 19).heap is not None


def test_no_rank_has_a_heap_where_one_may_not_make_so_long_a_file():
    run_ranks(2, check_little_file)
