"""Copies between host and device, in which neither waits for the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_ALIGN = 16


def pinned_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate host memory for copies to or from ``device``, pinned on CUDA.

    PyTorch does not reuse it until copies from it are done.
    """
    return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def copy_to_device(arrays: Sequence[npt.NDArray[np.generic]], device: torch.device) -> list[torch.Tensor]:
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // _ALIGN) * _ALIGN)
    host = pinned_empty([starts[-1]], torch.uint8, device)
    host_bytes = host.numpy()
    for array, start in zip(arrays, starts, strict=False):
        host_bytes[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    device_bytes = host.to(device, non_blocking=True)
    dtypes = [torch.from_numpy(array).dtype for array in arrays]
    parts = zip(arrays, starts, dtypes, strict=False)
    return [device_bytes[start : start + array.nbytes].view(dtype).view(array.shape) for array, start, dtype in parts]


class HostCopy:
    """Device tensors on their way to the host."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._tensors = list(tensors)
        self._done = None
        if tensors[0].is_cuda:
            self._tensors = [pinned_empty(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
            for host, tensor in zip(self._tensors, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    @property
    def done(self) -> bool:
        return self._done is None or self._done.query()

    def wait(self) -> list[torch.Tensor]:
        """Wait for the tensors and return them on the host.

        This waits for the device, so at most as long as its kernels wait for their peers.
        """
        if self._done is not None:
            self._done.synchronize()
        return self._tensors
