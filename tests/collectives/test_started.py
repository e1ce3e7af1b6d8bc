"""Calls that are started, and several at once: what they keep and give, and their order on threads and streams."""

from __future__ import annotations

import contextlib
import inspect
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import started_targets as targets
import torch

import shared_ranks
from shotcast.collectives import started
from shotcast.collectives.calls.started import STARTABLE
from shotcast.collectives.communicator import Communicator

NOT_STARTABLE = {
    "candidates",
    "check",
    "close",
    "empty",
    "explain",
    "recv",
    "reset",
    "send",
    "set_timeout",
    "split",
    "start",
    "waiting_messages",
}
"""Methods that communicate no tensors, or that need the other rank at once."""


def test_every_call_that_communicates_can_be_started() -> None:
    methods = {name for name, _ in inspect.getmembers(Communicator, inspect.isfunction) if not name.startswith("_")}
    assert methods - NOT_STARTABLE == set(STARTABLE)


def test_messages_are_started_in_batches() -> None:
    shared_ranks.run(targets.messages, 2, timeout_s=300)


def test_lists_may_be_changed_after_a_start() -> None:
    shared_ranks.run(targets.changed_lists, 2, timeout_s=300)


def test_handles_say_which_call_they_are_of() -> None:
    shared_ranks.run(targets.shown, 2, timeout_s=300)


def test_layer_norms() -> None:
    shared_ranks.run(targets.layer_norms, 2, timeout_s=300)


def test_thread_ends_with_a_communicator_that_was_not_closed() -> None:
    assert shared_ranks.run(targets.never_closed, 2, timeout_s=300) == [False, False]


def test_errors_of_dropped_handles_are_logged() -> None:
    for logged in shared_ranks.run(targets.dropped_errors, 2, timeout_s=300):
        assert len(logged) == 2, logged
        assert all("was dropped without wait()" in text and "divided among 2 ranks" in text for text in logged)


def test_results_of_coalesced_calls_are_apart_for_autograd() -> None:
    shared_ranks.run(targets.apart, 2, timeout_s=300)


def test_coalesced_calls_lose_no_precision_unless_they_name_it() -> None:
    assert shared_ranks.run(targets.lossless, 2, timeout_s=300) == [["lossless", "ring"]] * 2


def test_batch_after_the_library_failed() -> None:
    shared_ranks.run(targets.batch_after_the_library_failed, 2, timeout_s=300)


class TestThreads:
    def test_several_threads_wait_for_the_same_call(self) -> None:
        """Each returns when the call is over, and the end is told once."""
        changes: list[str] = []
        starter = started.ThreadStarter(lambda: changes.append("begun"), lambda: changes.append("ended"))
        go, early = threading.Event(), []

        def settle() -> None:
            starter.settle()
            early.append(not go.is_set())

        try:
            handle = starter.start(go.wait, ())
            threads = [threading.Thread(target=settle) for _ in range(4)]
            for thread in threads:
                thread.start()
            time.sleep(0.1)
            go.set()
            for thread in threads:
                thread.join(100)
            assert handle.wait()
            assert early == [False] * 4
            assert changes == ["begun", "ended"]
        finally:
            go.set()
            starter.close()


class _Stream:
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self) -> _Event:
        return _Event()


class _Event:
    """An event of a capture, which must not be asked."""

    def query(self) -> bool:
        raise RuntimeError("operation not permitted on an event last recorded in a capturing stream")


class _Recorded(torch.Tensor):
    streams: list[Any]

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)


@pytest.fixture
def starter(monkeypatch: pytest.MonkeyPatch) -> started.StreamStarter:
    """Return a starter on streams that are not there. Its calls come from GPU 0."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: _Stream())
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: _current.append(stream))
    _current[:] = [_Stream()]
    monkeypatch.setattr(started, "current_stream", lambda _: _current[-1])
    monkeypatch.setattr(started, "current_device", lambda: 0)
    monkeypatch.setattr(started, "capturing", lambda: False)
    return started.StreamStarter(torch.device("cuda", 0))


_current: list[_Stream] = []
"""The streams that have been current, the latest last."""


class TestStreams:
    def test_a_call_that_fails_keeps_its_tensors_for_its_stream(self, starter: started.StreamStarter) -> None:
        x = torch.ones(2).as_subclass(_Recorded)
        x.streams = []

        def fail() -> None:
            raise ValueError("half enqueued")

        with pytest.raises(ValueError, match="half enqueued"):
            starter.start(fail, ((x,), {}))
        assert x.streams == [starter.stream]
        first, *_, last = _current
        assert last is first

    def test_calls_run_on_the_stream_and_return_to_the_caller_s(self, starter: started.StreamStarter) -> None:
        first = _current[-1]
        assert starter.start(lambda: _current[-1], ()).result is starter.stream
        assert _current[-1] is first

    def test_calls_from_another_gpu_run_on_the_stream_s(
        self, starter: started.StreamStarter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        at = [1]

        @contextlib.contextmanager
        def device(of: torch.device) -> Iterator[None]:
            at.append(of.index)
            yield
            at.pop()

        monkeypatch.setattr(torch.cuda, "device", device)
        monkeypatch.setattr(started, "current_device", lambda: at[-1])
        assert starter.start(lambda: at[-1], ()).result == 0
        assert at == [1]

    def test_a_captured_call_is_not_asked_after_its_wait(
        self, starter: started.StreamStarter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(started, "capturing", lambda: True)
        handle = starter.start(lambda: None, ())
        assert not handle.is_completed()
        handle.wait()
        monkeypatch.setattr(started, "capturing", lambda: False)  # the capture has ended
        assert not handle.is_completed()
