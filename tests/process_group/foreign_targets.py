"""The code of ranks in the tests of what programs written for Gloo and NCCL rely on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from group_targets import backend, refused
from torch._C._distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode

import shotcast
from shotcast.process_group import counts

INTEGERS = torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64


def average(every: torch.Tensor) -> torch.Tensor:
    """Return the average of integers over the first dimension: the sum wraps around, the quotient is cut."""
    info, found = torch.iinfo(every.dtype), []
    for column in every.T.tolist():
        total = (sum(column) - info.min) % (1 << info.bits) + info.min
        found.append(abs(total) // len(column) * (-1 if total < 0 else 1))
    return torch.tensor(found, dtype=every.dtype)


def numbers(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Return six integers of a rank, whose sums are negative, wrap, and leave rests."""
    info = torch.iinfo(dtype)
    return torch.tensor([rank + 2, -3 * rank - 1, info.max, info.min, info.max - rank, 7], dtype=torch.int64).to(dtype)


def averages(asynchronous: bool) -> dict[str, dict[str, int]]:
    """Average integers by every call that reduces; return the counts."""
    with backend() as (rank, size):
        for dtype in INTEGERS:
            every = torch.stack([numbers(r, dtype) for r in range(size)])
            wanted, part, total = average(every), 6 // size, every.sum(0, dtype=dtype)
            own = slice(rank * part, (rank + 1) * part)
            x, out = numbers(rank, dtype), torch.empty(part, dtype=dtype)
            strided = numbers(rank, dtype).view(2, 3).t()

            def call(method: Callable[..., Any], *args: Any) -> None:
                work = method(*args, async_op=asynchronous)
                if asynchronous:
                    work.wait()

            for _ in range(3):  # calls like one before take another way
                x.copy_(numbers(rank, dtype))
                call(dist.all_reduce, x, dist.ReduceOp.AVG)
                assert torch.equal(x, wanted), (dtype, x, wanted)
                x.copy_(numbers(rank, dtype))
                call(dist.all_reduce, x)
                assert torch.equal(x, total), (dtype, x, total)
            call(dist.all_reduce, strided, dist.ReduceOp.AVG)
            assert torch.equal(strided.t().reshape(-1), wanted), dtype
            x = numbers(rank, dtype)
            call(dist.reduce, x, 1, dist.ReduceOp.AVG)
            assert torch.equal(x, wanted if rank == 1 else numbers(rank, dtype)), dtype
            call(dist.reduce_scatter_tensor, out, numbers(rank, dtype), dist.ReduceOp.AVG)
            assert torch.equal(out, wanted[own]), dtype
            call(dist.reduce_scatter, out.zero_(), list(numbers(rank, dtype).split(part)), dist.ReduceOp.AVG)
            assert torch.equal(out, wanted[own]), dtype
            xs = [numbers(rank, dtype), numbers(rank, dtype)[:3]]
            call(dist.all_reduce_coalesced, xs, dist.ReduceOp.AVG)
            assert torch.equal(xs[0], wanted), dtype
            assert torch.equal(xs[1], wanted[:3]), dtype
            with dist._coalescing_manager(async_ops=asynchronous) as manager:
                dist.reduce_scatter_tensor(out.zero_(), numbers(rank, dtype), dist.ReduceOp.AVG)
            if asynchronous:
                manager.wait()
            assert torch.equal(out, wanted[own]), dtype
            found = dist.group.WORLD.explain(x, reduction="avg")  # type: ignore[union-attr]
            assert found.name == "own", found
        refused(TypeError, "not torch.bool", dist.all_reduce, torch.tensor([True]), dist.ReduceOp.AVG)
        return counts()


def averages_of_a_communicator() -> None:
    """Average integers by the calls of a communicator, which may be repeated the fast way."""
    comm = shotcast.Communicator(device="cpu")
    rank, size = comm.rank, comm.world_size
    for dtype in INTEGERS:
        every = torch.stack([numbers(r, dtype) for r in range(size)])
        wanted, x = average(every), torch.empty(6, dtype=dtype)
        for _ in range(3):
            for reduction, result in (("avg", wanted), ("sum", every.sum(0, dtype=dtype))):
                x.copy_(numbers(rank, dtype))
                assert torch.equal(comm.all_reduce(x, out=x, reduction=reduction), result), (dtype, reduction)
        x = numbers(rank, dtype)
        assert torch.equal(comm.reduce_scatter(x, reduction="avg"), wanted.chunk(size)[rank])
        assert torch.equal(comm.all_reduce(x, reduction=dist.ReduceOp.AVG), wanted)
        assert comm.explain(x, reduction="avg") == comm.explain(x)
    version = x._version
    comm.all_reduce(x, out=x)
    comm.all_reduce(x, out=x, reduction="avg")
    comm.broadcast(x, 0)
    assert x._version >= version + 3
    comm.close()


def changed_in_place(rank: int, size: int, asynchronous: bool) -> dict[str, Callable[[torch.Tensor], Any]]:
    """Return calls that write to a tensor with a multiple of ``size`` rows."""

    def parts(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.ones_like(x) for _ in range(size)]

    def message(x: torch.Tensor) -> Any:
        y = torch.ones_like(x)
        ops = [dist.P2POp(dist.isend, y, (rank + 1) % size), dist.P2POp(dist.irecv, x, (rank - 1) % size)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    late = {"async_op": asynchronous}
    return {
        "all_reduce": lambda x: dist.all_reduce(x, **late),
        "average": lambda x: dist.all_reduce(x, dist.ReduceOp.AVG, **late),
        "integers": lambda x: dist.all_reduce(x.view(torch.int32), dist.ReduceOp.AVG, **late),
        "all_reduce_coalesced": lambda x: dist.all_reduce_coalesced([x], **late),
        "broadcast": lambda x: dist.broadcast(x, 0, **late),
        "reduce": lambda x: dist.reduce(x, 0, **late),
        "reduce_scatter": lambda x: dist.reduce_scatter(x, parts(x), **late),
        "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(x, torch.cat(parts(x)), **late),
        "all_gather": lambda x: dist.all_gather([x, *parts(x)[1:]], torch.ones_like(x), **late),
        "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(x, x.chunk(size)[rank].clone(), **late),
        "gather": lambda x: dist.gather(torch.ones_like(x), [x, *parts(x)[1:]] if rank == 0 else None, 0, **late),
        "scatter": lambda x: dist.scatter(x, parts(x) if rank == 0 else None, 0, **late),
        "all_to_all": lambda x: dist.all_to_all([x, *parts(x)[1:]], parts(x), **late),
        "all_to_all_single": lambda x: dist.all_to_all_single(x, torch.ones_like(x), **late),
        "message": message,
    }


def versions(asynchronous: bool) -> None:
    """Write to tensors in place; autograd's versions of them stay as they are, as with Gloo."""
    with backend() as (rank, size):
        for name, call in changed_in_place(rank, size, asynchronous).items():
            for x in (torch.ones(6), torch.ones(6), torch.ones(6, 2), torch.ones(6, 2).t().contiguous().t()):
                if not x.is_contiguous() and name in ("message", "integers"):
                    continue
                version, work = x._version, call(x)
                if asynchronous and work is not None:
                    work.wait()
                assert x._version == version, (name, list(x.stride()))
        w = torch.ones(4, requires_grad=True)
        y = torch.sigmoid(w)  # keeps its result for the backward pass
        dist.all_reduce(y.detach(), dist.ReduceOp.MAX)
        y.sum().backward()
        whole = torch.randn(4, 4, requires_grad=True)
        part = whole.chunk(2)[0]
        dist.broadcast(whole.detach(), 0)
        (part * 1).sum()


def inference(asynchronous: bool) -> None:
    """Write to tensors that were made in inference mode, outside of it."""
    with backend() as (rank, size):
        for name, call in changed_in_place(rank, size, asynchronous).items():
            for strided in (False, True):
                if strided and name in ("message", "integers"):
                    continue
                with torch.inference_mode():
                    x = torch.ones(6, 2).t().contiguous().t() if strided else torch.ones(6, 2)
                    y = torch.full_like(x, rank + 1.0)
                work = call(x)
                if asynchronous and work is not None:
                    work.wait()
                assert x.is_inference()
                dist.all_reduce(y)
                assert (y == sum(range(1, size + 1))).all(), name


class Recorder(TorchDispatchMode):
    """Notes the operators of torch.distributed that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


class Doubled(TorchDispatchMode):
    """Gives calls copies of their tensors, twice as large."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.c10d.allreduce_.default:
            return func(*args, **(kwargs or {}))
        copies = [2 * x for x in args[0]]
        result = func(copies, *args[1:])
        Work.unbox(result[1]).wait()
        for x, copy in zip(args[0], copies, strict=True):
            x.copy_(copy)
        return args[0], result[1]


class Counted(TorchDispatchMode):
    """Makes a call of its own for each that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = torch.zeros(1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            one = torch.ones(1)
            dist.all_reduce(one)
            self.ranks += one
        return func(*args, **(kwargs or {}))


def modes(asynchronous: bool) -> None:
    """Make calls under dispatch modes, which see what they see of Gloo; the calls are made by native kernels."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.tensor.debug import CommDebugMode

    with backend() as (rank, size):
        gloo = dist.new_group(backend="gloo")
        given = dist.distributed_c10d._get_default_group()
        found: list[tuple[list[str], dict[Any, int]]] = []
        for group in (gloo, given):
            outer, inner, counter = Recorder(), Recorder(), CommDebugMode()
            with outer, counter, inner:
                calls_of_all(group, rank, size, asynchronous)
            assert outer.seen == inner.seen
            found.append((inner.seen, dict(counter.get_comm_counts())))
        assert found[0] == found[1]
        assert len(found[0][0]) == 15, found
        assert all("inner" not in ways for op, ways in counts().items() if op not in ("send", "recv")), counts()
        assert torch._C._len_torch_dispatch_stack() == 0

        x = torch.full((4,), rank + 1.0)
        with Recorder() as recorder, Doubled():
            dist.all_reduce(x)
        assert (x == 2 * sum(range(1, size + 1))).all(), x
        assert recorder.seen == ["c10d::allreduce_"]
        with Counted() as counted:
            dist.broadcast(x, 0)
            dist.all_reduce(x)
        assert counted.ranks == 2 * size
        with CommDebugMode() as counter:
            y = functional.all_reduce(torch.ones(3), "sum", given)
            assert (y == size).all()
        assert counter.get_total_counts() == 1, counter.get_comm_counts()
        with Recorder() as recorder:
            refused(ValueError, "the root is one of", given.broadcast, torch.ones(2), size)
            refused(TypeError, "PREMUL_SUM", dist.all_reduce, x.int(), dist._make_nccl_premul_sum(0.5))
        assert recorder.seen == ["c10d::broadcast_", "c10d::allreduce_"]
        with Recorder() as recorder, dist._coalescing_manager(given, torch.device("cpu")):  # which Gloo does not have
            dist.all_reduce(x)
            dist.all_reduce(x)
        assert recorder.seen == ["c10d::allreduce_coalesced_"]
        before = counts()["all_reduce"]
        with FakeTensorMode(), Recorder() as recorder:
            dist.all_reduce(torch.ones(3))
        assert recorder.seen == ["c10d::allreduce_"]
        with FakeTensorMode():
            dist.all_reduce(torch.ones(3))
        assert counts()["all_reduce"] == before


def calls_of_all(group: Any, rank: int, size: int, asynchronous: bool) -> None:
    """Make every call of torch.distributed, and check what it gives."""

    def call(method: Callable[..., Any], *args: Any) -> None:
        work = method(*args, group=group, async_op=asynchronous)
        if asynchronous:
            work.wait()

    total = float(sum(range(1, size + 1)))
    own, every = torch.full((2,), rank + 1.0), torch.arange(1.0, size + 1).repeat_interleave(2)
    for _ in range(2):
        x = own.clone()
        call(dist.all_reduce, x)
        assert (x == total).all()
    x = own.clone()
    call(dist.all_reduce_coalesced, [x])
    assert (x == total).all()
    call(dist.reduce, x, 0)
    x = own.clone()
    call(dist.broadcast, x, 1)
    assert (x == 2).all()
    outs = [torch.empty(2) for _ in range(size)]
    call(dist.all_gather, outs, own)
    assert torch.equal(torch.cat(outs), every)
    out = torch.empty(2 * size)
    call(dist.all_gather_into_tensor, out, own)
    assert torch.equal(out, every)
    part = torch.empty(2)
    call(dist.reduce_scatter, part, [own.clone() for _ in range(size)])
    assert (part == total).all()
    call(dist.reduce_scatter_tensor, part, own.repeat(size))
    assert (part == total).all()
    gathered = [torch.empty(2) for _ in range(size)] if rank == 0 else None
    call(dist.gather, own, gathered, 0)
    assert rank or torch.equal(torch.cat(gathered or []), every)
    call(dist.scatter, part, list(every.split(2)) if rank == 0 else None, 0)
    assert torch.equal(part, own)
    call(dist.all_to_all, outs, [own.clone() for _ in range(size)])
    assert torch.equal(torch.cat(outs), every)
    call(dist.all_to_all_single, out, own.repeat(size))
    assert torch.equal(out, every)
    call(dist.barrier)
    if rank == 0:
        dist.send(own, 1, group)
    elif rank == 1:
        dist.recv(part, 0, group)
        assert (part == 1).all()


def compiled() -> None:
    """Make calls that Dynamo cannot trace from a function that it compiles, which sees nothing of their code.

    A thread makes them while Dynamo compiles what follows.
    """
    graphs: list[Any] = []

    def note(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(module.graph)
        return module.forward

    @torch.compile(backend=note)
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        work = dist.all_reduce(y, async_op=True)
        other = x * 3
        work.wait()
        dist.broadcast(other, 1, async_op=True).wait()
        return y * 2 + other

    with backend() as (rank, size):
        for _ in range(2):
            found = program(torch.full((4,), float(rank)))
            assert found.tolist() == [2 * sum(r + 1.0 for r in range(size)) + 3] * 4, found
        operators = [node.target.__name__ for graph in graphs for node in graph.nodes if node.op == "call_function"]
        assert operators, "nothing was compiled"
        assert set(operators) <= {"add", "mul"}, operators


def calls_while_another_thread_compiles() -> None:
    """Make calls while PyTorch's flag says that a graph is traced, as it does for all threads at once."""
    with shotcast.Communicator(device="cpu", timeout_s=30) as comm:
        x, size = torch.ones(4), float(comm.world_size)
        torch.compiler._is_compiling_flag = True
        try:
            assert comm.broadcast(x * (comm.rank + 1), 1).tolist() == [2.0] * 4
            assert comm.all_reduce(x).tolist() == [size] * 4
            assert (
                comm.all_reduce_rms_norm(torch.ones(2, 4), torch.ones(2, 4), torch.ones(4))[1].tolist()[0][0]
                == size + 1
            )
            differentiated = x.clone().requires_grad_()
            comm.all_reduce(differentiated).sum().backward()
            assert differentiated.grad is not None
            assert comm.start("all_gather", x).wait().tolist() == [1.0] * int(4 * size)
        finally:
            torch.compiler._is_compiling_flag = False


def uneven_inputs() -> None:
    """Train by DDP where ranks have other numbers of inputs, and gradients are divided by the ranks that go on."""
    with backend() as (rank, size):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 5, bias=False), bucket_cap_mb=1)
        for initial in (False, True):
            with model.join(divide_by_initial_world_size=initial):
                for number in range(3 + 2 * rank):
                    model(torch.full((1, 5), 50.0)).sum().backward()
                    going_on = sum(number < 3 + 2 * r for r in range(size))
                    wanted = 50.0 * going_on / (size if initial else going_on)
                    (weights,) = model.parameters()
                    assert weights.grad is not None
                    assert torch.allclose(weights.grad, torch.full((5, 5), wanted))
                    model.zero_grad()
