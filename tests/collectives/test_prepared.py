"""Prepared calls: taken for a call that equals an earlier one, and for no other; and what repeated calls cost."""

from __future__ import annotations

import threading
import types
import weakref
from typing import Any

import prepared_targets as targets
import pytest
import torch
import torch.distributed as dist
from fake_streams import FakeStreams

import shared_ranks
import shotcast
from frames import Frames
from quick_interpreter import GPU_COLLECTIVES, interpret
from shotcast.collectives import prepared
from shotcast.collectives.choice.resolver import ResolvedCall
from shotcast.collectives.norm_operands import Fp8Normed
from shotcast.collectives.prepared import PreparedCalls
from shotcast.collectives.stream_order import StreamChain
from shotcast.memory.operands import NormTensors
from shotcast.process_group import calls

KEY = ("all_reduce", "auto", "sum")
FUSED = ("all_reduce_rms_norm", 1e-6)
MOST_FRAMES = 8


class Executor:
    """An executor, and its calls."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, Any, Any]] = []
        self.stopped_word = types.SimpleNamespace(value=0)
        self.fails = False

    def run(self, x: torch.Tensor | None, out: torch.Tensor | None, norm: NormTensors | None, sizes: Any) -> None:
        self.made.append((x, out, norm))
        self.stopped_word.value = int(self.fails)


class StoppedError(Exception):
    """A fault as the communicator raises it."""


def raise_fault() -> None:
    raise StoppedError


class Parts:
    """The calls of a communicator that knows one: from x, a vector of 64 numbers, into out."""

    def __init__(self, kind: str) -> None:
        self.executor, self.lock = Executor(), threading.Lock()
        self.streams = FakeStreams(2)
        self.x, self.out = torch.ones(64), torch.ones(64)
        self.vendor: Any = types.SimpleNamespace(failed=False)
        executor: Any = self.executor
        chain = StreamChain(torch.device("cuda", 0), streams=self.streams) if kind == "gpu" else None
        self.calls = PreparedCalls(executor, self.vendor, chain, self.lock, lambda: raise_fault, kind == "gpu")
        self.keep(self.x, self.out)

    def call(self, **changes: Any) -> ResolvedCall:
        plan: Any = None
        bound: Any = self.executor
        return ResolvedCall(plan, changes.pop("by_library", False), bound, (), 0, "", **changes)

    def keep(self, x: torch.Tensor, out: torch.Tensor | None, given: tuple[Any, ...] | None = None) -> None:
        """Prepare a call that was made on ``x`` and ``out``."""
        self.calls.keep((KEY, given or (x, out)), self.call(), x, out, None, (), 0)

    def make(self, *operands: Any, key: tuple[Any, ...] = KEY) -> Any:
        """Make a call; return None if none was prepared."""
        found = self.calls.find(key, operands)
        done = None if found is None else found.run(operands)
        assert (done is not None) == bool(self.executor.made)
        assert not self.lock.locked()
        self.executor.made.clear()
        return done


@pytest.fixture
def gpu() -> Parts:
    return Parts("gpu")


@pytest.fixture(params=["gpu", "cpu"])
def parts(request: pytest.FixtureRequest) -> Parts:
    return Parts(request.param)


def test_a_repeated_call_is_made(parts: Parts) -> None:
    x, out = torch.zeros(64), torch.zeros(64)
    found = parts.calls.find(KEY, (x, out))
    assert found is not None
    assert found.run((x, out)) is out
    assert [(a is x, b is out) for a, b, _ in parts.executor.made] == [(True, True)]


def test_the_latest_call_is_found_without_its_shape(parts: Parts) -> None:
    """Making and hashing the shape takes longer than the comparison of all tensors."""
    assert parts.make(parts.x, parts.out) is parts.out
    parts.calls._calls.clear()
    assert parts.make(parts.x, parts.out) is parts.out
    assert parts.make(parts.x, parts.x) is None
    assert parts.make(parts.x, None) is None
    parts.calls.clear()
    assert parts.make(parts.x, parts.out) is None


def test_calls_of_several_shapes_take_turns(parts: Parts) -> None:
    pairs = [(torch.ones(size), torch.ones(size)) for size in (64, 8, 64, 16, 8, 16)]
    for x, out in pairs[1:4:2]:
        parts.keep(x, out)
    for x, out in pairs * 2:
        assert parts.make(x, out) is out


def test_a_bounded_number_of_latest_calls_is_known(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "_MOST_PATTERNS", 2)
    for number in range(5):
        key = ("all_reduce", "auto", f"sum {number}")
        parts.calls.keep((key, (parts.x, parts.out)), parts.call(), parts.x, parts.out, None, (), 0)
        assert parts.make(parts.x, parts.out, key=key) is parts.out
        assert len(parts.calls._latest) <= 2


def test_outputs_are_made_where_none_are_given(parts: Parts) -> None:
    out = torch.empty(16, dtype=torch.int32)
    parts.keep(parts.x, out, (parts.x, None))
    made = parts.make(torch.zeros(64), None)
    assert (made.shape, made.dtype) == (out.shape, out.dtype)


def test_calls_raise_the_version_of_out_alone(parts: Parts) -> None:
    assert parts.make(parts.x, parts.out) is parts.out
    assert (parts.x._version, parts.out._version) == (0, 1)
    parts.calls.counts_versions = False
    assert parts.make(parts.x, parts.out) is parts.out
    assert parts.out._version == 1


def test_autograd_makes_its_own_calls(parts: Parts) -> None:
    leaf = torch.ones(64, requires_grad=True)
    for x, out in ((leaf, parts.out), (parts.x, leaf), (leaf, leaf)):
        with torch.no_grad():
            parts.keep(x, out)
            assert parts.make(x, out) is out
        assert parts.make(x, out) is None


def test_a_call_on_another_stream_waits_for_the_one_before(gpu: Parts) -> None:
    assert gpu.make(gpu.x, gpu.out) is not None
    gpu.streams.current = gpu.streams.all[1]
    assert gpu.make(gpu.x, gpu.out) is not None
    assert gpu.streams.waits == [(1, 0)]


def test_the_order_of_streams_takes_one_function_before_a_launch(gpu: Parts) -> None:
    assert gpu.make(gpu.x, gpu.out) is not None
    with Frames() as counted:
        functions = counted.all_of(lambda: gpu.make(gpu.x, gpu.out))
    enter, leave = "StreamChain.enter", "StreamChain.leave"
    assert functions == ["PreparedCalls.find", "PreparedCall.matches", "PreparedCall.run", enter, leave]


def test_other_arguments_are_other_calls(parts: Parts) -> None:
    assert parts.make(parts.x, parts.out, key=("all_reduce", "one_shot", "sum")) is None


@pytest.mark.parametrize(
    ("x", "out"),
    [
        (torch.ones(63), torch.ones(63)),
        (torch.ones(8, 8), torch.ones(8, 8)),
        (torch.ones(64), torch.ones(8, 8)),
        (torch.ones(64), torch.ones(64, dtype=torch.int32)),
        (torch.ones(64, dtype=torch.float16), torch.ones(64, dtype=torch.float16)),
        (torch.eye(8).to_sparse(), torch.ones(64)),
        (torch.ones(64), torch.eye(8).to_sparse()),
        (torch.ones(128)[::2], torch.ones(64)),
        (torch.ones(64), torch.ones(128)[::2]),
        (torch.ones(64, device="meta"), torch.ones(64)),
        (torch.ones(64), torch.ones(64, device="meta")),
        (torch.nn.Parameter(torch.ones(64)), torch.ones(64)),
        (torch.ones(64), torch.nn.Parameter(torch.ones(64), requires_grad=False)),
        (torch.ones(64), torch.ones(64, requires_grad=True)),
        (torch._neg_view(torch.ones(64)), torch.ones(64)),
        (torch.ones(64), torch._neg_view(torch.ones(64))),
        (torch.ones(64), None),
        (torch.ones(64), "out"),
        ("x", torch.ones(64)),
        (None, torch.ones(64)),
    ],
    ids=[
        "size", "shape", "shape of out", "dtype of out", "dtype", "sparse", "sparse out", "strides", "strides of out",
        "device", "device of out", "class", "class of out", "gradient", "negated", "negated out", "no out",
        "out is no tensor", "x is no tensor", "no x",
    ],
)  # fmt: skip
def test_a_different_call_is_not_made(parts: Parts, x: Any, out: Any) -> None:
    assert parts.make(x, out) is None


def test_one_object_in_two_places_is_another_call(parts: Parts) -> None:
    assert parts.make(parts.x, parts.x) is None
    parts.keep(parts.x, parts.x)
    assert parts.make(parts.out, parts.out) is parts.out


def test_conjugated_tensors_are_other_ones(parts: Parts) -> None:
    x, out = torch.ones(64, dtype=torch.complex64), torch.ones(64, dtype=torch.complex64)
    parts.keep(x, out)
    assert parts.make(x, out) is out
    assert parts.make(x.conj(), out) is None


def test_overlapping_tensors_are_left_to_the_checks(parts: Parts) -> None:
    whole = torch.ones(256)
    for first, other in ((0, 1), (0, 4), (4, 0), (0, 63), (64, 4), (0, 0)):
        assert parts.make(whole[first : first + 64], whole[other : other + 64]) is None, (first, other)
    for first, other in ((0, 64), (64, 0), (0, 192), (1, 65)):
        assert parts.make(whole[first : first + 64], whole[other : other + 64]) is not None, (first, other)
    parts.keep(whole[:64], whole[:64])  # two objects, as in a part of a tensor that is summed in place
    assert parts.make(whole[8:72], whole[8:72]) is not None
    assert parts.make(whole[8:72], whole[9:73]) is None


def test_a_tensor_that_changes_is_looked_at_again(parts: Parts) -> None:
    square = torch.ones(16, 4)
    parts.keep(square, square)
    assert parts.make(square, square) is square
    assert parts.make(square.t_(), square) is None
    x, out = torch.ones(64), torch.ones(64)
    assert parts.make(x, out) is out
    x.data = torch._neg_view(torch.ones(64))
    assert parts.make(x, out) is None
    out.resize_(32)
    assert parts.make(torch.ones(64), out) is None


def test_no_tensor_is_kept_alive(parts: Parts) -> None:
    x = torch.ones(64)
    parts.keep(x, x)
    seen = weakref.ref(x)
    assert parts.make(x, x) is x
    del x
    assert seen() is None


def test_modes_of_pytorch_see_what_they_would(parts: Parts) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode():
        assert parts.make(parts.x, parts.out) is None
    with FakeTensorMode():
        assert parts.make(torch.ones(64), torch.ones(64)) is None

    def mapped(x: torch.Tensor) -> torch.Tensor:
        assert parts.make(x, parts.out) is None
        return x

    torch.vmap(mapped)(torch.ones(2, 64))


def test_a_trace_finds_no_call(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shotcast.collectives.prepared.is_dynamo_compiling", lambda: True)
    assert parts.make(parts.x, parts.out) is None


def test_an_export_finds_no_call_without_tensors(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of an export are no plain ones."""
    parts.calls.keep((("barrier",), (None, None)), parts.call(), None, None, None, (), 0)
    assert parts.make(None, None, key=("barrier",)) is True
    monkeypatch.setattr("shotcast.collectives.prepared.is_traced", lambda: True)
    assert parts.make(None, None, key=("barrier",)) is None


def test_a_call_in_a_capture_is_not_made(gpu: Parts) -> None:
    with gpu.streams.captured(gpu.streams.all[1]):
        assert gpu.make(gpu.x, gpu.out) is None


def test_a_call_that_fails_raises() -> None:
    parts = Parts("cpu")
    parts.executor.fails = True
    found = parts.calls.find(KEY, (parts.x, parts.out))
    assert found is not None
    with pytest.raises(StoppedError):
        found.run((parts.x, parts.out))
    assert not parts.lock.locked()


def test_a_communicator_that_is_not_as_it_was_makes_none(parts: Parts) -> None:
    parts.executor.stopped_word.value = 1
    assert parts.make(parts.x, parts.out) is None
    parts.executor.stopped_word.value = 0
    parts.vendor.failed = True
    assert parts.make(parts.x, parts.out) is None
    parts.vendor.failed = False
    parts.calls.pause()
    assert parts.make(parts.x, parts.out) is None
    parts.calls.resume()
    found = parts.calls.find(KEY, (parts.x, parts.out))
    assert found is not None
    with parts.lock:
        assert found.run((parts.x, parts.out)) is None
    assert parts.make(parts.x, parts.out) is parts.out
    parts.calls.close()
    assert parts.make(parts.x, parts.out) is None
    parts.calls.resume()
    assert found.run((parts.x, parts.out)) is None
    assert not parts.executor.made


def test_calls_on_copies_and_those_of_the_library_are_not_prepared(parts: Parts) -> None:
    x, out = torch.ones(32), torch.ones(32)
    for call, given, written in (
        (parts.call(), (x, out), torch.ones(32)),
        (parts.call(), (x.clone(), out), out),
        (parts.call(by_library=True), (x, out), out),
        (parts.call(is_makeshift=True), (x, out), out),
    ):
        parts.calls.keep((KEY, given), call, x, written, None, (), 0)
        assert parts.make(x, out) is None
        assert parts.make(*given) is None
    parts.keep(x, out)
    assert parts.make(x, out) is out


def test_forgotten_calls_are_not_made(parts: Parts) -> None:
    parts.calls.clear()
    assert parts.make(parts.x, parts.out) is None


def test_a_sum_is_divided(parts: Parts) -> None:
    x, out = torch.full((8,), 7), torch.full((8,), -7)
    parts.calls.keep((KEY, (x, out)), parts.call(), x, out, None, (), 2)
    assert parts.make(x, out).tolist() == [-3] * 8


def test_calls_without_tensors(parts: Parts) -> None:
    parts.calls.keep((("barrier",), (None, None)), parts.call(), None, None, None, (), 0)
    assert parts.make(None, None, key=("barrier",)) is True
    assert parts.make(None, None) is None


# -- fused calls ------------------------------------------------------------------------------------------------------


def fused(parts: Parts, fp8: bool = False) -> list[Any]:
    """Prepare a fused call, and return its operands."""
    x, residual, weight = torch.ones(4, 16), torch.ones(4, 16), torch.ones(16)
    normed, new_residual = torch.empty(4, 16), torch.empty(4, 16)
    quantized = torch.empty(4, 16, dtype=torch.float8_e4m3fn) if fp8 else None
    rows = torch.empty(4, 1) if fp8 else None
    norm = NormTensors(residual, weight, 1e-6, new_residual, normed, quantized, rows)
    operands = [x, residual, weight, None, None, normed, new_residual, quantized, rows]
    parts.calls.keep((FUSED, tuple(operands)), parts.call(), x, None, norm, (), 0)
    return operands


def test_a_fused_call_gets_its_tensors(parts: Parts) -> None:
    x, residual, weight, _, _, normed, new_residual, quantized, rows = operands = fused(parts, fp8=True)
    found = parts.calls.find(FUSED, tuple(operands))
    assert found is not None
    result = found.run(tuple(operands))
    assert type(result) is Fp8Normed
    assert all(map(lambda a, b: a is b, result, (quantized, rows, new_residual, normed)))
    ((got, out, norm),) = parts.executor.made
    assert got is x
    assert out is None
    wanted = NormTensors(residual, weight, 1e-6, new_residual, normed, quantized, rows)
    assert all(a is b or a == b for a, b in zip(norm, wanted, strict=True))
    assert [one._version for one in (x, residual, weight)] == [0, 0, 0]
    assert [one._version for one in (normed, new_residual, quantized, rows)] == [1, 1, 1, 1]


@pytest.mark.parametrize("place", [0, 1, 2, 5, 6])
def test_every_operand_of_a_fused_call_is_compared(parts: Parts, place: int) -> None:
    operands = fused(parts)
    assert parts.make(*operands, key=FUSED) is not None
    for other in (
        operands[place].double(),
        operands[place][..., :8].contiguous(),
        torch._neg_view(operands[place]),
        operands[place].clone().requires_grad_(),
        operands[place].to("meta"),
        None,
    ):
        changed = [*operands]
        changed[place] = other
        assert parts.make(*changed, key=FUSED) is None


def test_overlapping_operands_of_a_fused_call(parts: Parts) -> None:
    """Outputs are apart from all other operands; inputs may lie anywhere."""
    operands = fused(parts)
    room = torch.ones(4096)
    for written in (5, 6):
        for other in {0, 1, 2, 5, 6} - {written}:
            for shift in (0, 8, -8):
                changed = [*operands]
                changed[other] = room[64 : 64 + operands[other].numel()].view(operands[other].shape)
                first = 64 + shift
                changed[written] = room[first : first + 64].view(4, 16)
                assert parts.make(*changed, key=FUSED) is None, (written, other, shift)
    operands[1] = operands[0].view(4, 16)
    assert parts.make(*operands, key=FUSED) is not None


def test_kernels_get_operands_at_multiples_of_16_bytes() -> None:
    for kind in ("gpu", "cpu"):
        parts = Parts(kind)
        for place in (0, 1, 2, 5, 6):
            operands = fused(parts)
            like = operands[place]
            operands[place] = torch.ones(like.numel() + 1)[1:].view(like.shape)
            assert (parts.make(*operands, key=FUSED) is None) == (kind == "gpu")


# -- communicators ----------------------------------------------------------------------------------------------------


def test_the_backend_has_the_keys_that_methods_ask_with() -> None:
    asked: list[Any] = []
    x = torch.ones(4)
    with shotcast.Communicator(device="cpu") as comm:
        find = comm._prepared.find
        comm._prepared.find = lambda *given: asked.append(given[0]) or find(*given)  # type: ignore[method-assign,func-returns-value]
        comm.all_gather(x, torch.empty(4))
        comm.all_to_all(x, torch.empty(4))
        comm.all_reduce(x, x, reduction="max")
        comm.reduce_scatter(x, torch.empty(4))
        comm.broadcast(x, 0)
        comm.barrier()
    of_maximum, of_sum = ("all_reduce", dist.ReduceOp.MAX.value), ("reduce_scatter", dist.ReduceOp.SUM.value)
    assert asked == [
        *(calls.MOVED[op] for op in ("all_gather", "all_to_all")),
        *(calls.REDUCED[op] for op in (of_maximum, of_sum)),
        *(calls.BROADCAST(0), calls.BARRIER),
    ]


@pytest.mark.parametrize("kernels", ["compiled", pytest.param("interpreted", marks=pytest.mark.full)])
def test_repeated_calls_take_few_frames(kernels: str) -> None:
    """Interpreted kernels are launched as on a GPU, with no order of streams."""
    if kernels == "compiled":
        ranks = shared_ranks.run(targets.frames, 2, timeout_s=200)
    else:
        ranks = interpret(targets.frames, 2, env=GPU_COLLECTIVES)
    for frames in ranks:
        assert len(frames) == 2 * len(targets.CALLS)
        for name, functions in frames.items():
            assert "PreparedCall.run" in functions, (name, functions)
            assert len(functions) <= MOST_FRAMES, (name, functions)


@pytest.mark.parametrize("world_size", [2, 3])
def test_repeated_calls_give_the_same_bits(world_size: int) -> None:
    shared_ranks.run(targets.same_bits, world_size, timeout_s=200)


def test_repeated_calls_find_what_is_wrong() -> None:
    shared_ranks.run(targets.after_trouble, 2, timeout_s=300)
