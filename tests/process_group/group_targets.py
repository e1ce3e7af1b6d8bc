"""The code of ranks in the tests of the backend of torch.distributed."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from frames import Frames
from shotcast.errors import ClosedError, ConfigError
from shotcast.process_group import counts, torch_private
from shotcast.process_group.registration import register


@contextlib.contextmanager
def backend(timeout_s: float = 100.0, name: str = "shotcast") -> Iterator[tuple[int, int]]:
    """Make the group of all ranks by the backend; gives this rank and their number."""
    warnings.filterwarnings("ignore", ".* (is|will be) deprecated", FutureWarning)  # names that PyTorch 2.13 changes
    register()
    dist.init_process_group(name, timeout=timedelta(seconds=timeout_s))
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def values(rank: int, count: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the tensor of a rank."""
    return (torch.arange(count) % 5 + rank + 1).to(dtype)


def refused(kind: type[Exception], words: str, call: Callable[..., Any], *arguments: Any) -> None:
    """Make a call that raises at once an error of a kind, with these words."""
    try:
        call(*arguments)
    except kind as error:
        assert words in str(error), error  # noqa: PT017
    else:
        raise AssertionError(f"it was not refused: {words}")


def repeated_calls() -> tuple[dict[str, list[str]], dict[str, dict[str, int]]]:
    """Repeat calls where only prepared ones succeed. Return the functions that each runs, and the counts of calls.

    Each was made before on other tensors of the same kind. Then calls are made that are none of these.
    """
    from shotcast.process_group import calls

    with backend() as (rank, size):
        every = [values(r) for r in range(size)]
        many, whole = values(rank).repeat(size), torch.cat(every)

        def gathered(**how: Any) -> Any:
            return dist.all_gather_into_tensor(out, values(rank), **how), out, whole

        def scattered(**how: Any) -> Any:
            return dist.reduce_scatter_tensor(part, many.clone(), **how), part, sum(every)

        def exchanged(**how: Any) -> Any:
            return dist.all_to_all_single(out, many.clone(), **how), out, whole

        def rows(**how: Any) -> Any:
            return dist.all_gather_into_tensor(table, values(rank).view(1, 6), **how), table, torch.stack(every)

        def reduced(**how: Any) -> Any:
            x = values(rank)
            return dist.all_reduce(x, **how), x, sum(every)

        def greatest(**how: Any) -> Any:
            x = values(rank)
            return dist.all_reduce(x, op=dist.ReduceOp.MAX, **how), x, torch.stack(every).amax(0)

        def sent_to_all(**how: Any) -> Any:
            x = values(rank)
            return dist.broadcast(x, size - 1, **how), x, every[-1]

        def met(**how: Any) -> Any:
            return dist.barrier(**how), whole, whole

        made = gathered, scattered, exchanged, rows, reduced, greatest, sent_to_all, met
        out, part, table = torch.empty(6 * size), torch.empty(6), torch.empty(size, 6)
        dist.barrier()  # builds the communicator
        found: dict[str, list[str]] = {}
        with Frames() as counted:
            sent_to_all(async_op=True)[0].wait()  # begins the thread of such calls
            for call in made:
                for _ in range(2):
                    call()
            operands = calls.CallOperands
            calls.CallOperands = None  # type: ignore[assignment, misc]
            for call in made:
                for asynchronous in (False, True, False):
                    out, part, table = torch.empty(6 * size), torch.empty(6), torch.empty(size, 6)
                    results: list[Any] = []

                    def one(call: Any = call, how: bool = asynchronous, results: list[Any] = results) -> None:
                        results.extend(call(async_op=how))
                        if how:
                            results[0]._outcome.over.wait()

                    functions = counted.of(one)
                    work, got, wanted = results
                    assert work is None or work.wait()
                    assert torch.equal(got, wanted), call
                    found[f"{call.__name__}, asynchronous: {asynchronous}"] = functions
        for long in (
            lambda: dist.broadcast(torch.nn.Parameter(values(rank)), size - 1),
            lambda: dist.broadcast(values(rank).requires_grad_(), size - 1),
            lambda: dist.broadcast(values(rank).view(2, 3).t(), size - 1),
            lambda: dist.broadcast(values(rank), 0),
            lambda: dist.broadcast(torch._neg_view(values(rank)), size - 1),
            lambda: dist.reduce_scatter_tensor(part, many, op=dist.ReduceOp.MAX),
            lambda: dist.all_to_all_single(out, many, [6] * size, [6] * size),
            lambda: dist.all_gather_into_tensor(out[:5], values(rank)),
        ):
            with contextlib.suppress(TypeError, ValueError, RuntimeError):  # CallOperands is None
                long()
                raise AssertionError("it was taken for a prepared call")
        calls.CallOperands = operands  # type: ignore[misc]
        return found, counts()


def collectives(asynchronous: bool) -> dict[str, dict[str, int]]:
    """Make every collective and compare with what plain PyTorch computes of all ranks' tensors."""
    with backend() as (rank, size):
        every = [values(r) for r in range(size)]
        total = torch.stack(every).sum(0)

        def done(work: Any) -> None:
            assert (work is not None) == asynchronous
            if work is not None:
                work.wait()
                assert work.is_completed()
                assert work.is_success()

        for _ in range(3):
            x = values(rank)
            done(dist.all_reduce(x, async_op=asynchronous))
            assert torch.equal(x, total)
        x = values(rank)
        done(dist.broadcast(x, size - 1, async_op=asynchronous))
        assert torch.equal(x, every[-1])
        x = values(rank)
        done(dist.reduce(x, size - 1, async_op=asynchronous))
        assert rank != size - 1 or torch.equal(x, total)
        parts = [torch.empty(6) for _ in range(size)]
        done(dist.all_gather(parts, values(rank), async_op=asynchronous))
        assert all(map(torch.equal, parts, every))
        whole = torch.empty(size, 6)
        done(dist.all_gather_into_tensor(whole, values(rank), async_op=asynchronous))
        assert torch.equal(whole, torch.stack(every))
        out = torch.empty(6)
        done(dist.reduce_scatter(out, [values(rank) * (r + 1) for r in range(size)], async_op=asynchronous))
        assert torch.equal(out, total * (rank + 1))
        done(dist.reduce_scatter_tensor(out, values(rank, 6 * size), async_op=asynchronous))
        assert torch.equal(out, sum(values(r, 6 * size) for r in range(size))[6 * rank : 6 * rank + 6])
        out = torch.empty(size)
        done(dist.all_to_all_single(out, torch.arange(size) + 10.0 * rank, async_op=asynchronous))
        assert out.tolist() == [10.0 * r + rank for r in range(size)]
        sent = [rank + r for r in range(size)]
        out = torch.empty(sum(sent), 2)
        x = torch.full((sum(sent), 2), float(rank))
        done(dist.all_to_all_single(out, x, sent, sent, async_op=asynchronous))
        assert torch.equal(out[:, 0], torch.repeat_interleave(torch.arange(size), torch.tensor(sent)).float())
        outs = [torch.empty(r + rank + 1) for r in range(size)]
        done(
            dist.all_to_all(
                outs, [torch.full((r + rank + 1,), float(rank)) for r in range(size)], async_op=asynchronous
            )
        )
        assert [o.tolist() for o in outs] == [[float(r)] * (r + rank + 1) for r in range(size)]
        parts = [torch.empty(6) for _ in range(size)] if rank == 0 else None
        done(dist.gather(values(rank), parts, 0, async_op=asynchronous))
        assert parts is None or all(map(torch.equal, parts, every))
        out = torch.empty(6)
        done(dist.scatter(out, every if rank == 0 else None, 0, async_op=asynchronous))
        assert torch.equal(out, every[rank])
        done(dist.barrier(async_op=asynchronous))
        return counts()


def objects() -> None:
    """Exchange objects, and messages in the usual orders."""
    with backend() as (rank, size):
        found: list[Any] = [None] * size
        dist.all_gather_object(found, {"rank": rank})
        assert found == [{"rank": r} for r in range(size)]
        several = [rank, "x"]
        dist.broadcast_object_list(several, 0)
        assert several == [0, "x"]
        one: list[Any] = [None]
        dist.scatter_object_list(one, list(range(size)) if rank == 0 else None, 0)
        assert one == [rank]
        before, behind = (rank - 1) % size, (rank + 1) % size
        x, y = torch.full((3,), float(rank)), torch.empty(3)
        works = [dist.isend(x, behind, tag=7), dist.irecv(y, before, tag=7)]
        for work in works:
            work.wait()
        assert y.tolist() == [float(before)] * 3
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, behind), dist.P2POp(dist.irecv, y.zero_(), before)])
        for work in works:
            work.wait()
        assert y.tolist() == [float(before)] * 3
        if rank == 0:
            sources = [dist.recv(y) for _ in range(size - 1)]
            assert sorted(sources) == list(range(1, size))
        else:
            dist.send(x, 0)
        half = dist.new_group([0, 1])
        if rank < 2:
            dist.all_reduce(x, group=half)
            assert x.tolist() == [1.0] * 3
            assert counts(half) == {"all_reduce": {"own": 1}}


def ddp() -> tuple[list[float], list[float]]:
    """Train by DDP and without; return the first weights."""
    with backend() as (rank, size):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        alone = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        alone.load_state_dict(model.state_dict())
        if rank:  # DDP takes those of rank 0
            torch.nn.init.zeros_(model[0].weight)
        divided = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0005)
        batches = torch.randn(3, 4 * size, 8)
        for network, part in ((divided, slice(4 * rank, 4 * rank + 4)), (alone, slice(None))):
            optimizer = torch.optim.SGD(network.parameters(), 0.1)
            for batch in batches:
                optimizer.zero_grad()
                network(batch[part]).square().mean().backward()
                optimizer.step()
        assert counts()["all_reduce"]["own"] >= 3
        return model[0].weight[0].tolist(), alone[0].weight[0].tolist()


REDUCTIONS = {
    "sum": (dist.ReduceOp.SUM, lambda x: x.sum(0)),
    "avg": (dist.ReduceOp.AVG, lambda x: x.double().mean(0)),
    "max": (dist.ReduceOp.MAX, lambda x: x.amax(0)),
    "min": (dist.ReduceOp.MIN, lambda x: x.amin(0)),
    "prod": (dist.ReduceOp.PRODUCT, lambda x: x.prod(0)),
    "band": (dist.ReduceOp.BAND, lambda x: x[0] & x[1] & x[-1]),
    "bor": (dist.ReduceOp.BOR, lambda x: x[0] | x[1] | x[-1]),
    "bxor": (dist.ReduceOp.BXOR, lambda x: x[0] ^ x[1] ^ x[2]),
}


def reductions() -> dict[str, dict[str, int]]:
    """Make every reduction of several dtypes by each operation that has one; return the counts."""
    with backend() as (rank, size):
        for name, (op, reference) in REDUCTIONS.items():
            integers = name in ("band", "bor", "bxor")
            for dtype in (torch.int64, torch.uint8) if integers else (torch.float32, torch.float64, torch.bfloat16):
                every = torch.stack([values(r, 6, dtype) for r in range(size)])
                wanted = reference(every).to(dtype)
                x = values(rank, 6, dtype)
                dist.all_reduce(x, op)
                assert torch.equal(x, wanted), (name, dtype)
                x = values(rank, 6, dtype)
                dist.reduce(x, 1, op)
                assert rank != 1 or torch.equal(x, wanted), (name, dtype)
                out = torch.empty(2, dtype=dtype)
                dist.reduce_scatter_tensor(out, values(rank, 6, dtype), op)
                assert torch.equal(out, wanted[2 * rank : 2 * rank + 2]), (name, dtype)
        x = torch.tensor([True, False, rank == 0])
        dist.all_reduce(x)
        assert x.tolist() == [True, False, True]
        z = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
        dist.all_reduce(z)
        assert z.tolist() == [6 + 12j, 18 - 6j]
        premul = dist._make_nccl_premul_sum(0.5)
        x = values(rank)
        dist.all_reduce(x, premul)
        assert torch.equal(x, 0.5 * sum(values(r) for r in range(size)))
        out = torch.empty(2)
        dist.reduce_scatter_tensor(out, values(rank), premul)
        assert torch.equal(out, (0.5 * sum(values(r) for r in range(size)))[2 * rank : 2 * rank + 2])
        half = torch.tensor([0.5], dtype=torch.float64)
        for dtype in (torch.float32, torch.bfloat16):
            x = values(rank, 6, dtype)
            dist.all_reduce(x, dist._make_nccl_premul_sum(half))
            assert torch.equal(x, (0.5 * sum(values(r) for r in range(size))).to(dtype))
        for asynchronous in (False, True):
            refused(TypeError, "PREMUL_SUM", dist.all_reduce, values(rank, 6, torch.int32), premul, None, asynchronous)
        return counts()


def layouts() -> None:
    """Exchange tensors of unusual strides, dtypes and sizes."""
    with backend() as (rank, size):
        total = sum(range(1, size + 1))
        x = torch.full((4, 3), rank + 1.0).t()
        dist.all_reduce(x)
        assert x.stride() == (1, 3)
        assert torch.equal(x, torch.full((3, 4), float(total)))
        x = torch.zeros(6)
        x[::2] = rank + 1
        dist.all_reduce(x[::2], async_op=True).wait()
        assert x.tolist() == [total, 0] * 3
        whole = torch.empty(2 * size, 3).t()
        dist.broadcast(whole.zero_() + rank, 0)
        parts = [torch.zeros(3, 2).t() for _ in range(size)]
        dist.all_gather(parts, torch.full((3, 2), float(rank)).t())
        assert [part.unique().tolist() for part in parts] == [[float(r)] for r in range(size)]
        uneven = [torch.empty(r + 1) for r in range(size)]
        dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
        assert [u.tolist() for u in uneven] == [[float(r)] * (r + 1) for r in range(size)]
        for dtype in (torch.float32, torch.float8_e8m0fnu):
            uneven = [torch.zeros(3 * r, dtype=torch.uint8).to(dtype) for r in range(size)]  # nothing of rank 0
            dist.all_gather(uneven, torch.full((3 * rank,), 2.0**rank).to(dtype))
            assert [u.float().tolist() for u in uneven] == [[2.0**r] * (3 * r) for r in range(size)]
        for asynchronous in (False, True):
            out = torch.empty(2 * rank)
            lists = [torch.full((2 * r,), float(rank + r)) for r in range(size)]
            work = dist.reduce_scatter(out, lists, async_op=asynchronous)
            if work is not None:
                work.wait()
            assert out.tolist() == [float(sum(range(size)) + size * rank)] * (2 * rank)
        assert set(counts()["reduce_scatter"]) == {"own"}
        dist.all_reduce(torch.empty(0))
        scalar = torch.tensor(rank + 1)
        dist.all_reduce(scalar)
        assert scalar.item() == total
        odd = torch.full((3,), rank, dtype=torch.int16).view(torch.complex32 if False else torch.float16)
        gathered = [torch.empty_like(odd) for _ in range(size)]
        dist.all_gather(gathered, odd)
        assert all(g.view(torch.int16).tolist() == [r] * 3 for r, g in enumerate(gathered))
        unknown = torch.full((2,), rank, dtype=torch.int32).view(torch.float8_e8m0fnu)
        dist.broadcast(unknown, 1)
        assert unknown.view(torch.int32).tolist() == [1, 1]
        parameter = torch.nn.Parameter(torch.full((4,), rank + 1.0))
        dist.all_reduce(parameter)
        assert parameter.tolist() == [float(total)] * 4
        assert parameter.is_leaf
        with torch.inference_mode():
            frozen = torch.full((4,), rank + 1.0)
            for asynchronous in (False, False, True):
                work = dist.all_reduce(frozen.fill_(rank + 1.0), async_op=asynchronous)
                if work is not None:
                    work.wait()
                assert frozen.tolist() == [float(total)] * 4
        grown = (torch.ones(3, requires_grad=True) * (rank + 1)).requires_grad_()
        dist.all_reduce(grown)
        assert grown.tolist() == [float(total)] * 3
        sparse = torch.sparse_coo_tensor([[rank]], [1.0], (size,))
        dist.all_reduce(sparse)
        assert sparse.to_dense().tolist() == [1.0] * size
        assert counts()["all_reduce"]["inner"] == 1


def coalesced() -> None:
    """Make the coalesced forms."""
    with backend() as (rank, size):
        xs = [values(rank, 3), values(rank, 5, torch.int64)]
        for asynchronous in (False, True):
            with dist.distributed_c10d._coalescing_manager(async_ops=asynchronous) as manager:
                for x in xs:
                    dist.all_reduce(x)
            manager.wait()
        assert torch.equal(xs[0], size * sum(values(r, 3) for r in range(size)))
        assert torch.equal(xs[1], size * sum(values(r, 5, torch.int64) for r in range(size)))
        outs = [torch.empty(2 * size), torch.empty(3 * size, dtype=torch.int64)]
        with dist.distributed_c10d._coalescing_manager():
            for out, x in zip(outs, (values(rank, 2), values(rank, 3, torch.int64)), strict=True):
                dist.all_gather_into_tensor(out, x)
        assert torch.equal(outs[1], torch.cat([values(r, 3, torch.int64) for r in range(size)]))
        outs = [torch.empty(2), torch.empty(3)]
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
            for out, count in zip(outs, (2, 3), strict=True):
                dist.reduce_scatter_tensor(out, values(rank, count * size))
        manager.wait()
        assert torch.equal(outs[1], sum(values(r, 3 * size) for r in range(size))[3 * rank : 3 * rank + 3])
        group = dist.group.WORLD
        # sums of FP8 go to Gloo, which refuses them
        outs, xs = [torch.empty(2, dtype=torch.float8_e5m2)] * 2, [values(rank, 2 * size, torch.float8_e5m2)] * 2
        for name in ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"):
            refused(RuntimeError, "Invalid scalar type", lambda name=name: getattr(group, name)(outs, xs).wait())
        assert counts()["reduce_scatter_coalesced"]["inner"] == 4
        assert group.allgather_coalesced([[] for _ in range(size)], []).wait()
        with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            a, b = values(rank), values(rank)
            dist.group.WORLD.allreduce([a])
            dist.group.WORLD.broadcast([b])
        manager.wait()
        assert torch.equal(a, sum(values(r) for r in range(size)))
        assert torch.equal(b, values(0))


def refuse_arguments(group: Any, rank: int, size: int, wrong: torch.Tensor, asynchronous: bool) -> None:
    """Make calls with tensors that do not fit, each of which is refused where it is made."""
    x, parts = values(rank), [torch.empty(6) for _ in range(size)]

    def of(kind: Any, **values: Any) -> Any:
        opts = kind()
        opts.asyncOp = asynchronous
        for name, value in values.items():
            setattr(opts, name, value)
        return opts

    gather, scatter, reduce = torch_private.AllgatherOptions, dist.ReduceScatterOptions, dist.ReduceOptions
    rooted = [dist.GatherOptions, dist.ScatterOptions, dist.BroadcastOptions]
    exchange = of(dist.AllToAllOptions)
    for words, call in {
        "another dtype": [
            lambda: group.allgather([[*parts[1:], wrong]], [x], of(gather)),
            lambda: group._allgather_base(wrong.repeat(size), x, of(gather)),
            lambda: group.allgather_into_tensor_coalesced([wrong.repeat(size)], [x], of(gather)),
            lambda: group.allgather_coalesced([[wrong]] * size, [x], of(gather)),
            lambda: group.reduce_scatter([wrong], [parts], of(scatter)),
            lambda: group._reduce_scatter_base(wrong, x.repeat(size), of(scatter)),
            lambda: group.reduce_scatter_tensor_coalesced([wrong], [x.repeat(size)], of(scatter)),
            lambda: group.gather([[*parts[1:], wrong]], [x], of(rooted[0], rootRank=rank)),
            lambda: group.scatter([x], [[*parts[1:], wrong]], of(rooted[1], rootRank=rank)),
            lambda: group.alltoall([*parts[1:], wrong], parts, exchange),
            lambda: group.alltoall_base(wrong.repeat(size), x.repeat(size), [], [], exchange),
        ],
        "are needed": [
            lambda: group.allgather([parts[1:]], [x], of(gather)),
            lambda: group._allgather_base(torch.empty(7), x, of(gather)),
            lambda: group.allgather_into_tensor_coalesced([torch.empty(7)], [x], of(gather)),
            lambda: group.allgather_coalesced([[torch.empty(7)]] * size, [x], of(gather)),
            lambda: group.reduce_scatter([x], [parts[1:]], of(scatter)),
            lambda: group.reduce_scatter([torch.empty(7)], [parts], of(scatter)),
            lambda: group._reduce_scatter_base(torch.empty(7), x, of(scatter)),
            lambda: group.reduce_scatter_tensor_coalesced([torch.empty(7)], [x], of(scatter)),
            lambda: group.alltoall(parts[1:], parts, exchange),
            lambda: group.alltoall_base(torch.empty(2 * size), torch.empty(size), [], [], exchange),
        ],
        "the root is": [
            lambda: group.reduce([x], of(reduce, rootRank=size)),
            lambda: group.gather([], [x], of(rooted[0], rootRank=-1)),
            lambda: group.scatter([x], [], of(rooted[1], rootRank=size)),
            lambda: group.broadcast([x], of(rooted[2], rootRank=size)),
        ],
        "in place": [lambda: group.alltoall_base(x, x, [], [], exchange)],
    }.items():
        for one in call:
            refused(ValueError, words, one)


def direct() -> None:
    """Call the group itself, as C++ and some programs do, under the names of several releases."""
    with backend() as (rank, size):
        group = dist.group.WORLD
        assert (group.rank(), group.size(), group.name()) == (rank, size, "shotcast")
        total = sum(values(r) for r in range(size))
        x = values(rank)
        work = group.allreduce(x)
        assert work.get_future().wait()[0] is x
        assert torch.equal(x, total)
        x = values(rank)
        group.allreduce([x], dist.ReduceOp.MAX).wait()
        assert torch.equal(x, values(size - 1))
        group.broadcast(x.fill_(rank), 1).wait()
        assert x.tolist() == [1.0] * 6
        out = torch.empty(6 * size)
        for name in ("_allgather_base", "all_gather_single"):
            getattr(group, name)(out.zero_(), values(rank)).wait()
            assert torch.equal(out, torch.cat([values(r) for r in range(size)]))
        for name in ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"):
            getattr(group, name)([out.zero_()], [values(rank)]).wait()
            assert torch.equal(out, torch.cat([values(r) for r in range(size)]))
        for name in ("_reduce_scatter_base", "reduce_scatter_single"):
            part = torch.empty(2)
            getattr(group, name)(part, values(rank, 2 * size)).wait()
        for name in ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"):
            again = torch.empty(2)
            getattr(group, name)([again], [values(rank, 2 * size)]).wait()
            assert torch.equal(part, again)
        for name in ("alltoall_base", "all_to_all_single"):
            mixed = torch.empty(size)
            getattr(group, name)(mixed, torch.arange(float(size)) + 10 * rank, [], []).wait()
            assert mixed.tolist() == [10.0 * r + rank for r in range(size)]
        lists = [[torch.empty(2), torch.empty(3)] for _ in range(size)]
        group.allgather_coalesced(lists, [values(rank, 2), values(rank, 3)]).wait()
        assert all(torch.equal(lists[r][i], values(r, 2 + i)) for r in range(size) for i in (0, 1))
        opts = dist.GatherOptions()
        opts.asyncOp = True
        work = group.gather([[torch.empty(6) for _ in range(size)]] if rank == 0 else [], [values(rank)], opts)
        work.wait()
        assert [part.tolist() for part in work.result()] == [values(r).tolist() for r in range(size) if rank == 0]
        wrong = torch.empty(6, dtype=torch.float64)
        for asynchronous in (False, True):
            refuse_arguments(group, rank, size, wrong, asynchronous)
        group.barrier().wait()
        assert group.explain(x).name == "own"
        assert group.explain(x).algorithm
        assert group.explain(x, "all_gather_coalesced").name == "own"
        assert group.explain(x, "send").name == "inner"
        assert "bor takes integers" in group.explain(x, reduction="bor").reason
        try:
            group.explain(x, "all_gahter")
        except ConfigError as error:
            assert "all_gather" in str(error)  # noqa: PT017
        else:
            raise AssertionError("an operation that there is not was explained")
        child = group.split_group(list(range(size - 1, 0, -1)))
        assert (child is None) == (rank == 0)
        if child is not None:
            assert child.rank() == size - 1 - rank
            y = values(rank)
            child.allreduce([y]).wait()
            assert torch.equal(y, total - values(0))
            child.shutdown()


def frameworks() -> None:
    """Run what PyTorch builds on groups: meshes, functional collectives, DTensor, FSDP2, hooks."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    with backend() as (rank, size):
        mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("a", "b"))
        x = torch.full((4,), rank + 1.0)
        dist.all_reduce(x, group=mesh.get_group("a"))
        dist.all_reduce(x, group=mesh.get_group("b"))
        assert x[0] == sum(range(1, size + 1))
        y = functional.all_reduce(torch.full((2,), 1.0), "sum", dist.group.WORLD)
        assert y.tolist() == [size] * 2
        y = functional.all_gather_tensor(torch.full((2,), float(rank)), 0, dist.group.WORLD)
        assert y.tolist() == [float(r) for r in range(size) for _ in range(2)]
        y = functional.reduce_scatter_tensor(torch.arange(2.0 * size), "avg", 0, dist.group.WORLD)
        assert y.tolist() == [2.0 * rank, 2.0 * rank + 1]
        sharded = distribute_tensor(torch.arange(8.0 * size).view(size * 2, 4), mesh["a"], [Shard(0)])
        assert torch.equal(sharded.full_tensor(), torch.arange(8.0 * size).view(size * 2, 4))
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        plain = [p.detach().clone() for p in model.parameters()]
        for p in plain:
            dist.broadcast(p, 0)
        for p, value in zip(model.parameters(), plain, strict=True):
            p.data.copy_(value)
        whole = init_device_mesh("cpu", (size,))
        fully_shard(model, mesh=whole)
        loss = model(torch.ones(3, 8)).square().mean()
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        used = counts(whole.get_group())
        assert used["all_gather"]["own"] > 0, used
        assert used["reduce_scatter"]["own"] > 0, used


def forms(folder: str) -> None:
    """Make and destroy the group of all ranks by other names and rendezvous, and groups of one rank."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in ("cpu:shotcast,cuda:shotcast", "cpu:shotcast", "shotcast"):
        with backend(name=name):
            x = torch.ones(3)
            dist.all_reduce(x)
            assert x.tolist() == [float(size)] * 3
            assert type(dist.group.WORLD).__name__ == "ShotcastProcessGroup"
    with backend(name="cpu:gloo"):
        inside = dist.new_group(backend="shotcast")
        x = torch.ones(3)
        dist.all_reduce(x, group=inside)
        assert x.tolist() == [float(size)] * 3
        for name, mixed in (("cpu:shotcast,cuda:nccl", True), ("cpu:shotcast", False)):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                dist.new_group(backend=name)
            assert [str(one.message) for one in told if "is not used" in str(one.message)] == mixed * [
                "the backend shotcast serves all tensors of its groups; cuda:nccl is not used"
            ]
        alone = [dist.new_group([r], backend="shotcast") for r in range(size)][rank]
        dist.all_reduce(x, group=alone)
        parts = [torch.empty(3)]
        dist.all_gather(parts, x, group=alone)
        dist.barrier(alone)
        assert parts[0].tolist() == [float(size)] * 3
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(variable, None)
    dist.init_process_group("shotcast", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [float(size)] * 3
    dist.destroy_process_group()
    try:
        dist.group.WORLD.allreduce([x])  # type: ignore[union-attr]
    except AttributeError:
        return
    raise AssertionError("the group was not destroyed")


def pending() -> None:
    """Destroy the group while the first call of all ranks is under way."""
    x = torch.ones(3)
    with backend() as (_, size):
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert x.tolist() == [float(size)] * 3


def held() -> tuple[int, int]:
    """Return how many files and threads this process has."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def groups_that_come_and_go() -> list[tuple[int, int]]:
    """Make and destroy groups; return what the process holds after each."""
    found = []
    with backend() as (_, size):
        for _ in range(6):
            group = dist.new_group()
            x = torch.ones(4)
            dist.all_reduce(x, group=group)
            dist.all_reduce(x, group=group, async_op=True).wait()
            assert x.tolist() == [float(size) ** 2] * 4
            dist.destroy_process_group(group)
            del group
            gc.collect()
            dist.barrier()
            found.append(held())
    return found


def first_call_on_a_thread() -> None:
    """Start the first call of a group, then wait in the job's store, while the other rank waits for the call."""
    from torch.distributed.distributed_c10d import _get_default_store

    with backend() as (rank, size):
        x, store = torch.ones(4), _get_default_store()
        work = dist.all_reduce(x, async_op=True)
        if rank == 0:
            other = store.clone()  # type: ignore[attr-defined]

            def look() -> None:
                time.sleep(0.1)
                dist.group.WORLD._failures.known()  # type: ignore[union-attr]
                other.set("the ends are known", "")

            thread = threading.Thread(target=look)
            thread.start()
            store.get("the call is over")  # holds the connection of the store all the time
            work.wait()
            thread.join()
        else:
            store.get("the ends are known")
            work.wait()
            store.set("the call is over", "")
        assert x.tolist() == [float(size)] * 4


def callbacks() -> None:
    """Make calls in callbacks of futures, as hooks of DDP do, while another call waits for its turn."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    with backend() as (rank, size):
        x, y, z = torch.ones(4), torch.ones(5), torch.ones(6)
        dist.all_reduce(z)
        if rank == 1:
            time.sleep(
                0.3
            )  # so the callback of rank 0 runs on the thread of the calls, and this one's where it is added

        def behind(future: torch.futures.Future[Any]) -> torch.Tensor:
            dist.all_reduce(y)
            dist.broadcast(y, 0)
            nested = dist.all_reduce(y, async_op=True)
            assert nested is not None
            return future.value()[0] + nested.get_future().wait()[0][:4]

        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        added = work.get_future().then(behind)
        dist.all_reduce(z)
        assert added.wait().tolist() == [size + size**2] * 4
        assert z.tolist() == [size**2] * 6
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64), bucket_cap_mb=0.001)
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 64) * (rank + step)).square().mean().backward()
            optimizer.step()
        weights = [torch.empty(64, 64) for _ in range(size)]
        dist.all_gather(weights, model.module.weight.detach())
        assert torch.equal(weights[0], weights[-1])


def batches() -> None:
    """Issue batches by PyTorch, of CPU tensors and of tensors that say that they lie on a GPU of NCCL."""
    from fake_nccl import FakeNccl, on_gpu

    with backend() as (rank, size):
        group, other = dist.group.WORLD, (rank + 1) % size
        found: list[Any] = []
        message = group._message

        def noting(*args: Any) -> Any:
            found.append(torch_private.batch_of_caller())
            return message(*args)

        group._message = noting  # type: ignore[method-assign]
        x, y = torch.full((4,), float(rank)), torch.empty(4)
        ops = [dist.P2POp(dist.isend, x, other, tag=3), dist.P2POp(dist.irecv, y, other, tag=3)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert y.tolist() == [float(other)] * 4
        assert len(found) == 2
        assert found[0][0] is found[1][0]
        assert [(op, peer, tag) for op, _, peer, tag in found[1][1]] == [("send", other, 3), ("recv", other, 3)]
        assert found[1][1][1][1] is y
        work = dist.isend(x, other)
        dist.recv(y, other)
        work.wait()  # type: ignore[union-attr]
        assert found[2:] == [None, None]
        group._message = message  # type: ignore[method-assign]
        torch_private.plain = lambda x: x  # or it would give the CPU tensor that there is
        nccl = group._inners["cuda"] = FakeNccl()
        group._get_backend = lambda device: None  # type: ignore[method-assign]  # PyTorch 2.14 asks what it can do

        def batch(*parts: Any) -> list[Any]:
            return dist.batch_isend_irecv([dist.P2POp(op, tensor, other) for op, tensor in parts])

        for _ in range(2):
            works = batch((dist.isend, on_gpu()), (dist.irecv, on_gpu()), (dist.isend, on_gpu()))
            assert len(works) == 3
            assert works[0] is works[1] is works[2]
            assert works[0].wait()
            assert nccl.calls == ["start", ("send", other, 0), ("recv", other, 0), ("send", other, 0), "end"]
            nccl.calls.clear()
        batch((dist.isend, on_gpu()))
        mixed = batch((dist.isend, on_gpu()), (dist.isend, x), (dist.irecv, y.zero_()), (dist.irecv, on_gpu()))
        assert mixed[0] is mixed[3]
        for work in mixed:
            work.wait()
        assert y.tolist() == [float(other)] * 4
        assert nccl.calls == [
            "start",
            ("send", other, 0),
            "end",
            "start",
            ("send", other, 0),
            ("recv", other, 0),
            "end",
        ]
        group._inners["cuda"] = broken = FakeNccl(fails_at=1)
        try:
            batch((dist.isend, on_gpu()), (dist.irecv, on_gpu()), (dist.isend, on_gpu()))
        except RuntimeError as error:
            assert "of the library" in str(error)  # noqa: PT017
        else:
            raise AssertionError("an error was lost")
        assert batch((dist.isend, on_gpu()))[0].wait()
        wanted = ["start", ("send", other, 0), ("recv", other, 0), "end", "start", ("send", other, 0), "end"]
        assert broken.calls == wanted
        dist.barrier()


def places_of_callbacks(late: int) -> list[list[float]]:
    """Add callbacks that make calls before and after the call is over, as one rank is late; return the results."""
    with backend() as (rank, _):
        dist.barrier()
        a, b, c = torch.ones(4), torch.ones(5), torch.full((5,), 10.0)

        def nap() -> None:
            if rank == late:
                time.sleep(0.2)

        def start(x: torch.Tensor) -> dist.Work:
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            return work

        nap()
        first, second = start(a), start(b)
        nap()
        added = first.get_future().then(lambda _: start(c).wait())
        added.wait()
        second.wait()
        results = [a[0].item(), b[0].item(), c[0].item()]
        # as DDP does for each bucket, with a chain of callbacks
        buckets = [torch.full((3,), 10.0**number) for number in range(4)]
        inner = [torch.full((3,), 2 * 10.0**number) for number in range(4)]
        ends = []
        for bucket, y in zip(buckets, inner, strict=True):
            future = start(bucket).get_future()
            nap()
            ends.append(future.then(lambda _, y=y: start(y).get_future().wait()).then(lambda _, y=y: start(y).wait()))
        for end in ends:
            end.wait()
        results += [x[0].item() for x in (*buckets, *inner)]
        # a callback that waits for a call behind its own, and one that waits for its future
        nap()
        first, second, third = start(a), start(b), start(c)

        def waits(_: Any) -> None:
            second.wait()
            third.get_future().wait()

        first.get_future().then(waits).wait()
        results += [a[0].item(), b[0].item(), c[0].item()]
        return [results]


def destroyed() -> str:
    """Use a group that was destroyed; return the error."""
    with backend():
        group = dist.new_group()
        dist.destroy_process_group(group)
        try:
            group.allreduce([torch.ones(2)]).wait()
        except ClosedError as error:
            return str(error)
    return ""
