"""Between host and device without either waiting for the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_ALIGN = 16


def pinned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory to copy to or from ``device``. PyTorch gives it to nobody else until copies from it are done."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


def uploaded(arrays: Sequence[npt.NDArray[np.generic]], device: torch.device) -> list[torch.Tensor]:
    """The arrays on ``device``, by one copy."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // _ALIGN) * _ALIGN)
    host = pinned([starts[-1]], torch.uint8, device)
    whole = host.numpy()
    for array, start in zip(arrays, starts, strict=False):
        whole[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    kinds = [torch.from_numpy(array).dtype for array in arrays]
    parts = zip(arrays, starts, kinds, strict=False)
    return [there[start : start + array.nbytes].view(kind).view(array.shape) for array, start, kind in parts]


class Download:
    """Tensors of a device on their way to the host."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._tensors = list(tensors)
        self._arrived = None
        if tensors[0].is_cuda:
            self._tensors = [pinned(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
            for host, tensor in zip(self._tensors, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @property
    def arrived(self) -> bool:
        return self._arrived is None or self._arrived.query()

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the host. Waits for the device, and so no longer than its kernels wait for their peers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensors
