"""The multicast address of GPU memory, on a machine without GPUs: PyTorch's part is replaced."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shotcast
from shotcast.errors import ConfigError
from shotcast.memory import cuda
from shotcast.memory.cuda import CudaBuffer

DISABLE = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class Ranks:
    """Two ranks, of which the other one says what ``others`` holds, or the same as this one."""

    rank, world_size = 1, 2

    def __init__(self, **others: Any):
        self.others, self.exchanged, self.values = others, 0, dist.HashStore()

    def all_gather(self, value: Any, timeout_s: float | None = None) -> list[Any]:
        self.exchanged += 1
        return [self.others.get(f"exchange {self.exchanged}", value), value]

    def store(self, name: str) -> dist.Store:
        return dist.PrefixStore(name, self.values)


@pytest.fixture
def pytorch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace PyTorch's symmetric memory by an allocator with a ``multicast_ptr`` that records its settings."""
    monkeypatch.setenv("SHOTCAST_MULTICAST", "1")
    monkeypatch.setenv(DISABLE, "")
    offered = SimpleNamespace(
        multicast_ptr=0xABC000,
        disabled=None,
        buffer_ptrs=[0x1000, 0x2000],
        free=[],
        emptied=0,
        groups={},
        shared=[],
        repeated=[],
        failure="",
    )

    def empty(nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if offered.free and offered.free.pop(0) < nbytes:
            raise torch.OutOfMemoryError("CUDA driver error: out of memory")
        return torch.full((nbytes,), 7, dtype=dtype)

    def rendezvous(tensor: torch.Tensor, group: str) -> SimpleNamespace:
        offered.repeated.append(os.environ.get(OVERLAPPING))
        offered.disabled = os.environ.get(DISABLE)
        ranks = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined]
        ranks.get_group_store().set("CUDASymmetricMemory/3/0", group)
        offered.groups[group] = ranks.rank(), ranks.size()
        if offered.failure:
            raise RuntimeError(offered.failure)
        offered.shared.append(tensor)
        return offered

    def empty_cache() -> None:
        offered.emptied += 1

    monkeypatch.setattr(cuda, "symmetric_memory", SimpleNamespace(empty=empty, rendezvous=rendezvous))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 20, 1 << 30))
    return offered


def build(repeated: bool = False, group: Any = None) -> CudaBuffer:
    return CudaBuffer(group or Ranks(), 64, torch.device("cuda", 0), repeated)


def test_memory_is_shared_among_the_ranks_without_a_process_group(pytorch: SimpleNamespace) -> None:
    group = Ranks(**{"exchange 2": "a name"})
    build(group=group)
    assert pytorch.groups == {"a name": (1, 2)}, "under the same name on all ranks"
    assert group.values.get("symmetric memory/a name/CUDASymmetricMemory/0/0") == b"a name"
    assert pytorch.shared[0].tolist() == [0] * 64
    _is_unknown("a name")


def test_a_failure_of_pytorch_is_an_error_that_leaves_nothing(pytorch: SimpleNamespace) -> None:
    pytorch.failure = "no handles"
    with pytest.raises(ConfigError, match="rank 1: PyTorch could not share 64 B of cuda:0 with the other GPUs: no han"):
        build(group=Ranks(**{"exchange 2": "a name"}))
    _is_unknown("a name")


def _is_unknown(name: str) -> None:
    with pytest.raises(RuntimeError, match="resolve"):
        dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined]


def test_a_full_gpu_is_an_error_that_says_how_full(pytorch: SimpleNamespace) -> None:
    pytorch.free = [0, 0]
    with pytest.raises(ConfigError) as caught:
        build()
    for part in ("rank 1: cuda:0 cannot hold 64 B more for communication", "3 MiB of 1 GiB are free", "out of memory"):
        assert part in str(caught.value)
    assert pytorch.emptied == 1
    assert not pytorch.shared


def test_memory_that_pytorch_keeps_for_tensors_is_used_if_needed(pytorch: SimpleNamespace) -> None:
    pytorch.free = [0, 64]
    build()
    assert (pytorch.emptied, len(pytorch.shared)) == (1, 1)


def test_a_full_gpu_of_another_rank_is_an_error_here_before_memory_is_shared(pytorch: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match="rank 0: no room"):
        build(group=Ranks(**{"exchange 1": "no room"}))
    assert not pytorch.groups
    with pytest.raises(ConfigError, match="rank 0: cannot map"):
        build(group=Ranks(**{"exchange 3": "cannot map"}))


def test_the_address_is_what_the_allocator_offers(pytorch: SimpleNamespace) -> None:
    buffer = build()
    assert buffer.multicast_address == 0xABC000
    assert buffer.addresses == (0x1000, 0x2000)
    assert pytorch.disabled == ""


@pytest.mark.parametrize("nothing", [0, None])
def test_no_address_where_it_offers_none(pytorch: SimpleNamespace, nothing: int | None) -> None:
    pytorch.multicast_ptr = nothing
    assert build().multicast_address == 0


@pytest.mark.parametrize("setting", ["0", ""])
def test_off_unless_it_is_asked_for(pytorch: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    """The allocator is told not to set up multicast, for this memory alone; an address that it offers is not used."""
    monkeypatch.setenv("SHOTCAST_MULTICAST", setting)
    assert build().multicast_address == 0
    assert pytorch.disabled == "1"
    assert os.environ[DISABLE] == ""


def test_pytorch_is_told_of_ranks_whose_gpus_have_one_number_and_only_then(
    pytorch: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that PyTorch has been told of have no multicast, and those of later memory have to agree on that."""
    for before in (None, "", "1"):
        if before is None:
            monkeypatch.delenv(OVERLAPPING, raising=False)
        else:
            monkeypatch.setenv(OVERLAPPING, before)
        build()
        build(repeated=True)
        assert pytorch.repeated[-2:] == [before, "1"]
        assert os.environ.get(OVERLAPPING) == before
    pytorch.failure = "no handles"
    with pytest.raises(ConfigError):
        build(repeated=True)
    assert os.environ.get(OVERLAPPING) == before


def test_nothing_sets_multicast_up_but_the_allocator() -> None:
    """The package calls no driver function for it, and no setting of PyTorch except the one that disables it."""
    sources = Path(shotcast.__file__).parent.rglob("*.py")
    texts = {file.name: file.read_text() for file in sources}
    assert not [name for name, text in texts.items() if re.search(r"(cu|cuda)Multicast|multicast_create", text)]
    assert sorted(name for name, text in texts.items() if DISABLE in text) == ["cuda.py", "detect.py"]
