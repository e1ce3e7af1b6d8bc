"""The fast path of an all-reduce: taken for a call that equals an earlier one, and for no other."""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fake_streams import FakeStreams

from shotcast.collectives import fast_path
from shotcast.collectives.choice.resolver import Call
from shotcast.collectives.fast_path import CpuFastPath, GpuFastPath
from shotcast.collectives.stream_order import StreamChain

STREAM = 0x5EED


class Executor:
    """An executor, and its calls: one kernel each on a GPU, unless it is told otherwise."""

    def __init__(self) -> None:
        self.enqueued: list[tuple[int, Sequence[Any]]] = []
        self.stopped = False
        self.several = False
        self.fails = False

    def one_launch(self, aligned: bool) -> Callable[[int, Sequence[Any]], None] | None:
        return None if self.several else lambda stream, given: self.enqueued.append((stream, given))

    def run(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.enqueued.append((STREAM, (x.data_ptr(), out.data_ptr())))
        self.stopped = self.fails

    def fault(self) -> bool:
        return self.stopped


class StoppedError(Exception):
    """A fault as the communicator raises it."""


def raise_fault() -> None:
    raise StoppedError


class Parts:
    """A fast path that knows one call: from x, a vector of 64 numbers, into out."""

    def __init__(self, kind: str) -> None:
        self.executor, self.streams, self.lock = Executor(), FakeStreams(2), threading.Lock()
        self.x, self.out = torch.ones(64), torch.ones(64)
        self.calls: dict[Any, Any] = {}
        device, self.vendor = torch.device("cpu"), types.SimpleNamespace(failed=False)
        parts: Any = self.calls, self.executor, self.vendor
        self.fast_path: GpuFastPath | CpuFastPath
        if kind == "gpu":
            self.fast_path = GpuFastPath(*parts, StreamChain(device, streams=self.streams), self.lock, device)
        else:
            self.fast_path = CpuFastPath(*parts, self.lock, raise_fault)
        self.keep(self.x, self.out)

    def keep(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Make the call by the slow path: the communicator remembers it, and opens the fast path for it."""
        plan: Any = None
        bound: Any = self.executor
        call = self.calls[x.numel(), x.dtype, "auto", "sum"] = Call(plan, False, bound, (), 0, "")
        self.fast_path.keep(call, x, out)

    def make(self, x: torch.Tensor, out: torch.Tensor, algorithm: str = "auto", reduction: str = "sum") -> bool:
        taken = self.fast_path.make(x, out, algorithm, reduction)
        assert taken == bool(self.executor.enqueued)
        assert not self.lock.locked()
        return taken


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Parts:
    monkeypatch.setattr(fast_path, "raw_stream", lambda device: STREAM)
    monkeypatch.setattr(fast_path, "current_device", lambda: None)
    return Parts("gpu")


@pytest.fixture(params=["gpu", "cpu"])
def parts(request: pytest.FixtureRequest) -> Parts:
    if request.param == "cpu":
        return Parts("cpu")
    gpu: Parts = request.getfixturevalue("gpu")
    return gpu


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


def test_a_call_on_another_stream_waits_for_the_one_before(gpu: Parts) -> None:
    assert gpu.make(gpu.x, gpu.out)
    gpu.streams.current = gpu.streams.all[1]
    assert gpu.make(gpu.x, gpu.out)
    assert gpu.streams.waits == [(1, 0)]


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
        (torch.eye(8).to_sparse(), torch.ones(64)),
        (torch.ones(8, 8), torch.eye(8).to_sparse()),
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
        "size", "shape", "dtype of out", "dtype", "sparse", "sparse out", "strides", "strides of out", "device",
        "device of out",
        "class", "class of out", "gradient", "negated", "negated out", "no tensor",
    ],
)  # fmt: skip
def test_a_different_call_takes_the_slow_path(parts: Parts, x: torch.Tensor, out: torch.Tensor) -> None:
    assert not parts.make(x, out)


def test_overlapping_tensors_take_the_slow_path_which_refuses_them(parts: Parts) -> None:
    whole = torch.ones(256)
    for first, other in ((0, 1), (0, 4), (4, 0), (0, 63), (64, 4)):
        parts.keep(whole[first : first + 64], whole[other : other + 64])
        assert not parts.make(whole[first : first + 64], whole[other : other + 64]), (first, other)
    for first, other in ((0, 0), (0, 64), (64, 0), (0, 192)):
        assert parts.make(whole[first : first + 64], whole[other : other + 64]), (first, other)
        parts.executor.enqueued.clear()


def test_an_alignment_that_was_not_seen_takes_the_slow_path_on_gpus(gpu: Parts) -> None:
    assert not gpu.make(torch.ones(65)[1:], torch.ones(64))
    assert Parts("cpu").make(torch.ones(65)[1:], torch.ones(64))


def test_a_tensor_that_changes_is_looked_at_again(parts: Parts) -> None:
    """A call remembers of a tensor that it is not negated lazily, which no method of it changes."""
    square = torch.ones(16, 4)
    parts.keep(square, square)
    assert parts.make(square, square)
    parts.executor.enqueued.clear()
    square.t_()
    assert not parts.make(square, square)
    x, out = torch.ones(64), torch.ones(64)
    assert parts.make(x, out)
    parts.executor.enqueued.clear()
    x.data = x.data.to(torch.float16)
    assert not parts.make(x, out)
    out.resize_(32)
    assert not parts.make(torch.ones(64), out)


def test_no_tensor_is_kept_alive(parts: Parts) -> None:
    x = torch.ones(64)
    seen = weakref.ref(x)
    assert parts.make(x, x)
    del x
    assert seen() is None


def test_slow_path_while_another_gpu_is_current(gpu: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "current_device", lambda: 1)
    assert not gpu.make(gpu.x, gpu.out)


def test_slow_path_in_a_capture(gpu: Parts) -> None:
    with gpu.streams.captured(gpu.streams.all[1]):
        assert not gpu.make(gpu.x, gpu.out)


def test_a_call_that_fails_raises() -> None:
    parts = Parts("cpu")
    parts.executor.fails = True
    with pytest.raises(StoppedError):
        parts.fast_path.make(parts.x, parts.out, "auto", "sum")
    assert not parts.lock.locked()


def test_slow_path_after_a_fault_and_after_close(parts: Parts) -> None:
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


def test_calls_of_several_kernels_and_captures_are_not_kept(gpu: Parts) -> None:
    x = torch.ones(128)
    gpu.executor.several = True
    gpu.keep(x, x)
    gpu.executor.several = False
    with gpu.streams.captured(gpu.streams.all[1]):
        gpu.keep(x, x)
    assert not gpu.make(x, x)


def test_empty_calls_are_not_kept(parts: Parts) -> None:
    empty = torch.ones(0)
    parts.keep(empty, empty)
    assert not parts.make(empty, empty)


def test_complex_calls_are_not_kept(parts: Parts) -> None:
    """Neither is a tensor taken that is conjugated lazily: its memory holds other values than it shows."""
    x = torch.ones(64, dtype=torch.complex64)
    parts.keep(x, x)
    assert not parts.make(x, x)
    assert not parts.make(x.conj(), torch.empty_like(x))


def test_a_forgotten_call_takes_the_slow_path(parts: Parts) -> None:
    parts.calls.clear()
    assert not parts.make(parts.x, parts.out)


def test_a_call_of_the_vendor_library_takes_the_slow_path(parts: Parts) -> None:
    for call in parts.calls.values():
        call.by_library, call.bound, call.enqueue_aligned = True, None, None
        parts.fast_path.keep(call, parts.x, parts.out)
    assert not parts.make(parts.x, parts.out)
