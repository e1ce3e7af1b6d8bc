"""PyTorch functions that are private or may change: the only file that uses them, for PyTorch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

from shotcast.errors import ConfigError


@contextlib.contextmanager
def leave_sms(sms: int, device: torch.device) -> Iterator[None]:
    """Make products of the vendor's library leave ``sms`` SMs of a GPU free, until the scope ends. 0 changes nothing.

    PyTorch passes the carve-out to cuBLASLt but not to cuBLAS, so products use cuBLASLt meanwhile. Both settings apply
    to the whole process, and to kernels launched or captured meanwhile. In nested scopes, the inner one applies.

    Raises:
        ConfigError: the GPU does not have that many SMs.
    """
    if not sms or device.type != "cuda":
        yield
        return
    count = _sm_count(device)
    if not 0 < sms < count:
        raise ConfigError(f"sms is {sms}; {device} has {count} SMs, and some must remain")
    carveout, library = torch._C._get_sm_carveout_experimental(), torch.backends.cuda.preferred_blas_library()
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        torch._C._set_sm_carveout_experimental(sms)
        yield
    finally:
        torch._C._set_sm_carveout_experimental(carveout)
        torch.backends.cuda.preferred_blas_library(library)


@functools.cache
def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
