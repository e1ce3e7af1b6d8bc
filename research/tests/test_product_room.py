"""research/product_room.py without a GPU: green contexts, and the room beside the kernel that was seen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import product_room as module
import pytest
import torch
from matmuls import LibraryProduct
from occupancy import Kernel, Leftover, Room, multiprocessor
from product_room import GreenProduct, SeenKernel

from shotcast.errors import ConfigError, UnsupportedError

GPU = torch.device("cuda", 0)
H200 = multiprocessor((9, 0))


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "sms_of", lambda device: 132)
    monkeypatch.setattr(module, "multiprocessor_of", lambda device: H200)


class GreenContexts:
    """PyTorch's green contexts and current streams, as a log of what was asked."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.stream = "mine"

    def create(self, *, num_sms: int, device_id: int) -> GreenContexts:
        self.log.append((num_sms, device_id))
        return self

    def set_context(self) -> None:
        self.log.append("set")
        self.stream = "of the context"

    def pop_context(self) -> None:
        self.log.append("pop")


@pytest.fixture
def green(h200: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[GreenContexts]:
    made = GreenContexts()
    from torch.cuda import green_contexts

    monkeypatch.setattr(green_contexts, "SUPPORTED", True)
    monkeypatch.setattr(green_contexts, "GreenContext", made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(made, "stream", stream))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    module._green_context.cache_clear()
    yield made
    module._green_context.cache_clear()


@pytest.mark.parametrize(("left", "used"), [(8, 120), (24, 104), (28, 104), (29, 96), (124, 8)])
def test_a_green_context_leaves_at_least_what_was_asked(green: GreenContexts, left: int, used: int) -> None:
    product = GreenProduct(left)
    for _ in range(2):
        with contextlib.suppress(KeyError), product.scope(GPU):
            assert green.stream == "of the context"
            raise KeyError
        assert green.stream == "mine", "PyTorch's pop_context leaves its own stream current"
    assert green.log == [(used, 0), "set", "pop", "set", "pop"]
    x = SimpleNamespace(device=GPU)
    room = module.room_beside_product(product, x, x)  # type: ignore[arg-type]
    assert room == Room(H200, 132 - used, used, None)


def test_a_green_context_is_refused_in_a_graph(green: GreenContexts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="cannot be captured"), GreenProduct(24).scope(GPU):
        pass
    assert "set" not in green.log


def test_without_green_contexts_the_reason_is_told(green: GreenContexts, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.cuda import green_contexts

    def fail(**given: Any) -> None:
        raise RuntimeError("driver too old\nmore")

    monkeypatch.setattr(green, "create", fail)
    with pytest.raises(UnsupportedError, match="cannot set 104 SMs aside as a green context: driver too old"):
        module.new_green_context(104, GPU)
    monkeypatch.setattr(green_contexts, "SUPPORTED", False)
    with pytest.raises(UnsupportedError, match="built without green contexts"):
        module.new_green_context(104, GPU)


@pytest.mark.usefixtures("h200")
def test_the_room_is_that_of_the_kernel_that_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a carve-out which the library does not heed leaves nothing."""
    seen: list[SeenKernel] = []
    monkeypatch.setattr(module, "seen_kernels", lambda call: seen)
    monkeypatch.setattr(LibraryProduct, "__call__", lambda *args: None)
    x = SimpleNamespace(device=GPU)

    def room() -> Room:
        return module.room_beside_product(LibraryProduct(24), x, x)  # type: ignore[arg-type]

    assert room() == Room(H200, 0, 132, None)
    seen.append(SeenKernel("persistent", 108, 384, 168, 227 << 10))
    assert room().free_sms == 24
    assert room().blocks_of(Kernel(32, 512, 0)) == 24 * 4
    seen.append(SeenKernel("a tile a block", 2048, 256, 90, 100 << 10))
    assert room().free_sms == 0
    assert room().beside == Leftover(30, 2048 - 512, 65536 - 512 * 96, (228 - 2 * 101 - 1) << 10)


@pytest.mark.usefixtures("h200")
def test_some_sms_must_remain() -> None:
    with pytest.raises(ConfigError, match="has 132 SMs, and some must remain"), GreenProduct(125).scope(GPU):
        pass
