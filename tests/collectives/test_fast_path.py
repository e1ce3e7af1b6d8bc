"""The fast path of an all-reduce: taken for a call that equals an earlier one, and for no other."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fake_streams import FakeStreams

from shotcast.collectives import fast_path
from shotcast.collectives.choice.resolver import Call
from shotcast.collectives.fast_path import FastPath
from shotcast.collectives.stream_order import StreamChain

STREAM = 0x5EED


class Executor:
    """An executor whose calls are one kernel each, unless it is told otherwise."""

    def __init__(self) -> None:
        self.enqueued: list[tuple[int, Sequence[Any]]] = []
        self.stopped = False
        self.several = False

    def one_launch(self, aligned: bool) -> Callable[[int, Sequence[Any]], None] | None:
        return None if self.several else lambda stream, given: self.enqueued.append((stream, given))

    def fault(self) -> bool:
        return self.stopped


class Parts:
    """A fast path that knows one call: from x, a vector of 64 numbers, into out."""

    def __init__(self) -> None:
        self.executor, self.streams, self.lock = Executor(), FakeStreams(2), threading.Lock()
        self.x, self.out = torch.ones(64), torch.ones(64)
        self.calls: dict[Any, Any] = {}
        device, self.vendor = torch.device("cpu"), types.SimpleNamespace(failed=False)
        parts: Any = self.calls, self.executor, self.vendor, StreamChain(device, self.streams), self.lock, device
        self.fast_path = FastPath(*parts)
        self.keep(self.x, self.out)

    def keep(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Make the call by the slow path: the communicator remembers it, and opens the fast path for it."""
        plan: Any = None
        bound: Any = self.executor
        call = self.calls[x.numel(), x.dtype, "auto", "sum"] = Call(plan, "sum", False, bound, (), 0, "")
        self.fast_path.keep(call, x, out)

    def make(self, x: torch.Tensor, out: torch.Tensor, algorithm: str = "auto", reduction: str = "sum") -> bool:
        taken = self.fast_path.make(x, out, algorithm, reduction)
        assert taken == bool(self.executor.enqueued)
        assert not self.lock.locked()
        return taken


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    monkeypatch.setattr(fast_path, "raw_stream", lambda device: STREAM)
    monkeypatch.setattr(fast_path, "current_device", lambda: None)
    return Parts()


def test_a_repeated_call_takes_the_fast_path(parts: Parts) -> None:
    x, out = torch.zeros(64), torch.zeros(64)
    assert parts.make(x, out)
    assert parts.executor.enqueued == [(STREAM, (x.data_ptr(), out.data_ptr()))]


def test_in_place_calls_of_another_shape_take_the_fast_path(parts: Parts) -> None:
    x = torch.zeros(8, 8)
    assert parts.make(x, x)


def test_calls_raise_the_version_of_out_alone(parts: Parts) -> None:
    assert parts.make(parts.x, parts.out)
    assert (parts.x._version, parts.out._version) == (0, 1)


def test_slow_path_where_autograd_records_the_call(parts: Parts) -> None:
    leaf = torch.ones(64, requires_grad=True)
    for x, out in ((leaf, parts.out), (parts.x, leaf), (leaf, leaf)):
        assert not parts.make(x, out)
        with torch.no_grad():
            assert parts.make(x, out)
        parts.executor.enqueued.clear()


def test_a_call_on_another_stream_waits_for_the_one_before(parts: Parts) -> None:
    assert parts.make(parts.x, parts.out)
    parts.streams.current = parts.streams.all[1]
    assert parts.make(parts.x, parts.out)
    assert parts.streams.waits == [(1, 0)]


def test_other_algorithms_and_reductions_are_other_calls(parts: Parts) -> None:
    assert not parts.make(parts.x, parts.out, algorithm="one_shot")
    assert not parts.make(parts.x, parts.out, reduction="max")


@pytest.mark.parametrize(
    ("x", "out"),
    [
        (torch.ones(63), torch.ones(63)),
        (torch.ones(64), torch.ones(8, 8)),
        (torch.ones(64), torch.ones(64, dtype=torch.int32)),
        (torch.ones(64, dtype=torch.float16), torch.ones(64, dtype=torch.float16)),
        (torch.ones(65)[1:], torch.ones(64)),
        (torch.ones(128)[::2], torch.ones(64)),
        (torch.ones(64), torch.ones(128)[::2]),
        (torch.ones(64, device="meta"), torch.ones(64)),
        (torch.ones(64), torch.ones(64, device="meta")),
        (torch.nn.Parameter(torch.ones(64)), torch.ones(64)),
        (torch.ones(64), torch.nn.Parameter(torch.ones(64), requires_grad=False)),
        (torch.ones(64), torch.ones(64, requires_grad=True)),
        (torch._neg_view(torch.ones(64)), torch.ones(64)),
        (torch.ones(64), torch._neg_view(torch.ones(64))),
        ("x", torch.ones(64)),
    ],
    ids=[
        "size", "shape", "dtype of out", "dtype", "alignment", "strides", "strides of out", "device", "device of out",
        "class", "class of out", "gradient", "negated", "negated out", "no tensor",
    ],
)  # fmt: skip
def test_a_different_call_takes_the_slow_path(parts: Parts, x: torch.Tensor, out: torch.Tensor) -> None:
    assert not parts.make(x, out)


def test_slow_path_while_another_gpu_is_current(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "current_device", lambda: 1)
    assert not parts.make(parts.x, parts.out)


def test_slow_path_in_a_capture_after_a_fault_and_after_close(parts: Parts) -> None:
    with parts.streams.captured(parts.streams.all[1]):
        assert not parts.make(parts.x, parts.out)
    parts.executor.stopped = True
    assert not parts.make(parts.x, parts.out)
    parts.executor.stopped = False
    parts.vendor.failed = True
    assert not parts.make(parts.x, parts.out)
    parts.vendor.failed = False
    parts.fast_path.close()
    assert not parts.make(parts.x, parts.out)


def test_slow_path_during_a_call_of_another_thread(parts: Parts) -> None:
    with parts.lock:
        assert not parts.fast_path.make(parts.x, parts.out, "auto", "sum")
    assert parts.make(parts.x, parts.out)


def test_calls_of_several_kernels_captures_and_empty_calls_are_not_kept(parts: Parts) -> None:
    x = torch.ones(128)
    parts.executor.several = True
    parts.keep(x, x)
    parts.executor.several = False
    with parts.streams.captured(parts.streams.all[1]):
        parts.keep(x, x)
    assert not parts.make(x, x)
    empty = torch.ones(0)
    parts.keep(empty, empty)
    assert not parts.make(empty, empty)


def test_a_forgotten_call_takes_the_slow_path(parts: Parts) -> None:
    parts.calls.clear()
    assert not parts.make(parts.x, parts.out)


def test_a_call_of_the_vendor_library_takes_the_slow_path(parts: Parts) -> None:
    for call in parts.calls.values():
        call.bound = call.enqueue_aligned = None
        parts.fast_path.keep(call, parts.x, parts.out)
    assert not parts.make(parts.x, parts.out)
