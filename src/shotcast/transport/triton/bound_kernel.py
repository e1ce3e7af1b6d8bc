"""Calls that bring their launches, bound to a workspace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shotcast.device.triton.intrinsics import INTERPRETED
from shotcast.memory.streams import current_device, raw_stream
from shotcast.transport.kernel_call import KernelCall
from shotcast.transport.triton.binding import Enqueue, KernelContext


class BoundKernel:
    """A :class:`KernelCall` in the workspace that calls use now.

    Args:
        call: the call.
        context: returns the facts of the workspace, which has room for it, once it is launched or loaded.
        device: where it runs.
    """

    __slots__ = ("_call", "_context", "_device", "_launches")

    def __init__(self, call: KernelCall, context: Callable[[], KernelContext], device: torch.device):
        self._call, self._context, self._device = call, context, device
        self._launches: Sequence[Enqueue] = ()

    def run(self, operands: Sequence[torch.Tensor]) -> None:
        """Launch the kernels on the current stream."""
        stream = 0
        if not INTERPRETED:
            index = self._device.index
            if current_device() != index:
                with torch.cuda.device(self._device):
                    self.run(operands)
                return
            stream = raw_stream(index)
        given = self._call.given(*operands)
        for launch in self._bound():
            launch(stream, given)

    def load(self) -> None:
        """Compile the kernels and load them."""
        if not INTERPRETED:
            with torch.cuda.device(self._device):
                for launch in self._bound():
                    launch.load()

    def _bound(self) -> Sequence[Enqueue]:
        if not self._launches:
            self._launches = self._call.launches(self._context())
        return self._launches
