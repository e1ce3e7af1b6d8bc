"""Products that leave room, without a GPU: what they ask for, what they say, and scopes that end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from products_targets import products

from quick_interpreter import interpret
from shotcast.errors import ConfigError, UnsupportedError
from shotcast.hardware.multiprocessor import multiprocessor
from shotcast.kernels.triton.gemm import GemmConfig
from shotcast.overlap import products as module
from shotcast.overlap import torch_private
from shotcast.overlap.occupancy import Kernel, Leftover, Room
from shotcast.overlap.products import LibraryProduct, SeenKernel, ShapedProduct

GPU = torch.device("cuda", 0)
H200 = multiprocessor((9, 0))


PREFERRED = ["cublas"]
"""The library that PyTorch prefers; builds without CUDA have only one."""


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    def prefer(library: str | None = None) -> str:
        PREFERRED[:] = [library or PREFERRED[0]]
        return PREFERRED[0]

    monkeypatch.setattr(module, "sms_of", lambda device: 132)
    monkeypatch.setattr(module, "multiprocessor_of", lambda device: H200)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)


def asked() -> tuple[int | None, str]:
    """Return the carve-out, and the library that products go to."""
    return torch._C._get_sm_carveout_experimental(), PREFERRED[0]


def test_ours_and_the_librarys_agree() -> None:
    (found,) = interpret(products, 1)
    assert found == []


@pytest.mark.usefixtures("h200")
def test_a_carve_out_ends_with_its_scope() -> None:
    assert asked() == (None, "cublas")
    with LibraryProduct(24).scope(GPU):
        assert asked() == (24, "cublaslt")
        with LibraryProduct(8).scope(GPU):
            assert asked() == (8, "cublaslt")
        assert asked() == (24, "cublaslt")
        with LibraryProduct().scope(GPU):
            assert asked() == (24, "cublaslt")
    assert asked() == (None, "cublas")


@pytest.mark.usefixtures("h200")
def test_a_carve_out_ends_with_an_exception() -> None:
    with contextlib.suppress(KeyError), LibraryProduct(24).scope(GPU), LibraryProduct(8).scope(GPU):
        assert asked() == (8, "cublaslt")
        raise KeyError
    assert asked() == (None, "cublas")


@pytest.mark.usefixtures("h200")
def test_a_scope_that_cannot_begin_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(sms: int | None) -> None:
        if sms is not None:
            raise RuntimeError("no carve-outs")

    monkeypatch.setattr(torch._C, "_set_sm_carveout_experimental", refuse)
    with pytest.raises(RuntimeError, match="no carve-outs"), LibraryProduct(24).scope(GPU):
        pass
    assert asked() == (None, "cublas")


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
    product = LibraryProduct(left, "green_context")
    for _ in range(2):
        with contextlib.suppress(KeyError), product.scope(GPU):
            assert green.stream == "of the context"
            raise KeyError
        assert green.stream == "mine", "PyTorch's pop_context leaves its own stream current"
    assert green.log == [(used, 0), "set", "pop", "set", "pop"]
    x = SimpleNamespace(device=GPU)
    room = product.room(x, x)  # type: ignore[arg-type]
    assert room == Room(H200, 132 - used, used, None)


def test_a_green_context_is_refused_in_a_graph(green: GreenContexts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="cannot be captured"), LibraryProduct(24, "green_context").scope(GPU):
        pass
    assert "set" not in green.log


def test_without_green_contexts_the_reason_is_told(green: GreenContexts, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.cuda import green_contexts

    def fail(**given: Any) -> None:
        raise RuntimeError("driver too old\nmore")

    monkeypatch.setattr(green, "create", fail)
    with pytest.raises(UnsupportedError, match="cannot set 104 SMs aside as a green context: driver too old"):
        torch_private.new_green_context(104, GPU)
    monkeypatch.setattr(green_contexts, "SUPPORTED", False)
    with pytest.raises(UnsupportedError, match="built without green contexts"):
        torch_private.new_green_context(104, GPU)


@pytest.mark.usefixtures("h200")
def test_the_room_is_that_of_the_kernel_that_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a carve-out which the library does not heed leaves nothing."""
    seen: list[SeenKernel] = []
    monkeypatch.setattr(module, "seen_kernels", lambda call: seen)
    monkeypatch.setattr(LibraryProduct, "__call__", lambda *args: None)
    x = SimpleNamespace(device=GPU)

    def room() -> Room:
        return LibraryProduct(24).room(x, x)  # type: ignore[arg-type]

    assert room() == Room(H200, 0, 132, None)
    seen.append(SeenKernel("persistent", 108, 384, 168, 227 << 10))
    assert room().free_sms == 24
    assert room().blocks_of(Kernel(32, 512, 0)) == 24 * 4
    seen.append(SeenKernel("a tile a block", 2048, 256, 90, 100 << 10))
    assert room().free_sms == 0
    assert room().beside == Leftover(30, 2048 - 512, 65536 - 512 * 96, (228 - 2 * 101 - 1) << 10)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: ShapedProduct(sms=0), "takes at least one SM"),
        (lambda: ShapedProduct(GemmConfig(), sms=100), "sms is for persistent products"),
        (lambda: LibraryProduct(-1), "from 0 up"),
        (lambda: LibraryProduct(8, "green"), "it takes carve_out or green_context"),
    ],
)
def test_impossible_products_are_refused(wrong: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        wrong()


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("product", [LibraryProduct(132), LibraryProduct(125, "green_context")])
def test_some_sms_must_remain(product: LibraryProduct) -> None:
    with pytest.raises(ConfigError, match="has 132 SMs, and some must remain"), product.scope(GPU):
        pass
