"""Calls wait for the call before them, on whatever streams they are made, eager or captured."""

from __future__ import annotations

import pytest
import torch
from fake_streams import FakeStream, FakeStreams
from hypothesis import given
from hypothesis import strategies as st

from shotcast.collectives.stream_order import StreamChain
from shotcast.errors import ConfigError

GPU = torch.device("cuda", 0)


class Calls:
    """A chain, and calls on its streams: a call knows which calls it waits for."""

    def __init__(self, count: int, replays: bool = False):
        self.streams = FakeStreams(count)
        self.chain = StreamChain(GPU, replays, self.streams)
        self.made = 0

    def call(self, stream: FakeStream) -> int:
        """Make a call on a stream; return its number."""
        self.streams.current = stream
        captured = self.chain.enter()
        assert captured == bool(stream.capture), "the call joined or left a capture"
        self.made += 1
        self.waited_for = set(stream.after)
        stream.after.add(self.made)
        self.chain.leave(captured)
        return self.made

    def replay(self, capture: int, stream: FakeStream) -> int:
        """Launch a graph with calls on a stream; return the number of a call that it ends with."""
        event = self.streams.last_call
        assert event.records[capture], "nothing in the graph records its calls"
        self.waited_for = stream.eager | (event.after if capture in event.waits else set())
        self.made += 1
        event.after = self.waited_for | {self.made}  # the node that records waits for the calls
        stream.eager |= event.after
        return self.made


def test_one_stream_is_asked_nothing() -> None:
    calls = Calls(1)
    calls.call(calls.streams.all[0])
    asked = calls.streams.asked
    for _ in range(5):
        calls.call(calls.streams.all[0])
    assert calls.streams.asked == asked
    assert calls.streams.waits == []


def test_eager_calls_wait_across_a_capture() -> None:
    calls = Calls(3)
    first, second, third = calls.streams.all
    before = calls.call(first)
    capture = calls.streams.begin(second)
    calls.call(second)
    calls.streams.end(capture)
    calls.call(third)
    assert before in calls.waited_for
    assert calls.streams.waits == [(2, 0)]


def test_an_eager_call_during_a_capture_waits_for_the_eager_one() -> None:
    calls = Calls(3)
    first, second, third = calls.streams.all
    before = calls.call(first)
    calls.streams.begin(second)
    captured = calls.call(second)
    calls.call(third)
    assert calls.waited_for == {before}
    calls.call(second)
    assert calls.waited_for == {captured}


def test_captures_at_once_are_chained_each_by_itself() -> None:
    calls = Calls(4)
    one, one_more, other, other_more = calls.streams.all
    calls.streams.begin(one)
    calls.streams.begin(other)
    one_more.wait_stream(one)
    other_more.wait_stream(other)
    first, second = calls.call(one), calls.call(other)
    calls.call(one_more)
    assert calls.waited_for == {first}
    calls.call(other_more)
    assert calls.waited_for == {second}


def test_what_ended_captures_left_is_dropped() -> None:
    calls = Calls(3)
    last = calls.streams.all[2]
    going_on = calls.streams.begin(last)
    calls.call(last)
    for number in range(20):
        with calls.streams.captured(calls.streams.all[number % 2]):
            calls.call(calls.streams.current)
        assert len(calls.chain._captured) <= 2
        assert going_on in calls.chain._captured


def test_the_stream_of_the_last_eager_call_is_behind_all_calls() -> None:
    """A wait for its end, as a barrier on the host does it, is one for the calls of every stream."""
    calls = Calls(4)
    one, two, three, captured = calls.streams.all
    assert calls.chain.last() is None
    made = {calls.call(stream) for stream in (one, two, three, one)}
    assert calls.chain.last() is one
    with calls.streams.captured(captured):
        calls.call(captured)
    assert calls.chain.last() is one, "what is captured runs with its replays"
    assert one.eager == made
    capture = calls.streams.begin(one)
    assert calls.chain.last() is None, "an event of a stream that is being captured is in no time"
    calls.streams.end(capture)
    assert calls.chain.last() is one


def test_an_eager_call_cannot_wait_for_a_stream_that_is_captured_now() -> None:
    calls = Calls(2)
    first, second = calls.streams.all
    calls.call(first)
    capture = calls.streams.begin(first)
    calls.call(first)
    with pytest.raises(ConfigError, match="capture on a stream without eager calls"):
        calls.call(second)
    assert second.capture == 0
    calls.streams.end(capture)
    calls.call(second)
    assert calls.streams.waits == [(1, 0)]


ACTIONS = st.lists(st.tuples(st.sampled_from(["call", "call", "begin", "end", "join"]), st.integers(0, 4)), max_size=60)


@given(ACTIONS)
def test_each_call_waits_for_the_one_before_it(actions: list[tuple[str, int]]) -> None:
    """Any program that CUDA allows: each call waits for the last one of its capture, or for the last eager one."""
    calls = Calls(5)
    last: dict[int, int] = {}
    for action, number in actions:
        stream = calls.streams.all[number]
        if action == "begin" and not stream.capture:
            calls.streams.begin(stream)
        elif action == "end" and stream.capture:
            calls.streams.end(stream.capture)
        elif action == "join":
            captured = [other for other in calls.streams.all if other.capture]
            if captured and not stream.capture:
                stream.wait_stream(captured[0])
        elif action == "call":
            eager = calls.chain._eager
            blocked = not stream.capture and eager is not None and eager is not stream and eager.capture
            if blocked:
                with pytest.raises(ConfigError):
                    calls.call(stream)
                continue
            before = last.get(stream.capture)
            last[stream.capture] = calls.call(stream)
            assert before is None or before in calls.waited_for


REPLAYS = st.lists(
    st.tuples(st.sampled_from(["call", "call", "graph", "replay", "replay"]), st.integers(0, 3)), max_size=60
)


@given(REPLAYS)
def test_replays_have_a_place_among_the_calls(actions: list[tuple[str, int]]) -> None:
    """Each call and each replay waits for the one before it, from the first capture on, on whatever stream it is."""
    calls = Calls(5, replays=True)
    capturing = calls.streams.all[4]
    graphs: list[int] = []
    last = 0
    for action, number in actions:
        stream = calls.streams.all[number]
        if action == "graph":
            with calls.streams.captured(capturing):
                graphs.append(capturing.capture)
                calls.call(capturing)
                calls.call(capturing)
                assert calls.made - 1 in calls.waited_for, "calls of one capture are chained"
        elif action == "call":
            before, last = last, calls.call(stream)
            assert not before or before in calls.waited_for
        elif graphs:
            before, last = last, calls.replay(graphs[number % len(graphs)], stream)
            assert not before or before in calls.waited_for


def test_replays_are_left_to_others_unless_they_are_asked_for() -> None:
    calls = Calls(2)
    with calls.streams.captured(calls.streams.all[1]):
        calls.call(calls.streams.all[1])
    calls.call(calls.streams.all[0])
    assert not hasattr(calls.streams, "last_call")
