"""CUDA streams and events that are emulated: what is enqueued runs later, in an order that a test chooses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


class EmulatedEvent:
    """An event. A wait is for the record before it; an event that was never recorded is not waited for."""

    def __init__(self, streams: EmulatedStreams):
        self._streams = streams
        self.records = 0
        self.happened: set[int] = set()

    def record(self, stream: EmulatedStream) -> None:
        self.records += 1
        number = self.records
        stream.enqueue(lambda: self.happened.add(number))


class EmulatedStream:
    """A stream: work that is enqueued, and what it waits for."""

    def __init__(self, streams: EmulatedStreams):
        self.streams = streams
        self.queue: list[tuple[Callable[[], Any], Callable[[], bool]]] = []

    def enqueue(self, work: Callable[[], Any], ready: Callable[[], bool] = lambda: True) -> None:
        self.queue.append((work, ready))

    def wait_event(self, event: EmulatedEvent) -> None:
        number = event.records
        if number:
            self.enqueue(lambda: None, lambda: number in event.happened)

    def wait_stream(self, other: EmulatedStream) -> None:
        event = EmulatedEvent(self.streams)
        event.record(other)
        self.wait_event(event)


class EmulatedStreams:
    """The functions of ``torch.cuda`` that StreamLanes calls."""

    def __init__(self) -> None:
        self.all: list[EmulatedStream] = []
        self.now = self._add()

    def _add(self) -> EmulatedStream:
        self.all.append(EmulatedStream(self))
        return self.all[-1]

    def current_stream(self, device: torch.device) -> EmulatedStream:
        return self.now

    def Stream(self, device: torch.device, priority: int) -> EmulatedStream:  # noqa: N802
        return self._add()

    def Event(self, enable_timing: bool = False) -> EmulatedEvent:  # noqa: N802
        return EmulatedEvent(self)

    @contextlib.contextmanager
    def stream(self, stream: EmulatedStream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def enqueue(self, work: Callable[[], Any]) -> None:
        """Enqueue on the current stream, as a kernel is."""
        self.now.enqueue(work)

    def run(self, order: tuple[int, ...]) -> None:
        """Run everything: always the first stream of ``order`` that can go on, so the last is as late as can be."""
        while any(stream.queue for stream in self.all):
            for number in order:
                queue = self.all[number].queue
                if queue and queue[0][1]():
                    queue.pop(0)[0]()
                    break
            else:
                raise AssertionError("streams wait for each other")
