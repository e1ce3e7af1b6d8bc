"""CUDA streams and captures that are recorded in place of a GPU's: which calls each call waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class FakeStream:
    """A stream. It knows the calls that end before what is enqueued next begins: eager, or of its capture."""

    def __init__(self, streams: FakeStreams, number: int):
        self.streams, self.number = streams, number
        self.eager: set[int] = set()
        self.captured: set[int] = set()
        self.capture = 0

    @property
    def after(self) -> set[int]:
        """The calls that what is enqueued next waits for."""
        return self.captured if self.capture else self.eager

    def wait_stream(self, other: FakeStream) -> None:
        """Wait as CUDA does: a stream that waits for one that is captured joins the capture."""
        self.streams.waits.append((self.number, other.number))
        if self.capture and not other.capture:
            raise RuntimeError("a capture cannot depend on work outside it")
        if self.capture and self.capture != other.capture:
            raise RuntimeError("two captures cannot be merged")
        if self.capture != other.capture:
            self.capture, self.captured = other.capture, set()
        self.after.update(other.after)


class FakeLastCall:
    """An event, and the nodes that wait for it and record it in captures, by the number of the capture."""

    def __init__(self, streams: FakeStreams):
        self._streams = streams
        self.after: set[int] = set()
        self.waits: set[int] = set()
        self.records: dict[int, set[int]] = {}

    def _stream(self, handle: int) -> FakeStream:
        return self._streams.all[handle]

    def record(self, stream: int) -> None:
        assert not self._stream(stream).capture, "a plain record would join the capture"
        self.after = set(self._stream(stream).eager)

    def wait(self, stream: int) -> None:
        assert not self._stream(stream).capture
        self._stream(stream).eager |= self.after

    def wait_captured(self, stream: int) -> None:
        self.waits.add(self._stream(stream).capture)

    def record_captured(self, stream: int) -> None:
        capture = self._stream(stream).capture
        self.records[capture] = self.records.get(capture, set()) | self._stream(stream).captured


class FakeStreams:
    """The functions that a StreamChain asks of CUDA.

    Attributes:
        waits: each wait so far, by the numbers of the streams.
        asked: how often the current stream was made an object, and how often its capture was looked up.
    """

    def __init__(self, count: int = 1):
        self.all = [FakeStream(self, number) for number in range(count)]
        self.current = self.all[0]
        self.waits: list[tuple[int, int]] = []
        self.asked = 0
        self._captures = 0

    def begin(self, stream: FakeStream) -> int:
        """Begin the capture of a stream, whose earlier work is not part of it; return its number."""
        self._captures += 1
        stream.capture, stream.captured = self._captures, set()
        return self._captures

    def end(self, capture: int) -> None:
        """End a capture: what its streams do next waits for nothing in it."""
        for stream in self.all:
            if stream.capture == capture:
                stream.capture = 0

    @contextmanager
    def captured(self, stream: FakeStream) -> Iterator[None]:
        """Capture a stream, which is the current one."""
        before, self.current = self.current, stream
        capture = self.begin(stream)
        try:
            yield
        finally:
            self.end(capture)
            self.current = before

    def LastCall(self) -> FakeLastCall:  # noqa: N802 - a class
        self.last_call = FakeLastCall(self)
        return self.last_call

    def capturing(self) -> bool:
        return self.current.capture != 0

    def raw_stream(self, device_index: int) -> int:
        return self.current.number

    def current_stream(self, device: torch.device) -> FakeStream:
        self.asked += 1
        return self.current

    def capture_id(self, stream: FakeStream) -> int:
        self.asked += 1
        return stream.capture
