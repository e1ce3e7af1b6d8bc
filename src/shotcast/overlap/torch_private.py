"""Functions of PyTorch that are not public, or may change: the only file that uses them, for PyTorch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def sm_carveout(sms: int) -> Iterator[None]:
    """Let products of the vendor's library leave ``sms`` SMs alone, until the scope ends.

    PyTorch passes the carve-out on to cuBLASLt and not to cuBLAS, so products go there meanwhile. Both count for the
    whole process, and for kernels launched or captured meanwhile. Scopes may be nested: the inner one counts.
    """
    carveout, library = torch._C._get_sm_carveout_experimental(), torch.backends.cuda.preferred_blas_library()
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        torch._C._set_sm_carveout_experimental(sms)
        yield
    finally:
        torch._C._set_sm_carveout_experimental(carveout)
        torch.backends.cuda.preferred_blas_library(library)
