"""All-reduces that were made before, made again by the shortest way.

Of what the host spends on an eager call on a GPU, most is questions: what is called, by which algorithm, with which
kernel. A call like one before it has the same answers; what may differ is asked here, and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_compiling

from shotcast.collectives.interface import Executor
from shotcast.collectives.stream_order import StreamChain
from shotcast.memory.streams import current_device, raw_stream
from shotcast.wire import CallPlan

Enqueue = Callable[[int, Sequence[Any]], None]
"""Enqueues a kernel on a stream, by its handle, with the addresses of x and out."""
_KEPT = 4096


class Repeats:
    """The kernels of eager all-reduces of a communicator, by what told the calls apart.

    Args:
        executor: of the communicator, on a GPU.
        chain: of its calls.
        lock: held during a call.
    """

    def __init__(self, executor: Executor, chain: StreamChain, lock: threading.Lock, device: torch.device):
        self._executor, self._chain, self._lock, self._device = executor, chain, lock, device
        self._kernels: dict[tuple[int, torch.dtype, str, str, bool], Enqueue] = {}
        self._closed = False

    def close(self) -> None:
        """Make no more calls. The caller holds the lock."""
        self._closed = True

    def keep(self, plan: CallPlan, x: torch.Tensor, out: torch.Tensor, algorithm: str, reduction: str) -> None:
        """Remember a call that has just been made, if one kernel was all there was to it."""
        aligned = not (x.data_ptr() | out.data_ptr()) & 15
        enqueue = self._executor.whole(plan, aligned)
        # in a capture another kernel may serve, and tensors without elements have no address
        if enqueue is None or not x.numel() or self._chain.capturing():
            return
        if len(self._kernels) >= _KEPT:
            self._kernels.clear()
        self._kernels[x.numel(), x.dtype, algorithm, reduction, aligned] = enqueue

    def make(self, x: torch.Tensor, out: torch.Tensor, algorithm: str, reduction: str) -> bool:
        """Make the call, if it was made before and nothing speaks against it; else say False, with nothing done."""
        if type(x) is not torch.Tensor or type(out) is not torch.Tensor or is_compiling():
            return False
        addresses = x.data_ptr(), out.data_ptr()
        aligned = not (addresses[0] | addresses[1]) & 15
        enqueue = self._kernels.get((x.numel(), x.dtype, algorithm, reduction, aligned))
        device = self._device
        if (
            enqueue is None
            or x.shape != out.shape
            or x.dtype is not out.dtype
            or x.device != device
            or out.device != device
            or not x.is_contiguous()
            or not out.is_contiguous()
            or x.is_neg()
            or out.is_neg()
            or out.requires_grad
            or current_device() != device.index
            or not self._lock.acquire(blocking=False)
        ):
            return False
        try:
            if self._closed or self._executor.fault() or self._chain.enter(device):
                return False
            enqueue(raw_stream(device.index), addresses)
        finally:
            self._lock.release()
        return True
