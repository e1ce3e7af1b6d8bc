"""The current CUDA device and stream, and capture state, by private functions of PyTorch, which only this file uses.

The public functions check and wrap, which takes about a microsecond each, and an eager call needs several.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shotcast.memory import driver


def _without_cuda(*arguments: int) -> Any:
    raise RuntimeError("this PyTorch has no CUDA")


# PyTorch's own, as a function that calls them would take longer than they do
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _without_cuda)
"""Return the handle of a GPU's current stream, given the GPU's index."""
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _without_cuda)
"""Return the index of the current GPU."""
capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", _without_cuda)
"""Return whether the current stream is being captured in a graph."""


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a GPU's current stream, which can wait for others; slower than getting its handle."""
    return torch.cuda.current_stream(device.index)  # a torch.device would be checked for 15 us


def capture_id(stream: torch.cuda.Stream) -> int:
    """Return the id of the graph capture of ``stream``, 0 for none. PyTorch has no public function for it."""
    return capture_of(stream.cuda_stream)


def capture_of(stream: int) -> int:
    """Return the id of the graph capture of the stream with this handle, 0 for none."""
    status, number = ctypes.c_int(0), ctypes.c_ulonglong(0)
    none = ctypes.c_void_p(None)
    asked = ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), none, none, none
    driver.call("cuStreamGetCaptureInfo_v2", "asking for the capture of a stream", *asked)
    return number.value if status.value == 1 else 0


_NO_TIMING, _EXTERNAL = 2, 1


class SideLane:
    """A highest-priority GPU stream for work that calls do next to their stream. It waits for no other call."""

    def __init__(self, device: torch.device):
        self._device, self._stream = device, 0
        self._captured: SideLane | None = None
        self._begun, self._marks, self._turn = 0, [0, 0], 0

    def of(self, stream: int) -> SideLane | None:
        """Return the lane of a call on a stream: this one, or another for captured calls. None while that is in use.

        A captured stream puts all work into the graph until the capture ends, and a replay runs on other streams.
        """
        if not capturing():
            return self._made()
        if self._captured is None:
            self._captured = SideLane(self._device)
        own = self._captured._made()._stream
        return self._captured if capture_of(own) in (0, capture_of(stream)) else None

    def _made(self) -> SideLane:
        if not self._stream:
            self._stream = driver.new_stream(self._device, urgent=True).cuda_stream
            self._begun, *self._marks = (_new_event() for _ in range(3))
            weakref.finalize(self, _destroy, self._stream, (self._begun, *self._marks)).atexit = False
        return self

    def after(self, stream: int) -> int:
        """Order the lane after the pending work of the stream with this handle, and return the lane's handle."""
        _record(self._begun, stream)
        self.wait(self._stream, self._begun)
        return self._stream

    def mark(self) -> int:
        """Record and return an event after the lane's pending work; the event before the last is recycled."""
        self._turn ^= 1
        _record(self._marks[self._turn], self._stream)
        return self._marks[self._turn]

    @staticmethod
    def wait(stream: int, event: int) -> None:
        """Make a stream wait for an event."""
        driver.call("cuStreamWaitEvent", "waiting for an event", ctypes.c_void_p(stream), ctypes.c_void_p(event), 0)


def _destroy(stream: int, events: Sequence[int]) -> None:
    with driver.relaxed():
        driver.library().cuStreamDestroy_v2(ctypes.c_void_p(stream))  # what is enqueued goes on
        for event in events:
            driver.library().cuEventDestroy_v2(ctypes.c_void_p(event))


def _new_event() -> int:
    event = ctypes.c_void_p()
    driver.call("cuEventCreate", "creating an event", ctypes.byref(event), _NO_TIMING)
    return event.value or 0


def _record(event: int, stream: int) -> None:
    error = driver.library().cuEventRecord(ctypes.c_void_p(event), ctypes.c_void_p(stream))
    driver.check(error, "recording an event")


class LastCall:
    """A CUDA event that marks the last of some calls, eager or captured, in the host's order.

    A replay counts as made when the graph is launched: the nodes that :meth:`wait_captured` and :meth:`record_captured`
    add to the graph wait for earlier records, and record for later calls.
    """

    def __init__(self) -> None:
        event = ctypes.c_void_p(_new_event())
        self._event, self._nodes = event, (0, ctypes.c_void_p())
        weakref.finalize(self, driver.library().cuEventDestroy_v2, event).atexit = False

    def record(self, stream: int) -> None:
        """Mark a stream's pending work as the last call."""
        error = driver.library().cuEventRecord(self._event, ctypes.c_void_p(stream))
        driver.check(error, "recording an event")

    def wait(self, stream: int) -> None:
        """Make a stream wait for the last call."""
        error = driver.library().cuStreamWaitEvent(ctypes.c_void_p(stream), self._event, 0)
        driver.check(error, "waiting for an event")

    def wait_captured(self, stream: int) -> None:
        """Make a stream under capture wait, in each replay, for the call before the replay."""
        driver.call("cuStreamWaitEvent", "waiting in a graph", ctypes.c_void_p(stream), self._event, _EXTERNAL)

    def record_captured(self, stream: int) -> None:
        """Mark a stream's captured work as the last call of each replay.

        The recording node is a leaf: no kernel of the graph waits for it. It waits for the previous one, so that the
        last node records last.
        """
        status, number, graph = ctypes.c_int(0), ctypes.c_ulonglong(0), ctypes.c_void_p()
        before, edges, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_void_p(), ctypes.c_size_t(0)
        asked = (status, number, graph, before, edges, count)
        what = "asking for the capture of a stream"
        driver.call("cuStreamGetCaptureInfo_v3", what, ctypes.c_void_p(stream), *map(ctypes.byref, asked))
        capture, last = self._nodes
        nodes = [before[i] for i in range(count.value)] + ([last.value] if capture == number.value else [])
        node = ctypes.c_void_p()
        given = (ctypes.c_void_p * len(nodes))(*nodes), ctypes.c_size_t(len(nodes)), self._event
        driver.call("cuGraphAddEventRecordNode", "recording in a graph", ctypes.byref(node), graph, *given)
        self._nodes = number.value, node
