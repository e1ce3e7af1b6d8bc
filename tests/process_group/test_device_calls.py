"""Calls of GPUs, without one: which inner group carries a message, and what the works of streams do."""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import threading
from collections import Counter
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import group_targets as targets
import pytest
import torch
import torch.distributed as dist
from fake_nccl import FakeNccl, on_gpu

import shotcast
from shotcast.collectives.started import Handle, Outcome
from shotcast.errors import CollectiveTimeout, ConfigError, UnsupportedError
from shotcast.process_group import calls, registration, torch_private, works
from shotcast.process_group.device_calls import ThreadWork
from shotcast.process_group.group import ShotcastProcessGroup
from shotcast.process_group.messages import OfThread
from shotcast.process_group.works import DoneWork, InnerWork, SeveralWorks, StreamWork


def group(inners: dict[str, Any]) -> ShotcastProcessGroup:
    """Return rank 1 of four ranks with these inner groups, and no others."""
    made = ShotcastProcessGroup.__new__(ShotcastProcessGroup)
    torch._C._distributed_c10d.ProcessGroup.__init__(made, 1, 4)
    made._rank, made._world_size, made._name = 1, 4, "of a test"
    made._inners, made._thread = inners, OfThread()
    made._counts, made._on_cpu = Counter(), SimpleNamespace(again=lambda *call: None)  # type: ignore[assignment]
    made._meaning = lambda op, error, limit_s: error  # type: ignore[method-assign]
    return made


def of_gpus(fails_at: int = -1) -> tuple[ShotcastProcessGroup, FakeNccl]:
    nccl = FakeNccl(fails_at)
    made = group({"cpu": object(), "cuda": nccl})
    made._nccl = nccl.part  # type: ignore[method-assign]
    return made, nccl


def test_a_message_is_one_of_nccl() -> None:
    found, nccl = of_gpus()
    for op, peer in (("send", 2), ("recv", 0), ("send", 0)):
        found._message(op, on_gpu(), peer, 7)
    assert nccl.calls == [("send", 2, 7), ("recv", 0, 7), ("send", 0, 7)]
    assert found.counts() == {"send": {"inner": 2}, "recv": {"inner": 1}}


def test_messages_of_a_block_begin_together_at_its_end() -> None:
    found, nccl = of_gpus()
    found._start_coalescing(torch.device("cuda"))
    works = [found._message("send", on_gpu(), 2, 0), found._message("recv", on_gpu(), 0, 0)]
    assert nccl.calls == []
    assert not works[0].is_completed()
    with pytest.raises(ConfigError, match="wait after it"):
        works[0].wait()
    other = threading.Thread(target=lambda: found._message("send", on_gpu(), 3, 0).wait())
    other.start()
    other.join()
    assert nccl.calls == [("send", 3, 0)]  # the block is that of its thread
    together = found._end_coalescing(torch.device("cuda"))
    with_rank_0 = [("nccl 0-1", 1, 2), "start", ("recv", 0, 0), "end"]
    with_rank_2 = [("nccl 1-2", 0, 2), "start", ("send", 1, 0), "end"]
    assert nccl.calls[1:] == with_rank_0 + with_rank_2
    assert together.wait()
    assert all(work.wait() and work.is_completed() for work in works)
    assert found.counts() == {"send": {"inner": 2}, "recv": {"inner": 1}}
    found._message("send", on_gpu(), 2, 0)
    assert nccl.calls[-1] == ("send", 2, 0)


def test_a_batch_needs_no_rank_but_those_of_its_messages() -> None:
    """Each pair of ranks has a group of NCCL, made once, in which messages keep their order."""
    found, nccl = of_gpus()
    for _ in range(2):
        found._start_coalescing(torch.device("cuda"))
        for op, peer in (("recv", 1), ("send", 3), ("send", 1), ("recv", 3)):
            found._message(op, on_gpu(), peer, peer)
        found._end_coalescing(torch.device("cuda"))
    alone, pair = ["start", ("recv", 0, 1), ("send", 0, 1), "end"], ["start", ("send", 1, 3), ("recv", 1, 3), "end"]
    assert nccl.calls == [("nccl 1", 0, 1), *alone, ("nccl 1-3", 0, 2), *pair, *alone, *pair]
    found._rank, found._world_size = 0, 1
    nccl.calls.clear()
    found._start_coalescing(torch.device("cuda"))
    found._message("send", on_gpu(), 0, 0)
    found._end_coalescing(torch.device("cuda"))
    assert nccl.calls == ["start", ("send", 0, 0), "end"]  # the group of all ranks is that of its only one


def test_an_error_in_a_block_leaves_nothing_open() -> None:
    found, nccl = of_gpus(fails_at=1)
    found._start_coalescing(torch.device("cuda"))
    for peer in (2, 0, 2, 2):
        found._message("send", on_gpu(), peer, 0)
    with pytest.raises(RuntimeError, match="of the library"):
        found._end_coalescing(torch.device("cuda"))
    with_rank_0 = [("nccl 0-1", 1, 2), "start", ("send", 0, 0), "end"]
    with_rank_2 = [("nccl 1-2", 0, 2), "start", ("send", 1, 0), "end"]
    assert nccl.calls == with_rank_0 + with_rank_2
    found._message("send", on_gpu(), 2, 0)
    assert nccl.calls[-1] == ("send", 2, 0)


def test_blocks_belong_to_threads() -> None:
    found, _ = of_gpus()
    found._start_coalescing(torch.device("cpu"))
    ours = DoneWork()
    with futures.ThreadPoolExecutor(1) as pool:
        pool.submit(found._issued, DoneWork()).result()
        pool.submit(found._start_coalescing, torch.device("cpu")).result()
        pool.submit(found._end_coalescing, torch.device("cpu")).result()
    found._issued(ours)
    together = found._end_coalescing(torch.device("cpu"))
    assert isinstance(together, SeveralWorks)
    assert together._works == [ours]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_call_of_nccl_without_a_work_is_over(asynchronous: bool) -> None:
    """PyTorch returns none of a synchronous call, which is on the current stream by then."""
    found, nccl = of_gpus()
    one, several = dist.AllreduceOptions(), dist.AllreduceCoalescedOptions()
    scatter = dist.ReduceScatterOptions()
    one.asyncOp = several.asyncOp = scatter.asyncOp = asynchronous

    def on_gpus(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.float8_e4m3fn)  # what no native kernel adds up

    x, out = on_gpus(8), on_gpus(2)
    found._inners["cpu"] = nccl  # the tensors of this test are on the CPU
    made = [
        found.allreduce([x], one),
        found.allreduce_coalesced([x, x], several),
        found.reduce_scatter_single_coalesced([out], [x], scatter),
    ]
    assert [type(work) for work in made] == [
        InnerWork if asynchronous else DoneWork,
        InnerWork if asynchronous else DoneWork,
        SeveralWorks,
    ]
    assert [name for name, _ in nccl.calls] == ["allreduce", "allreduce_coalesced", "_reduce_scatter_base"]
    for work, result in zip(made, ([x], [x, x], [out]), strict=True):
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert all(one is other for one, other in zip(work.result(), result, strict=True))
        if not asynchronous:
            assert work.get_future().wait() is not None
    found._start_coalescing(torch.device("cuda"))
    found.allreduce([x], one)
    assert found._end_coalescing(torch.device("cuda")).wait()
    assert found.counts()["all_reduce"] == {"inner": 2}


def test_a_batch_of_nccl_without_a_work_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    found, nccl = of_gpus()
    monkeypatch.setattr(nccl, "_work", lambda: None)
    found._start_coalescing(torch.device("cuda"))
    work = found._message("send", on_gpu(), 2, 0)
    together = found._end_coalescing(torch.device("cuda"))
    assert work.wait()
    assert together.wait()
    assert together.is_completed()
    assert found._message("recv", on_gpu(), 2, 0).wait()


def test_what_is_left_to_do_is_done_where_there_is_no_work() -> None:
    finished: list[bool] = []
    assert works.inner_work(None, [3], lambda error, _: error, lambda: finished.append(True)).wait()
    assert finished == [True]


@pytest.mark.parametrize(
    "make",
    [
        lambda found, x, out, opts: found.allreduce([x], opts.AllreduceOptions),
        lambda found, x, out, opts: found.allreduce_coalesced([x], opts.AllreduceCoalescedOptions),
        lambda found, x, out, opts: found.reduce([x], opts.ReduceOptions),
        lambda found, x, out, opts: found.reduce_scatter([out], [[out] * 4], opts.ReduceScatterOptions),
        lambda found, x, out, opts: found.reduce_scatter_single(out, x, opts.ReduceScatterOptions),
        lambda found, x, out, opts: found.reduce_scatter_single_coalesced([out], [x], opts.ReduceScatterOptions),
    ],
)
def test_a_call_uses_the_factor_of_its_sum(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of an asynchronous call reads it later, when another tensor might have its memory."""
    found, factor, used = group({}), on_gpu(1), list[Any]()

    def options(name: str) -> Any:
        made = getattr(dist, name)()
        made.reduceOp = dist._make_nccl_premul_sum(0.5)  # type: ignore[attr-defined]
        made.asyncOp = True
        return made

    names = ("AllreduceOptions", "AllreduceCoalescedOptions", "ReduceOptions", "ReduceScatterOptions")
    given = SimpleNamespace(**{name: options(name) for name in names})
    monkeypatch.setattr(found, "_own", lambda op, make, result, operands, *_: used.extend(operands))
    make(found, torch.ones(8), torch.ones(2), given)
    assert not any(one is factor for one in used)
    monkeypatch.setattr(torch_private, "premul_factor", lambda _: factor)
    make(found, torch.ones(8), torch.ones(2), given)
    assert any(one is factor for one in used)


class _FakeGloo:
    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Any:
        (x,) = tensors
        assert type(x) is torch.Tensor
        x.fill_(3.0)
        return SimpleNamespace(wait=lambda: True, _source_rank=lambda: 2)


def test_a_message_from_any_rank_comes_through_the_host() -> None:
    """Gloo takes no CUDA tensor, and NCCL knows no such message."""
    gloo, x = _FakeGloo(), on_gpu()
    work = group({"cpu": gloo, "cuda": gloo})._message("recv_anysource", x, -1, 0)
    assert x.tolist() == [0.0, 0.0]
    assert work.wait()
    assert x.tolist() == [3.0, 3.0]
    assert work.source_rank() == 2
    with pytest.raises(UnsupportedError, match="give src"):
        of_gpus()[0]._message("recv_anysource", on_gpu(), -1, 0)


def test_batches_of_pytorch_are_found() -> None:
    shotcast.spawn(targets.batches, 2, timeout_s=300)


def test_a_device_without_an_inner_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="no tensors on"):
        group({"cpu": object()})._message("send", on_gpu(), 2, 0)


class _StreamHandle(Handle):
    def __init__(self, result: Any):
        super().__init__(result)
        self.waits, self.looks = 0, 0

    def wait(self) -> Any:
        self.waits += 1
        return super().wait()

    def is_completed(self) -> bool:
        self.looks += 1
        return self.looks > 2


def test_works_of_streams_wait_and_raise_what_has_failed() -> None:
    def failed() -> None:
        raise ConfigError("stopped")

    x, handle = torch.ones(2), _StreamHandle(None)

    def pending(limit_s: float) -> CollectiveTimeout:
        return CollectiveTimeout(1, [], "all_reduce", 0, limit_s, "pending")

    work = StreamWork(handle, None, [x], lambda: None, pending)  # type: ignore[arg-type]
    assert work.wait()
    assert handle.waits == 1
    assert not work.is_completed()
    assert work.wait(timedelta(seconds=5))  # polls until the event is over
    assert work.is_success()
    with pytest.raises(CollectiveTimeout, match="goes on") as caught:
        StreamWork(_StreamHandle(None), None, [x], lambda: None, pending).wait(timedelta(microseconds=1))  # type: ignore[arg-type]
    assert caught.value.reason == "pending"
    broken = StreamWork(handle, None, [x], failed, pending)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="stopped"):
        broken.wait()
    assert isinstance(broken.exception(), ConfigError)
    together = SeveralWorks([DoneWork([x]), work])
    assert together.wait()
    assert together.is_success()
    assert len(together.result()) == 2
    assert SeveralWorks([DoneWork([x]), broken]).exception() is not None


class _Here:
    """A place of calls with none but the one that is made."""

    def behind(self, task: Callable[[], None]) -> None:
        task()

    def serve_until(self, over: threading.Event) -> None:
        pass

    def pending(self, op: str, limit_s: float) -> CollectiveTimeout:
        return CollectiveTimeout(1, [], op, 0, limit_s, "pending")


@pytest.mark.parametrize("seen", ["wait", "exception", "future", "nobody", "dropped first"])
def test_an_error_that_nobody_saw_is_logged(seen: str, caplog: pytest.LogCaptureFixture) -> None:
    def failed() -> None:
        raise ConfigError("of the call")

    outcome = Outcome()
    work = ThreadWork("all_reduce", outcome, [], _Here())
    with pytest.raises(CollectiveTimeout, match="goes on"):
        work.wait(timedelta(microseconds=1))
    if seen != "dropped first":
        outcome.run(failed)
    if seen == "wait":
        with pytest.raises(ConfigError):
            work.wait()
    elif seen == "exception":
        assert isinstance(work.exception(), ConfigError)
    elif seen == "future":
        with pytest.raises(RuntimeError, match="of the call"):
            work.get_future().wait()
    del work
    if seen == "dropped first":
        assert not caplog.records
        outcome.run(failed)
    logged = [record.getMessage() for record in caplog.records]
    expected = "an asynchronous call failed, and was dropped without wait(): of the call"
    assert logged == ([expected] if seen in ("nobody", "dropped first") else [])


class _Library:
    """The work of a library: its waits raise ``error`` if there is one."""

    def __init__(self, error: Exception | None = None):
        self.error, self.waits = error, 0
        self.future: torch.futures.Future[Any] = torch.futures.Future()

    def wait(self) -> bool:
        self.waits += 1
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return self.error is None

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future


def test_an_error_of_the_library_stays() -> None:
    library = _Library(RuntimeError("sizes differ"))
    work = InnerWork(library, [], lambda error, _: error, lambda: pytest.fail("nothing has arrived"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="sizes differ"):
            work.wait()
    assert library.waits == 1
    assert work.exception() is library.error
    assert work.is_completed()
    assert not work.is_success()


@pytest.mark.parametrize("first", ["wait", "is_completed", "is_success", "future"])
def test_what_has_arrived_is_finished_once(first: str) -> None:
    """A tensor that ranks with one GPU receive is there as soon as anything says so."""
    library, finished = _Library(), []
    work = InnerWork(library, [3], lambda error, _: error, lambda: finished.append(first))
    if first == "future":
        future = work.get_future()
        assert not finished
        library.future.set_result(None)
        assert future.wait() == [3]
    else:
        assert getattr(work, first)()
    assert finished == [first]
    assert work.wait()
    assert work.is_completed()
    assert finished == [first]


def test_inner_groups_have_the_methods_that_calls_use() -> None:
    used = set(calls._SINGLE.values())
    for node in ast.walk(ast.parse(inspect.getsource(calls))):
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "inner"
            and isinstance(node.value, ast.Tuple)
        ):
            method = node.value.elts[0]
            used |= {method.value} if isinstance(method, ast.Constant) else set()
    assert {"allreduce", "allgather_coalesced", "_reduce_scatter_base", "alltoall"} <= used
    for name in ("ProcessGroupGloo", "ProcessGroupNCCL"):  # builds for the CPU have no NCCL
        kind = getattr(torch._C._distributed_c10d, name, None)
        assert kind is None or not [method for method in sorted(used) if not hasattr(kind, method)]


class _Stream:
    """A stream that keeps when its calls end; ``happened`` are the events of a test."""

    def __init__(self, name: str, happened: list[str]):
        self.name, self.happened = name, happened

    def record_event(self) -> Any:
        self.happened.append(f"record {self.name}")
        return SimpleNamespace(synchronize=lambda: self.happened.append(f"end of {self.name}"))


def test_a_barrier_on_the_host_waits_for_gpus_and_tells_of_their_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch asks for a barrier on the CPU of every group that has an inner group for it."""
    happened: list[str] = []

    def check() -> None:
        happened.append("check")
        raise ConfigError("stopped")

    def make(_op: str, call: Any, *_: Any) -> Any:
        happened.append("issued")
        call(SimpleNamespace(calls_by_library=0, barrier=lambda: happened.append("barrier")))

    of_gpus, gpu = group({}), torch.device("cuda", 0)
    last, current = _Stream("the last call", happened), _Stream("calls", happened)
    of_gpus._calls = {
        torch.device("cpu"): SimpleNamespace(comm=None, make=make),
        gpu: SimpleNamespace(comm=SimpleNamespace(check=check, _stream_of_last_call=lambda: last)),
        torch.device("cuda", 1): SimpleNamespace(comm=None),
    }
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(ConfigError, match="stopped"):
        of_gpus.barrier()
    recorded = ["record calls", "record the last call", "issued"]
    assert happened == [*recorded, "end of calls", "end of the last call", "barrier", "check"]


def test_a_group_is_bound_to_a_device_while_it_is_initialised_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP asks groups for the backend of a device later, perhaps on some ranks alone."""
    gpu = torch.device("cuda", 3)
    for initialised in (False, True):
        monkeypatch.setattr(dist, "is_initialized", lambda known=initialised: known)
        made = group({})
        made._set_group_desc("default_pg")
        with contextlib.suppress(RuntimeError):  # it has no backend of GPUs here
            made._get_backend(gpu)
        assert made.bound_device_id == (None if initialised else gpu)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=gpu)))
    assert torch_private.bound_device() == gpu


def test_options_of_nccl_reach_it_and_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        _timeout = timedelta(0)

    class Nccl:
        def __init__(self, *arguments: Any):
            self.arguments = arguments

    with pytest.raises(TypeError, match=r"ProcessGroupNCCL\.Options"):
        registration._create(SimpleNamespace(), object())
    nccl = SimpleNamespace(Options=Options)
    monkeypatch.setattr(torch_private.c10d, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(torch_private, "_nccl_class", lambda: Nccl)
    given = Options()
    assert torch_private.are_nccl_options(given)
    made = ShotcastProcessGroup.__new__(ShotcastProcessGroup)
    torch._C._distributed_c10d.ProcessGroup.__init__(made, 1, 4)
    made._rank, made._world_size, made._timeout, made._nccl_options = 1, 4, timedelta(seconds=9), given
    made._store = dist.HashStore()
    assert made._nccl("nccl", 1, 4).arguments[-1] is given
    assert given._timeout == timedelta(seconds=9)
    made._nccl_options = None
    assert made._nccl("nccl", 1, 4).arguments[-1] is not given


def test_a_group_whose_inner_one_is_gloo_can_be_split() -> None:
    """PyTorch copies the options of the inner group, and those of Gloo cannot be copied."""
    made = torch_private.inner_gloo(dist.HashStore(), 0, 1, timedelta(seconds=9), lambda: None)
    assert made.supports_splitting
    copy.deepcopy(made.options)


def test_threads_may_make_the_first_call_of_a_device_during_the_end() -> None:
    of_gpus, closed = group({}), []

    def close() -> None:
        of_gpus._calls[torch.device("cuda", len(closed))] = other
        closed.append(True)

    other = SimpleNamespace(close=close, set_timeout=lambda _: close())
    of_gpus._calls = {torch.device("cpu"): other}
    of_gpus._failures = SimpleNamespace(leave=lambda: None)  # type: ignore[assignment]
    of_gpus._take_timeout(timedelta(seconds=1))
    of_gpus.shutdown()
    assert len(closed) == 3


def test_an_abort_ends_calls_of_the_library() -> None:
    """Its calls look for that while they wait; communicators without native kernels have no others."""
    from shotcast.collectives.communicator import Communicator
    from shotcast.memory.host_group import Rendezvous

    with Communicator.from_store(Rendezvous(dist.HashStore(), 0, 1, "aborted"), "cpu") as comm:
        comm._executor = None
        assert not comm._vendor._stopped()
        comm._interrupt()
        assert comm._vendor._stopped()
