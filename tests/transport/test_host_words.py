"""The words of the host's memory by which an executor and its kernels tell each other of faults, ends and waits."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from shotcast import wire
from shotcast.transport.triton import executor, layout
from shotcast.transport.triton.executor import TritonExecutor

CPU = torch.device("cpu")


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_they_are_memory_of_the_host_whatever_the_default_device(default: str) -> None:
    with torch.device(default):
        words = executor._host_words(CPU)
    assert words.device == CPU
    assert not words.any()
    assert words.numel() == layout.HOST_WORDS


@pytest.mark.full
def test_they_outlive_an_executor_that_is_not_closed() -> None:
    """A kernel that still waits would store into memory that something else has by then."""
    made = executor._host_words(CPU)
    address = made.data_ptr()
    del made
    gc.collect()
    assert executor._words_in_use[address].data_ptr() == address
    one: Any = with_words(executor._words_in_use[address])
    one.workspaces, one.device = [], CPU
    one.close()
    assert address not in executor._words_in_use


def test_marks_of_any_thread_are_stored_at_once_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_SETTLE_S", 0.0)
    words = executor._host_words(CPU)
    one = with_words(words)
    before = threading.active_count()
    for rank in (1, 4, 15):
        one.mark_gone(rank)
    while threading.active_count() > before:
        pass
    assert words[layout.HOST_GONE] == 1 << 1 | 1 << 4 | 1 << 15
    one.workspaces, one.device = [], CPU
    one.clear(7)
    assert words[layout.HOST_GONE] == 1 << 1 | 1 << 4 | 1 << 15, "a reset does not revive a process"


def test_a_wait_is_told_once_for_each_time_that_it_is_stored() -> None:
    words = executor._host_words(CPU)
    one = with_words(words)
    assert one.wait() is None
    words[layout.HOST_WAIT] = wire.encode_fault(wire.TIMEOUT, 0, [3, 5], 12)
    wait = one.wait()
    assert wait is not None
    assert (one.awaited(wait), wait.epoch) == ([3, 5], 12)
    assert one.wait() is None
    words[layout.HOST_WAIT] = wire.encode_fault(wire.TIMEOUT, 0, [], 12)
    assert one.wait() is None, "all headers came between the deadline's check and the look at them"
    assert one.fault() is None


def with_words(words: torch.Tensor) -> Any:
    """Return an executor that has these words and nothing else."""
    one = object.__new__(TritonExecutor)
    one._marking, one._closed, one.heap = threading.Lock(), True, None  # it was never counted
    one._wait = None
    one._use_words(words)
    return one
