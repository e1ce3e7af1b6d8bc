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

import shotcast
from shotcast.memory import cuda
from shotcast.memory.cuda import CudaBuffer

DISABLE = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
GROUP = SimpleNamespace(group_name="0")


@pytest.fixture
def pytorch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace PyTorch's symmetric memory by an allocator with a ``multicast_ptr`` that records its settings."""
    monkeypatch.delenv("SHOTCAST_MULTICAST", raising=False)
    monkeypatch.setenv(DISABLE, "")
    offered = SimpleNamespace(multicast_ptr=0xABC000, disabled=None, buffer_ptrs=[0x1000, 0x2000])

    def empty(nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        offered.disabled = os.environ.get(DISABLE)
        return torch.empty(nbytes, dtype=dtype)

    stand_in = SimpleNamespace(empty=empty, rendezvous=lambda tensor, group: offered)
    monkeypatch.setattr(cuda, "symmetric_memory", stand_in)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return offered


def build(shared: bool = False) -> CudaBuffer:
    group: Any = GROUP
    return CudaBuffer(group, 64, torch.device("cuda", 0), (1, 0), shared)


def test_the_address_is_what_the_allocator_offers(pytorch: SimpleNamespace) -> None:
    buffer = build()
    assert buffer.multicast_address == 0xABC000
    assert buffer.addresses == (0x2000, 0x1000)
    assert pytorch.disabled == ""


@pytest.mark.parametrize("nothing", [0, None])
def test_no_address_where_it_offers_none(pytorch: SimpleNamespace, nothing: int | None) -> None:
    pytorch.multicast_ptr = nothing
    assert build().multicast_address == 0


def test_switched_off_before_the_allocation_and_after(
    pytorch: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator is told not to set up multicast, and an address that it still offers is not used."""
    monkeypatch.setenv("SHOTCAST_MULTICAST", "0")
    assert build().multicast_address == 0
    assert pytorch.disabled == "1"


def test_pytorch_is_told_of_ranks_that_share_a_gpu_and_only_then(
    pytorch: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator would not set up multicast in that mode either."""
    monkeypatch.setenv(OVERLAPPING, "")
    build()
    assert os.environ[OVERLAPPING] == ""
    build(shared=True)
    assert os.environ[OVERLAPPING] == "1"


def test_nothing_sets_multicast_up_but_the_allocator() -> None:
    """The package calls no driver function for it, and no setting of PyTorch except the one that disables it."""
    sources = Path(shotcast.__file__).parent.rglob("*.py")
    texts = {file.name: file.read_text() for file in sources}
    assert not [name for name, text in texts.items() if re.search(r"(cu|cuda)Multicast|multicast_create", text)]
    settings = [line for text in texts.values() for line in text.splitlines() if re.search(rf"{DISABLE}.*= *\S", line)]
    assert settings == [f'            os.environ["{DISABLE}"] = "1"']
