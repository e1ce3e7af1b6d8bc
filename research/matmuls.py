"""Matmuls that leave room on the GPU for communication: our kernel's and the vendor library's.

- :class:`ShapedProduct`: our kernel, with a chosen block shape and number of SMs.
- :class:`LibraryProduct`: the vendor library, which is asked to leave SMs free. Its kernel for a product may ignore
  that.

Our results have the same bits on any number of SMs, since no sum is divided between programs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shotcast.errors import ConfigError
from shotcast.overlap.torch_private import leave_sms

if TYPE_CHECKING:
    from large_gemm import Gemm, GemmConfig, GemmForm


class Product(Protocol):
    """An implementation of matrix multiplication."""

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``a @ b``, in ``out`` if given."""


@functools.cache
def sms_of(device: torch.device) -> int:
    """Return the number of SMs of a GPU; 1 for the CPU, where programs run one after the other."""
    return 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def own_gemm() -> Any:
    """Import and return the module of our product, which imports Triton."""
    import large_gemm

    return large_gemm


@functools.lru_cache(maxsize=256)
def _bind(form: GemmForm, config: GemmConfig, sms: int) -> Gemm:
    bound: Gemm = own_gemm().Gemm(form, config, sms)
    return bound


@dataclass(frozen=True, slots=True)
class ShapedProduct:
    """Products by our kernel."""

    config: GemmConfig | None = None  # the shape of its blocks; None for one that is fast on all SMs that it has
    sms: int | None = None  # the number of SMs that it uses, one block each; None for all

    def __post_init__(self) -> None:
        if self.sms is not None and self.sms < 1:
            raise ConfigError(f"sms is {self.sms}; a product takes at least one SM")
        if self.sms is not None and self.config is not None and not self.config.persistent:
            raise ConfigError("sms is for persistent products; one with a program a tile takes all SMs")

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``a @ b``, in ``out`` if given, summed in float32 and rounded once.

        Args:
            a: [m, k] of bfloat16 or float16, with contiguous rows or columns.
            b: [k, n], likewise.
            out: [m, n] with contiguous rows.

        Raises:
            UnsupportedError: another dtype, device or layout.
            ConfigError: shapes that do not match.
        """
        if out is None:
            out = a.new_empty(a.shape[0], b.shape[1])
        self._bound(own_gemm().form_of(a, b, out))(a, b, out)
        return out

    def bound(self, a: torch.Tensor, b: torch.Tensor) -> Gemm:
        """Return the launch of ``a @ b``, which is not compiled until its first call."""
        return self._bound(own_gemm().form_of(a, b, a.new_empty(a.shape[0], b.shape[1])))

    def _bound(self, form: GemmForm) -> Gemm:
        return _bind(form, self.config or own_gemm().choose_config(form, self.sms), self.sms or sms_of(form.device))


@dataclass(frozen=True, slots=True)
class LibraryProduct:
    """Products of the vendor's library (``torch.matmul``) that leave some SMs free."""

    left_sms: int = 0  # the number of SMs that the library is asked to leave; 0 for none

    def __post_init__(self) -> None:
        if self.left_sms < 0:
            raise ConfigError(f"left_sms is {self.left_sms}; it takes a number from 0 up")

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        with self.scope(a.device):
            return torch.matmul(a, b, out=out) if out is not None else torch.matmul(a, b)

    @contextlib.contextmanager
    def scope(self, device: torch.device) -> Iterator[None]:
        """Make every product of the library leave the SMs free, until the scope ends.

        Raises ConfigError if the GPU does not have that many SMs.
        """
        with leave_sms(self.left_sms, device):
            yield
