"""Streams on which calls of copy engines go on, apart from all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shotcast.memory import driver, streams
from shotcast.transport.triton import layout


class Lanes:
    """The streams of a call for its copies and meetings, and events between them, which serve again every four rounds.

    Args:
        device: the GPU.
        peers: the number of other ranks.
    """

    def __init__(self, device: torch.device, peers: int):
        places = layout.COPY_PLACES
        self.stage, self.meet = driver.new_stream(device), driver.new_stream(device)
        self.pull = [driver.new_stream(device) for _ in range(peers)]
        self.start = torch.cuda.Event()
        self.staged, self.met = ([torch.cuda.Event() for _ in range(places)] for _ in range(2))
        self.pulled = [[torch.cuda.Event() for _ in range(peers)] for _ in range(places)]


class LanesOfCalls:
    """The lanes of a workspace, whose calls come one after another.

    Eager calls share lanes, as do the calls of a graph capture. Lanes of a capture serve no other call: a stream that
    is captured takes what is enqueued on it into the graph, and a capture cannot wait for what is outside it. Nor do
    communicators share lanes: a call of one would wait for a call of another, which its rank may make first.

    Args:
        make: makes lanes of a GPU, for a number of other ranks.
        capture_id: returns the number of the capture of a stream, 0 for none.
    """

    def __init__(
        self,
        make: Callable[[torch.device, int], Any] = Lanes,
        capture_id: Callable[[Any], int] = streams.capture_id,
    ):
        self._make, self._capture_id = make, capture_id
        self._eager: Any = None
        self._captured: dict[int, Any] = {}

    def take(self, stream: torch.cuda.Stream, peers: int, capturing: bool) -> Any:
        """Return the lanes for a call on ``stream``, which is being captured or is not."""
        if not capturing:
            if self._eager is None:
                self._eager = self._make(stream.device, peers)
            return self._eager
        capture = self._capture_id(stream)
        if capture not in self._captured:  # those of captures that have ended are given back
            self._captured = {number: one for number, one in self._captured.items() if self._is_in(one, number)}
            self._captured[capture] = self._make(stream.device, peers)
        return self._captured[capture]

    def _is_in(self, lanes: Any, capture: int) -> bool:
        return self._capture_id(lanes.stage) == capture
