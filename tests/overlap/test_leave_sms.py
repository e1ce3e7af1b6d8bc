"""Carve-outs of the vendor library's products, without a GPU: what they ask for, and scopes that end."""

from __future__ import annotations

import contextlib

import pytest
import torch

from shotcast.errors import ConfigError
from shotcast.overlap import torch_private
from shotcast.overlap.torch_private import leave_sms

GPU = torch.device("cuda", 0)

PREFERRED = ["cublas"]
"""The library that PyTorch prefers; builds without CUDA have only one."""


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    def prefer(library: str | None = None) -> str:
        PREFERRED[:] = [library or PREFERRED[0]]
        return PREFERRED[0]

    monkeypatch.setattr(torch_private, "_sm_count", lambda device: 132)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)


def asked() -> tuple[int | None, str]:
    """Return the carve-out, and the library that products go to."""
    return torch._C._get_sm_carveout_experimental(), PREFERRED[0]


def test_a_carve_out_ends_with_its_scope() -> None:
    assert asked() == (None, "cublas")
    with leave_sms(24, GPU):
        assert asked() == (24, "cublaslt")
        with leave_sms(8, GPU):
            assert asked() == (8, "cublaslt")
        assert asked() == (24, "cublaslt")
        with leave_sms(0, GPU), leave_sms(8, torch.device("cpu")):
            assert asked() == (24, "cublaslt")
    assert asked() == (None, "cublas")


def test_a_carve_out_ends_with_an_exception() -> None:
    with contextlib.suppress(KeyError), leave_sms(24, GPU), leave_sms(8, GPU):
        assert asked() == (8, "cublaslt")
        raise KeyError
    assert asked() == (None, "cublas")


def test_a_scope_that_cannot_begin_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(sms: int | None) -> None:
        if sms is not None:
            raise RuntimeError("no carve-outs")

    monkeypatch.setattr(torch._C, "_set_sm_carveout_experimental", refuse)
    with pytest.raises(RuntimeError, match="no carve-outs"), leave_sms(24, GPU):
        pass
    assert asked() == (None, "cublas")


@pytest.mark.parametrize("sms", [132, -1])
def test_some_sms_must_remain(sms: int) -> None:
    message = f"sms is {sms}; cuda:0 has 132 SMs, and some must remain"
    with pytest.raises(ConfigError, match=message), leave_sms(sms, GPU):
        pass
