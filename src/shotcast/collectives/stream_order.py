"""Order the calls of one communicator as they are made, whatever CUDA streams they are made on."""

from __future__ import annotations

import ctypes

import torch

from shotcast.memory import driver
from shotcast.memory.streams import capturing, raw_stream


def _capture_id(stream: torch.cuda.Stream) -> int:
    """Return the number of the graph capture of ``stream``, 0 for none. PyTorch has no public function for it."""
    status, number = ctypes.c_int(0), ctypes.c_ulonglong(0)
    none = ctypes.c_void_p(None)
    error = driver.library().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream.cuda_stream), ctypes.byref(status), ctypes.byref(number), none, none, none
    )
    driver.check(error, "asking for the capture of a stream")
    return number.value if status.value == 1 else 0


class StreamChain:
    """Make the stream of each call wait for the call before it, if that was on another stream.

    Eager calls are chained to eager calls. Calls inside a graph capture are chained only to those of the same capture,
    as a capture cannot depend on work outside it. Whoever launches replays orders them.
    """

    def __init__(self) -> None:
        self._last: torch.cuda.Stream | None = None
        self._handle = 0
        self._capture = 0

    @staticmethod
    def capturing() -> bool:
        """Return whether a call on the current stream would now be captured in a graph."""
        return capturing()

    def enter(self, device: torch.device) -> bool:
        """Order a call that is about to be made on the current stream; return whether that stream is being captured."""
        captured = capturing()
        handle = raw_stream(device.index)
        if self._last is not None and handle == self._handle and not captured and not self._capture:
            return False
        self._handle = handle
        stream = torch.cuda.current_stream(device)
        capture = _capture_id(stream) if captured else 0
        if self._last is not None and stream != self._last and capture == self._capture:
            stream.wait_stream(self._last)
        self._last, self._capture = stream, capture
        return captured
