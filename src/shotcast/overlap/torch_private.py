"""PyTorch functions that are private or may change: the only file that uses them, for PyTorch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def sm_carveout(sms: int) -> Iterator[None]:
    """Make products of the vendor's library leave ``sms`` SMs free, until the scope ends.

    PyTorch passes the carve-out to cuBLASLt but not to cuBLAS, so products use cuBLASLt meanwhile. Both settings apply
    to the whole process, and to kernels launched or captured meanwhile. In nested scopes, the inner one applies.
    """
    carveout, library = torch._C._get_sm_carveout_experimental(), torch.backends.cuda.preferred_blas_library()
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        torch._C._set_sm_carveout_experimental(sms)
        yield
    finally:
        torch._C._set_sm_carveout_experimental(carveout)
        torch.backends.cuda.preferred_blas_library(library)
