"""Order the calls of one communicator as they are made, on any CUDA streams."""

from __future__ import annotations

from typing import Any

import torch

from shotcast.errors import ConfigError
from shotcast.memory import streams as cuda_streams


class StreamChain:
    """Make the stream of each call wait for the previous call, if that was on another stream.

    Eager calls are chained to eager calls, and calls inside a graph capture to calls of the same capture, since a
    capture cannot depend on work outside it. With ``replays``, replays of graphs are calls too, in the order in which
    the host launches them: from the first capture on, one event marks the last call, whether it is eager or in a
    replay. Without it, the caller must order replays. ``streams`` has the functions of CUDA.
    """

    def __init__(self, device: torch.device, replays: bool = False, streams: Any = cuda_streams) -> None:
        self._device, self._index, self._replays = device, device.index, replays
        self._capturing, self._raw_stream = streams.capturing, streams.raw_stream
        self._current_stream, self._capture_id = streams.current_stream, streams.capture_id
        self._new_event = streams.LastCall
        self._last: Any = None
        self._eager: Any = None
        self._eager_handle = -1
        self._captured: dict[int, Any] = {}

    def capturing(self) -> bool:
        """Return whether a call on the current stream would be captured in a graph now."""
        return self._capturing()

    def enter(self) -> bool:
        """Order a call that is about to run on the current stream; return whether that stream is being captured.

        Call :meth:`leave` once the call is enqueued. Raises ConfigError if the call is eager and the stream of the
        previous eager call is being captured now: a stream that waited for it would join the capture.
        """
        if self._capturing():
            self._follow_captured(self._current_stream(self._device))
            return True
        handle = self._raw_stream(self._index)
        if self._last is not None:
            self._last.wait(handle)
            if handle != self._eager_handle:
                self._eager, self._eager_handle = self._current_stream(self._device), handle
        elif handle != self._eager_handle:
            self._follow_eager(self._current_stream(self._device), handle)
        return False

    def leave(self, capturing: bool) -> None:
        """Record a call that was enqueued on the current stream, in a capture or not."""
        if self._last is not None:
            record = self._last.record_captured if capturing else self._last.record
            record(self._raw_stream(self._index))

    @property
    def has_eager(self) -> bool:
        return self._eager is not None

    @property
    def has_captured(self) -> bool:
        """Return whether captured calls exist, whose graphs may be replayed."""
        return bool(self._captured)

    def last(self) -> Any:
        """Return the stream of the last eager call, which has waited for all earlier ones.

        None if there was none, or if that stream is being captured now, so nothing outside can wait for it.
        """
        return None if self._eager is None or self._capture_id(self._eager) else self._eager

    def _follow_eager(self, stream: Any, handle: int) -> None:
        if self._eager is not None:
            if self._capture_id(self._eager):
                raise ConfigError(
                    "the eager call before this one was made on a stream that is being captured now, and cannot be "
                    "waited for; capture on a stream without eager calls of this communicator, or make this call later"
                )
            stream.wait_stream(self._eager)
        self._eager, self._eager_handle = stream, handle

    def _follow_captured(self, stream: Any) -> None:
        capture = self._capture_id(stream)
        last = self._captured.get(capture)
        if last is None:  # its first call: what ended before it began is over
            self._captured = {one: other for one, other in self._captured.items() if self._capture_id(other) == one}
            if self._replays:  # replays wait for the previous call
                if self._last is None:
                    self._last = self._new_event()
                    if self._eager is not None and not self._capture_id(self._eager):
                        self._last.record(self._eager_handle)
                self._last.wait_captured(self._raw_stream(self._index))
        elif last != stream:
            stream.wait_stream(last)
        self._captured[capture] = stream
