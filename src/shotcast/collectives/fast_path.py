"""Eager all-reduces that were made before, made again by the shortest way.

The host spends most of an eager call on a GPU on questions: what is called, by which algorithm, with which kernel. A
call like one before it has the same answers. What may differ is asked here, and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch.compiler import is_compiling

from shotcast.collectives.choice.resolver import Call
from shotcast.collectives.interface import Executor
from shotcast.collectives.stream_order import StreamChain
from shotcast.memory.streams import current_device, raw_stream
from shotcast.wire import Op


class FastPath:
    """The way past all questions for eager all-reduces of one communicator on a GPU.

    Args:
        calls: the calls that the communicator remembers, by what it looks them up by.
        executor: of the communicator.
        chain: of its calls.
        lock: held during a call.
        device: of the communicator.
    """

    def __init__(
        self,
        calls: Mapping[Any, Call],
        executor: Executor,
        chain: StreamChain,
        lock: threading.Lock,
        device: torch.device,
    ):
        self._calls, self._executor, self._chain = calls, executor, chain
        self._lock, self._device = lock, device
        self._closed = False

    def close(self) -> None:
        """Make no more calls. The caller holds the lock."""
        self._closed = True

    def keep(self, call: Call, x: torch.Tensor, out: torch.Tensor) -> None:
        """Open the way for a call that has just been made, if one kernel was all there was to it."""
        # in a capture another kernel may serve, and tensors without elements have no address
        if call.bound is None or not x.numel() or self._chain.capturing():
            return
        aligned = not (x.data_ptr() | out.data_ptr()) & 15
        call.enqueue[aligned] = call.bound.one_launch(aligned)

    def make(self, x: torch.Tensor, out: torch.Tensor, algorithm: str, reduction: str) -> bool:
        """Make the call, if it was made before and nothing speaks against it; else return False, with nothing done."""
        if type(x) is not torch.Tensor or type(out) is not torch.Tensor or is_compiling():
            return False
        call = self._calls.get((Op.ALL_REDUCE, x.numel(), x.dtype, algorithm, reduction))
        if call is None:
            return False
        addresses = x.data_ptr(), out.data_ptr()
        enqueue = call.enqueue[not (addresses[0] | addresses[1]) & 15]
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
