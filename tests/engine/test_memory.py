"""The memory of a rank: limits, what a trial leaves for the cache, and errors before serving. Devices are faked."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import memory_targets as targets
import pytest
import torch

import shotcast
from shotcast.engine.config import EngineConfig
from shotcast.engine.memory import MemoryBudget, require_one_sequence
from shotcast.errors import ConfigError

GIB = 1 << 30


def budget(total: int, free: int, weights: int, sharers: int = 1, device: str = "cuda", **options: Any) -> MemoryBudget:
    memory = targets.FakeMemory(total * GIB, free * GIB)
    config = EngineConfig("m", device=device, **options)
    return MemoryBudget.find(config, memory, sharers, weights * GIB, "bfloat16")


def test_a_gpu_is_used_up_to_a_part_of_all_of_it() -> None:
    assert budget(100, 95, 15).limit == 90 * GIB
    assert budget(100, 50, 15, gpu_memory_utilization=0.5).limit == 50 * GIB
    assert budget(100, 95, 15, sharers=4).limit == 90 * GIB // 4


def test_a_cpu_is_used_up_to_a_part_of_what_is_free() -> None:
    found = budget(100, 80, 10, sharers=2, device="cpu", memory_fraction=0.5)
    assert found.limit == 20 * GIB
    assert found.estimated_room(0) == 10 * GIB // 4
    assert found.estimated_room(77) == 77


@pytest.mark.parametrize(
    ("find", "message"),
    [
        (
            lambda: budget(100, 73, 15),
            r"is to use 90 GiB of a GPU \(gpu_memory_utilization 0\.9 of 100 GiB\), but only 73 GiB are free\. "
            r"Lower gpu_memory_utilization to 0\.73 or less",
        ),
        (
            lambda: budget(100, 95, 15, gpu_memory_utilization=0.1),
            r"the weights of a rank take 15 GiB as bfloat16; it may use 10 GiB \(10% of 100 GiB\)\. Use more "
            "ranks, fp8, another model or a higher gpu_memory_utilization",
        ),
        (lambda: budget(100, 95, 50, sharers=2), r"it may use 45 GiB \(90% of 100 GiB, shared by 2 ranks\)"),
        (
            lambda: budget(100, 95, 15, kv_cache_bytes=76 * GIB),
            f"kv_cache_bytes is 76 GiB; .* kv_cache_bytes may be {75 * GIB} at most",
        ),
        (lambda: budget(100, 10, 9, device="cpu"), "another dtype, another model or a higher memory_fraction"),
    ],
)
def test_what_does_not_fit_is_said_with_what_to_change(find: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find()


def test_the_cache_gets_what_weights_and_steps_leave() -> None:
    """Check that memory in use before the engine is not counted as its own, and that of all sharers is."""
    found = budget(100, 94, 15, sharers=2)
    meetings = []

    def meet() -> None:
        meetings.append(found.memory.free)

    found.memory.taken = 2 * (20 * GIB + 5)  # type: ignore[attr-defined]
    assert found.measured_room(5, meet) == 45 * GIB - 20 * GIB
    assert len(meetings) == 2, "a rank measured, or gave memory back, before others had measured"


def test_only_a_gpu_without_kv_cache_bytes_is_measured() -> None:
    assert budget(100, 95, 15).measured
    assert not budget(100, 95, 15, kv_cache_bytes=GIB).measured
    assert not budget(100, 95, 15, device="cpu").measured


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.\nmore"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"),
        MemoryError(),
    ],
)
def test_running_out_of_memory_is_explained(error: Exception) -> None:
    found = budget(100, 95, 15)
    with pytest.raises(ConfigError) as raised, found.explained("running the largest step", "Lower max_num_seqs"):
        raise error
    text = str(raised.value)
    assert text.startswith("out of memory while running the largest step: 95 GiB are free, weights take 15 GiB")
    assert "a rank may use 90 GiB (90% of 100 GiB). Lower max_num_seqs. (" in text
    assert "\n" not in text
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access"), ConfigError("out of memory")])
def test_other_errors_are_left_alone(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, budget(100, 95, 15).explained("x", "y"):
        raise error
    assert raised.value is error


def test_a_cache_too_small_for_one_sequence_is_refused() -> None:
    found = budget(100, 95, 15)
    block = GIB // 64
    require_one_sequence(8, 16, block, 128, found, 8 * block)
    message = (
        r"room for 112 tokens \(112 MiB\), fewer than one sequence of max_model_len 128 needs \(128 MiB\): it may use "
        r"90 GiB \(90% of 100 GiB\), weights take 15 GiB and steps 74\.9 GiB; lower max_model_len to 112 or "
        "less, max_num_batched_tokens or max_num_seqs, use more ranks or fp8, or raise gpu_memory_utilization"
    )
    with pytest.raises(ConfigError, match=message):
        require_one_sequence(7, 16, block, 128, found, 7 * block)
    with pytest.raises(ConfigError, match=r"room for 0 tokens .*; lower max_model_len, max_num_batched_tokens"):
        require_one_sequence(-3, 16, block, 128, found, -3 * block)
    with pytest.raises(ConfigError, match=re.escape("(kv_cache_bytes, memory_fraction)")):
        require_one_sequence(7, 16, block, 128, budget(100, 95, 15, device="cpu"), 7 * block)


def test_all_ranks_take_the_smallest_number_of_blocks() -> None:
    """Check it where steps are measured, with ranks whose trials take 1, 2 and 3 GiB."""
    found = shotcast.spawn(targets.measured_blocks, 3, 200, 8, timeout_s=300)
    room = 9 * GIB - 3 * GIB - targets.BLOCK_BYTES
    assert [blocks for blocks, _ in found] == [room // targets.BLOCK_BYTES] * 3
    for _, calls in found:
        assert calls == ["release", "new 1", "capture True", "close", "release"]


def test_no_rank_takes_more_than_all_sequences_need() -> None:
    found = shotcast.spawn(targets.measured_blocks, 2, 2, 4, timeout_s=300)
    assert [blocks for blocks, _ in found] == [2 * 4] * 2


def test_a_rank_without_room_ends_all_ranks() -> None:
    for text in shotcast.spawn(targets.refusal, 2, timeout_s=300):
        assert "fewer than one sequence of max_model_len" in text
