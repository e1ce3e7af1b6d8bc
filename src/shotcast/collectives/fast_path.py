"""The fast path: repeat an eager all-reduce that was made before, without asking again how to make it.

The host spends most of an eager call on a GPU on deciding which algorithm and kernel to take. A call like one before it
has the same answers. This module checks only what may differ.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, is_grad_enabled  # names of this module: looked up in one step
from torch.compiler import is_compiling

from shotcast.collectives.choice.resolver import Call
from shotcast.collectives.interface import Executor
from shotcast.collectives.stream_order import StreamChain
from shotcast.collectives.torch_ops.versions import increment_version
from shotcast.collectives.vendor.vendor import Vendor
from shotcast.memory.streams import current_device, raw_stream


class FastPath:
    """The fast path of one communicator on a GPU.

    Args:
        calls: the calls that the communicator remembers; eager all-reduces by (elements, dtype, algorithm, reduction).
        executor: of the communicator.
        vendor: the calls of the vendor library.
        chain: of its calls.
        lock: held during a call.
        device: of the communicator.
    """

    def __init__(
        self,
        calls: Mapping[Any, Call],
        executor: Executor,
        vendor: Vendor,
        chain: StreamChain,
        lock: threading.Lock,
        device: torch.device,
    ):
        self._find, self._executor, self._vendor, self._chain = calls.get, executor, vendor, chain
        self._lock, self._device, self._index = lock, device, device.index
        self._closed = False

    def close(self) -> None:
        """Make no more calls. The caller holds the lock."""
        self._closed = True

    def keep(self, call: Call, x: torch.Tensor, out: torch.Tensor) -> None:
        """Open the fast path for a call that has just been made, if it was one kernel."""
        # in a capture another kernel may serve, and tensors without elements have no address
        if call.bound is None or not x.numel() or self._chain.capturing():
            return
        if (x.data_ptr() | out.data_ptr()) & 15:
            call.enqueue_unaligned = call.bound.one_launch(False)
        else:
            call.enqueue_aligned = call.bound.one_launch(True)

    def make(self, x: torch.Tensor, out: torch.Tensor, algorithm: str, reduction: str) -> bool:
        """Make the call, if it was made before and nothing speaks against it; else return False, with nothing done."""
        if type(x) is not Tensor or type(out) is not Tensor or is_compiling():
            return False
        addresses = x.data_ptr(), out.data_ptr()
        dtype = x.dtype
        call = self._find((x.numel(), dtype, algorithm, reduction))
        if call is None:
            return False
        enqueue = call.enqueue_unaligned if (addresses[0] | addresses[1]) & 15 else call.enqueue_aligned
        device = self._device
        if x is not out and (
            x.shape != out.shape
            or dtype is not out.dtype
            or out.device != device
            or not out.is_contiguous()
            or out.is_neg()
            or (out.requires_grad and is_grad_enabled())
        ):
            return False
        if (
            enqueue is None
            or x.device != device
            or not x.is_contiguous()
            or x.is_neg()
            or (x.requires_grad and is_grad_enabled())
            or current_device() != self._index
            or not self._lock.acquire(False)
        ):
            return False
        try:
            if self._closed or self._executor.fault() or self._vendor.failed or self._chain.enter():
                return False
            increment_version((out,))
            enqueue(raw_stream(self._index), addresses)
        finally:
            self._lock.release()
        return True
