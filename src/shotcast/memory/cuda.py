"""Symmetric memory of the GPUs of one node, from PyTorch. The only file that uses PyTorch's private interface to it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from shotcast import env
from shotcast.errors import ClosedError, ConfigError


class CudaBuffer:
    """``nbytes`` on each rank's GPU, mapped by all; a :class:`~shotcast.memory.symmetric.SymmetricBuffer`.

    Args:
        group: the process group; all GPUs have peer access to each other.
        nbytes: bytes on each rank.
        device: this rank's GPU.
        order: for each rank of the communicator, its rank in the process group.
        shared: several ranks share a GPU.

    Raises:
        ConfigError: PyTorch cannot allocate or map the memory (the cause is chained).
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, device: torch.device, order: Sequence[int], shared: bool):
        if not env.multicast():
            os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        if shared:
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        self.nbytes = nbytes
        try:
            with torch.cuda.device(device):
                self._tensor: torch.Tensor | None = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
                self._handle = symmetric_memory.rendezvous(self._tensor, group=group.group_name)
        except RuntimeError as error:
            raise ConfigError(
                f"PyTorch could not share {nbytes} bytes of {device} with the other GPUs of the group: {error}"
            ) from error
        self._tensor.zero_()
        self._order = tuple(order)
        self.addresses = tuple(int(self._handle.buffer_ptrs[member]) for member in order)
        self.multicast_address = int(self._handle.multicast_ptr or 0) if env.multicast() else 0

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return rank ``rank``'s bytes from ``offset`` on as a tensor. Raises ConfigError beyond the end."""
        if self._tensor is None:
            raise ClosedError("this symmetric buffer is closed")
        if offset < 0 or offset + math.prod(shape) * dtype.itemsize > self.nbytes:
            raise ConfigError(f"{list(shape)} of {dtype} at byte {offset} exceeds the buffer's {self.nbytes} bytes")
        return self._handle.get_buffer(self._order[rank], tuple(shape), dtype, offset // dtype.itemsize)

    def close(self) -> None:
        """Release the memory. Every rank must have finished with it. A second call does nothing."""
        if self._tensor is None:
            return
        self._tensor = None
        del self._handle
