"""The fast path: repeat an eager all-reduce that was made before, without asking again how to make it.

The host spends most of an eager call on a GPU, and of a small call between CPU ranks, on deciding which algorithm and
kernel to take. A call like one before it has the same answers. This module checks only what may differ, and its two
classes spell the checks out: a function call for each would cost a tenth of the call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
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


class GpuFastPath:
    """The fast path of one communicator on a GPU.

    Args:
        calls: the calls that the communicator remembers; eager all-reduces by (elements, dtype, algorithm, reduction).
        executor: of the communicator.
        vendor: the calls of the vendor library.
        chain: of its calls.
        lock: held during a call.
        device: of the communicator.

    Attributes:
        counts_versions: calls count up autograd's versions of the tensors that they write.
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
        self.counts_versions = True

    def close(self) -> None:
        """Make no more calls. The caller holds the lock."""
        self._closed = True

    def keep(self, call: Call, x: torch.Tensor, out: torch.Tensor) -> None:
        """Open the fast path for a call that has just been made, if it was one kernel."""
        # in a capture another kernel may serve, tensors without elements have no address, and complex ones may be
        # conjugated lazily
        if call.bound is None or not x.numel() or x.is_complex() or self._chain.capturing():
            return
        if (x.data_ptr() | out.data_ptr()) & 15:
            call.enqueue_unaligned = call.bound.one_launch(False)
        else:
            call.enqueue_aligned = call.bound.one_launch(True)

    def make(self, x: torch.Tensor, out: torch.Tensor, algorithm: str, reduction: str) -> bool:
        """Make the call, if it was made before and nothing speaks against it; else return False, with nothing done."""
        if type(x) is not Tensor or type(out) is not Tensor or is_compiling():
            return False
        dtype = x.dtype
        call = self._find((x.numel(), dtype, algorithm, reduction))
        if call is None or not x.is_contiguous():  # sparse tensors are not, and have no address
            return False
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
        addresses = x.data_ptr(), out.data_ptr()
        behind = addresses[1] - addresses[0]
        if behind and -x.nbytes < behind < x.nbytes:  # the slow path refuses what overlaps
            return False
        enqueue = call.enqueue_unaligned if (addresses[0] | addresses[1]) & 15 else call.enqueue_aligned
        if (
            enqueue is None
            or x.device != device
            or x.is_neg()
            or (x.requires_grad and is_grad_enabled())
            or current_device() != self._index
            or not self._lock.acquire(False)
        ):
            return False
        try:
            if self._closed or self._executor.fault() or self._vendor.failed or self._chain.enter():
                return False
            if self.counts_versions:
                increment_version((out,))
            enqueue(raw_stream(self._index), addresses)
            self._chain.leave(False)
        finally:
            self._lock.release()
        return True


class CpuFastPath:
    """The fast path of one communicator of CPU ranks, whose calls block.

    Args:
        calls, executor, vendor, lock: as of :class:`GpuFastPath`.
        check: raises the fault that has stopped the communicator.

    Attributes:
        counts_versions: as of :class:`GpuFastPath`.
    """

    def __init__(
        self,
        calls: Mapping[Any, Call],
        executor: Executor,
        vendor: Vendor,
        lock: threading.Lock,
        check: Callable[[], None],
    ):
        self._find, self._executor, self._vendor = calls.get, executor, vendor
        self._lock, self._check = lock, check
        self._closed = False
        self.counts_versions = True
        # PyTorch takes longer to say whether a tensor is negated lazily than for all else, and it is always the same
        self._x: Callable[[], torch.Tensor | None] = _no_tensor
        self._out: Callable[[], torch.Tensor | None] = _no_tensor

    def close(self) -> None:
        """Make no more calls. The caller holds the lock."""
        self._closed = True

    def keep(self, call: Call, x: torch.Tensor, out: torch.Tensor) -> None:
        """Open the fast path for a call that has just been made, if own compiled code made it.

        Complex tensors, which may be conjugated lazily, take the slow path.
        """
        call.again = call.bound is not None and not call.by_library and x.numel() > 0 and not x.is_complex()

    def make(self, x: torch.Tensor, out: torch.Tensor, algorithm: str, reduction: str) -> bool:
        """Make the call, if it was made before and nothing speaks against it; else return False, with nothing done.

        Raises the named errors of a call that fails.
        """
        if type(x) is not Tensor or type(out) is not Tensor or is_compiling():
            return False
        dtype = x.dtype
        call = self._find((x.numel(), dtype, algorithm, reduction))
        if call is None or not call.again:
            return False
        if self._x() is not x or self._out() is not out:
            if x.is_neg() or out.is_neg():
                return False
            self._x, self._out = weakref.ref(x), weakref.ref(out)
        if x is not out and (
            dtype is not out.dtype
            or x.size() != out.size()
            or not out.is_cpu
            or not out.is_contiguous()
            or (out.requires_grad and is_grad_enabled())
        ):
            return False
        if (
            not x.is_cpu
            or not x.is_contiguous()
            or (x.requires_grad and is_grad_enabled())
            or (x is not out and (behind := out.data_ptr() - x.data_ptr()) and -x.nbytes < behind < x.nbytes)
            or not self._lock.acquire(False)
        ):
            return False
        try:
            executor = self._executor
            if self._closed or self._vendor.failed or executor.fault():
                return False
            if self.counts_versions:
                increment_version((out,))
            assert call.bound is not None
            call.bound.run(x, out)
            if executor.fault():
                self._check()
        finally:
            self._lock.release()
        return True


def _no_tensor() -> None:
    """Stand for a reference to no tensor."""
