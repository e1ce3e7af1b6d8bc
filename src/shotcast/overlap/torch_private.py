"""Functions of PyTorch that are not public, or may change: the only file that uses them, for PyTorch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from shotcast.errors import UnsupportedError


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


def new_green_context(sms: int, device: torch.device) -> Any:
    """Make a green context of at least ``sms`` SMs: the driver rounds up to whole groups.

    Raises:
        UnsupportedError: PyTorch, CUDA or the GPU has none.
    """
    from torch.cuda import green_contexts

    if not green_contexts.SUPPORTED:
        raise UnsupportedError("this PyTorch was built without green contexts; CUDA 12.8 and later have them")
    try:
        return green_contexts.GreenContext.create(num_sms=sms, device_id=device.index or 0)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedError(f"{device} cannot set {sms} SMs aside as a green context: {reason}") from error


@contextlib.contextmanager
def green_context(context: Any, device: torch.device) -> Iterator[None]:
    """Run what this thread launches on the SMs of a green context, until the scope ends.

    Meanwhile a stream of the context is current. It waits for the stream that was current at the beginning, which waits
    for it at the end.

    Raises:
        UnsupportedError: the stream is captured in a graph, which PyTorch's streams of green contexts cannot join.
    """
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError("products in green contexts cannot be captured in a graph")
    stream = torch.cuda.current_stream(device)
    context.set_context()
    try:
        yield
    finally:
        context.pop_context()
        torch.cuda.set_stream(stream)
