"""The streams of copy engines: which calls share them, checked without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from shotcast.transport.triton.copy_engines import EngineCopies
from shotcast.transport.triton.lanes import LanesOfCalls

DEVICE = torch.device("cuda", 0)


def stream(capture: int = 0) -> Any:
    return SimpleNamespace(device=DEVICE, capture=capture)


def lanes_of_calls() -> LanesOfCalls:
    def capture_id(asked: Any) -> int:
        return asked.capture

    return LanesOfCalls(lambda device, peers: SimpleNamespace(stage=stream()), capture_id)


def test_captures_have_lanes_of_their_own_while_they_last() -> None:
    calls = lanes_of_calls()
    eager = calls.take(stream(), 3, False)
    first = calls.take(stream(1), 3, True)
    first.stage.capture = 1
    second = calls.take(stream(2), 3, True)  # on another thread
    second.stage.capture = 2
    assert len({id(one) for one in (eager, first, second)}) == 3
    assert calls.take(stream(1), 3, True) is first
    assert calls.take(stream(), 3, False) is eager
    first.stage.capture = 0  # its capture has ended
    third = calls.take(stream(3), 3, True)
    assert all(third is not one for one in (eager, first, second))
    assert list(calls._captured) == [2, 3]


def test_communicators_share_no_lanes() -> None:
    assert lanes_of_calls().take(stream(), 3, False) is not lanes_of_calls().take(stream(), 3, False)


def test_a_call_that_copies_nothing_meets_on_its_own_stream() -> None:
    met: list[tuple[int, Any]] = []
    meeting: Any = lambda *given: met.append(given)  # noqa: E731
    EngineCopies([], [meeting] * 4, 3, lanes_of_calls())(0x5EED, (1 << 40, 1 << 41))
    assert met == [(0x5EED, ())]
