"""Products that leave room, without a GPU: what they ask for, and scopes that end."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from products_targets import products

from quick_interpreter import interpret
from shotcast.errors import ConfigError
from shotcast.kernels.triton.gemm import GemmConfig
from shotcast.overlap import products as module
from shotcast.overlap.products import LibraryProduct, ShapedProduct

GPU = torch.device("cuda", 0)

PREFERRED = ["cublas"]
"""The library that PyTorch prefers; builds without CUDA have only one."""


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    def prefer(library: str | None = None) -> str:
        PREFERRED[:] = [library or PREFERRED[0]]
        return PREFERRED[0]

    monkeypatch.setattr(module, "sms_of", lambda device: 132)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)


def asked() -> tuple[int | None, str]:
    """Return the carve-out, and the library that products go to."""
    return torch._C._get_sm_carveout_experimental(), PREFERRED[0]


@pytest.mark.full
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


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: ShapedProduct(sms=0), "takes at least one SM"),
        (lambda: ShapedProduct(GemmConfig(), sms=100), "sms is for persistent products"),
        (lambda: LibraryProduct(-1), "from 0 up"),
    ],
)
def test_impossible_products_are_refused(wrong: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        wrong()


@pytest.mark.usefixtures("h200")
def test_some_sms_must_remain() -> None:
    with (
        pytest.raises(ConfigError, match="has 132 SMs, and some must remain"),
        LibraryProduct(132).scope(GPU),
    ):
        pass
