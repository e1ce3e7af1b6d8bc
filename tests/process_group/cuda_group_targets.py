"""The code of ranks with GPUs, in the tests of the backend of torch.distributed."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from group_targets import backend, values

from shotcast.collectives.rank_device import gpu_of
from shotcast.errors import CollectiveMismatch, CollectiveTimeout
from shotcast.process_group import counts, torch_private


def device() -> torch.device:
    """Return the GPU of this rank, made the current one."""
    found = torch.device("cuda", gpu_of(int(os.environ["LOCAL_RANK"])))
    torch.cuda.set_device(found)
    return found


def collectives() -> None:
    """Make every collective, on the current stream and beside it."""
    gpu = device()
    with backend(60.0) as (rank, size):

        def mine(r: int, count: int = 6) -> torch.Tensor:
            return values(r, count).to(gpu)

        every = [mine(r) for r in range(size)]
        total = torch.stack(every).sum(0)
        for asynchronous in (False, True):

            def done(work: dist.Work | None, asynchronous: bool = asynchronous) -> None:
                assert (work is not None) == asynchronous
                if work is not None:
                    work.wait()

            for _ in range(3):
                x = mine(rank)
                done(dist.all_reduce(x, async_op=asynchronous))
                assert torch.equal(x, total)
            x = mine(rank)
            done(dist.broadcast(x, size - 1, async_op=asynchronous))
            assert torch.equal(x, every[-1])
            x = mine(rank)
            done(dist.reduce(x, 0, async_op=asynchronous))
            assert rank or torch.equal(x, total)
            parts = [torch.empty_like(x) for _ in range(size)]
            done(dist.all_gather(parts, mine(rank), async_op=asynchronous))
            assert all(map(torch.equal, parts, every))
            whole = torch.empty(size, 6, device=gpu)
            done(dist.all_gather_into_tensor(whole, mine(rank), async_op=asynchronous))
            assert torch.equal(whole, torch.stack(every))
            out = torch.empty(6, device=gpu)
            done(dist.reduce_scatter_tensor(out, mine(rank, 6 * size), async_op=asynchronous))
            assert torch.equal(out, sum(mine(r, 6 * size) for r in range(size))[6 * rank : 6 * rank + 6])
            out = torch.empty(size, device=gpu)
            done(dist.all_to_all_single(out, torch.arange(size, device=gpu) + 10.0 * rank, async_op=asynchronous))
            assert out.tolist() == [10.0 * r + rank for r in range(size)]
            rows = [torch.empty_like(x) for _ in range(size)] if rank == 0 else None
            done(dist.gather(mine(rank), rows, 0, async_op=asynchronous))
            assert rows is None or all(map(torch.equal, rows, every))
            out = torch.empty(6, device=gpu)
            done(dist.scatter(out, every if rank == 0 else None, 0, async_op=asynchronous))
            assert torch.equal(out, every[rank])
            xs = [mine(rank), mine(rank, 9)]
            with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
                for x in xs:
                    dist.all_reduce(x)
            manager.wait()
            assert torch.equal(xs[0], total)
        dist.group.WORLD.barrier(_barrier_on(gpu)).wait()  # type: ignore[union-attr]
        found = counts()
        assert all("inner" not in ways for ways in found.values()), found


def _barrier_on(gpu: torch.device) -> object:
    options = torch._C._distributed_c10d.BarrierOptions()
    options.device = gpu
    return options


def streams() -> None:
    """Start calls behind long work, free their tensors at once, and wait for them on another stream."""
    gpu = device()
    with backend(60.0) as (_, size):
        x = torch.ones(1 << 20, device=gpu)
        dist.all_reduce(x)
        side = torch.cuda.Stream()
        for _ in range(20):
            busy = torch.randn(2048, 2048, device=gpu)
            busy = busy @ busy
            y = torch.full((1 << 20,), 2.0, device=gpu)
            work = dist.all_reduce(y, async_op=True)
            kept = y
            del y, busy
            torch.empty(1 << 22, device=gpu).fill_(7.0)
            with torch.cuda.stream(side):
                work.wait()
                assert bool((kept == 2.0 * size).all())
            future = work.get_future()
            assert future.wait()[0] is kept
        torch.cuda.synchronize()


def captured() -> None:
    """Capture synchronous and asynchronous calls in a graph, and replay it."""
    gpu = device()
    with backend(60.0) as (rank, size):
        x, out = torch.zeros(4096, device=gpu), torch.zeros(4096 * size, device=gpu)

        def calls() -> None:
            dist.all_reduce(x)
            work = dist.all_gather_into_tensor(out, x, async_op=True)
            assert work is not None
            work.wait()

        calls()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        for number in range(50):
            x.fill_(rank + number)
            graph.replay()
            total = sum(r + number for r in range(size))
            assert bool((x == total).all())
            assert bool((out == total).all())
        torch.cuda.synchronize()


def messages() -> None:
    """Send and receive more than fits in any buffer: in batches that send first, and alone in matching order.

    First a rank sends to itself, of which the others know nothing.
    """
    gpu = device()
    with backend(60.0) as (rank, size):
        dist.barrier()
        if rank == 0:
            x, y = torch.ones(4, device=gpu), torch.zeros(4, device=gpu)
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0), dist.P2POp(dist.irecv, y, 0)]):
                work.wait()
            assert bool((y == 1).all())
        dist.barrier()
        behind, before = (rank + 1) % size, (rank - 1) % size
        for count in (4, 1 << 23):
            x, y = torch.full((count,), float(rank), device=gpu), torch.empty(count, device=gpu)
            batch = [dist.P2POp(dist.isend, x, behind), dist.P2POp(dist.irecv, y, before)]
            for work in dist.batch_isend_irecv(batch):
                work.wait()
            assert bool((y == before).all())
            y.zero_()
            starts = [lambda x=x: dist.isend(x, behind), lambda y=y: dist.irecv(y, before)]
            for work in [start() for start in (starts if rank % 2 == 0 else reversed(starts))]:
                work.wait()
            assert bool((y == before).all())


def inner_calls() -> None:
    """Make synchronous and asynchronous calls of the NCCL inside, which serves no call of native kernels."""
    gpu = device()
    with backend(60.0) as (_, size):
        for asynchronous in (False, True):
            x = torch.ones(16, device=gpu).to(torch.float8_e4m3fn)
            work = dist.all_reduce(x, async_op=asynchronous)
            assert (work is not None) == asynchronous
            if work is not None:
                assert work.wait()
                torch.cuda.synchronize()  # the wait was one of the stream
                assert work.is_success()
            assert bool((x.float() == size).all())
            whole = torch.ones(4 * size, device=gpu).to(torch.float8_e5m2)
            part = torch.empty(4, dtype=torch.float8_e5m2, device=gpu)
            work = dist.reduce_scatter_tensor(part, whole, async_op=asynchronous)
            if work is not None:
                work.wait()
            assert bool((part.float() == size).all())
        x = torch.ones(16, device=gpu).to(torch.float8_e4m3fn)
        work = dist.group.WORLD.allreduce([x], dist.AllreduceOptions())  # type: ignore[union-attr]
        assert work.wait()
        torch.cuda.synchronize()  # the wait was one of the stream
        assert work.is_completed()
        assert work.get_future().wait()[0] is x
        assert counts()["all_reduce"] == {"inner": 3}


def inference_mode() -> None:
    """Make the first call of the library in inference mode, and later ones outside."""
    gpu = device()
    with backend(60.0) as (_, size):
        x = torch.ones(12 << 20, device=gpu)
        out = torch.empty(size * x.numel(), device=gpu)
        with torch.inference_mode():
            dist.all_gather_into_tensor(out, x)
            flags = torch.ones(3 << 26, dtype=torch.bool, device=gpu)
        for _ in range(2):
            dist.all_gather_into_tensor(out, x)
            dist.all_reduce(flags)
        torch.cuda.synchronize()
        assert bool((out == 1).all())
        assert bool(flags.all())
        assert counts()["all_gather"] == {"library": 3}


def barrier_after_streams() -> None:
    """Return from a barrier behind the calls of every stream, whichever is the current one."""
    gpu = device()
    with backend(60.0) as (_, size):
        x = torch.ones(1024, device=gpu)
        dist.all_reduce(x)
        torch.cuda.synchronize()
        for make in (lambda: dist.barrier(), lambda: dist.group.WORLD.barrier(_barrier_on(gpu)).wait()):  # type: ignore[union-attr]
            streams = [torch.cuda.Stream() for _ in range(3)]
            for stream in streams:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(500_000_000)
                    dist.all_reduce(x)
            make()
            assert all(stream.query() for stream in streams)
        assert x[0] == size**7


def factors() -> None:
    """Start sums whose factor is given up at once, behind long work, while its memory is wanted."""
    gpu = device()
    with backend(60.0) as (_, size):
        x = torch.ones(1 << 20, device=gpu)
        dist.all_reduce(x, op=dist._make_nccl_premul_sum(torch.full((1,), 2.0, device=gpu)))  # type: ignore[attr-defined]
        assert bool((x == 2.0 * size).all())
        for number in range(20):
            y = torch.ones(1 << 20, device=gpu)
            before = dist.all_reduce(torch.ones(1 << 24, device=gpu), async_op=True)
            torch.cuda._sleep(20_000_000)
            factor = torch.full((1,), 2.0 + number, device=gpu)
            work = dist.all_reduce(y, op=dist._make_nccl_premul_sum(factor), async_op=True)  # type: ignore[attr-defined]
            del factor
            others = [torch.full((1,), 99.0, device=gpu) for _ in range(64)]
            assert before is not None
            assert work is not None
            work.wait()
            assert bool((y == (2.0 + number) * size).all())
            del others


def default_device() -> None:
    """Make the first calls while new tensors are on the GPU unless somebody says otherwise."""
    gpu = device()
    torch.set_default_device(gpu)
    try:
        with backend(60.0) as (_, size):
            x = torch.ones(1024)
            dist.all_reduce(x)
            out = torch.empty(size * (12 << 20))
            dist.all_gather_into_tensor(out, torch.ones(12 << 20))  # by the library
            host = torch.ones(8, device="cpu")
            dist.all_reduce(host)
            torch.cuda.synchronize()
            assert bool((x == size).all())
            assert bool((out == 1).all())
            assert host.tolist() == [float(size)] * 8
    finally:
        torch.set_default_device(None)


def timeout_of_one_call(asynchronous: bool) -> tuple[str, float]:
    """Leave rank 1 out of a call by the library that has a deadline of its own; return the error and the seconds."""
    gpu = device()
    with backend(100.0) as (rank, size):
        group = dist.new_group(timeout=timedelta(seconds=100))
        x = torch.ones(12 << 20, device=gpu)
        out = torch.empty(size * x.numel(), device=gpu)
        dist.all_gather_into_tensor(out, x, group=group)
        torch.cuda.synchronize()
        dist.barrier()
        text, begun = "nothing", time.monotonic()
        try:
            if rank != 1:
                options = torch_private.AllgatherOptions()
                options.timeout, options.asyncOp = timedelta(seconds=3), asynchronous
                work = group._allgather_base(out, x, options)
                torch.cuda.synchronize()
                work.wait()
                group.allreduce([torch.ones(8, device=gpu)]).wait()
            else:
                time.sleep(8)
        except CollectiveTimeout as error:
            text = f"{error.reason} after {error.timeout_s:g} s"
        took = time.monotonic() - begun
        time.sleep(max(0.0, 9 - took))
        dist.barrier()
    return text, took


def ddp() -> list[float]:
    """Train by DDP; return the first weights."""
    gpu = device()
    with backend(60.0) as (rank, _):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 4)).to(gpu)
        divided = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.25)
        optimizer = torch.optim.SGD(divided.parameters(), 0.1)
        for step in range(5):
            optimizer.zero_grad()
            divided(torch.randn(8, 512, device=gpu) * (rank + step)).square().mean().backward()
            optimizer.step()
        assert counts()["all_reduce"]["own"] >= 5
        return model[0].weight[0, :8].tolist()


def bound() -> None:
    """Bind the group to a GPU, and split it."""
    from torch.distributed.device_mesh import init_device_mesh

    from shotcast.process_group.registration import register

    gpu = device()
    register()
    dist.init_process_group("shotcast", timeout=timedelta(seconds=60), device_id=gpu)
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(8, device=gpu)
    dist.all_reduce(x)
    halves = dist.split_group(split_ranks=[list(range(size // 2)), list(range(size // 2, size))])
    assert halves is not None
    dist.all_reduce(x, group=halves)
    assert x[0] == size * (size // 2)
    mesh = init_device_mesh("cuda", (size, 1), mesh_dim_names=("a", "b"))
    y = torch.full((4,), float(rank), device=gpu)
    dist.all_reduce(y, group=mesh.get_group("a"))
    assert y[0] == sum(range(size))
    dist.barrier()
    dist.destroy_process_group()


def faults() -> tuple[str, str]:
    """Leave rank 1 out of a call, then make calls that differ; return the errors of this rank."""
    gpu = device()
    found = []
    with backend(3.0):
        for case in ("late", "different"):
            group = dist.new_group(timeout=timedelta(seconds=3))  # a new group does not take that of all ranks
            rank = dist.get_rank(group)
            x = torch.ones(64, device=gpu)
            dist.all_reduce(x, group=group)
            torch.cuda.synchronize()
            text = "nothing"
            try:
                if case == "different" or rank == 0:
                    wrong = torch.ones(64 + 64 * rank, device=gpu)
                    work = dist.all_reduce(wrong, group=group, async_op=True)
                    torch.cuda.synchronize()
                    work.wait()
                else:
                    time.sleep(4)
            except (CollectiveTimeout, CollectiveMismatch) as error:
                text = type(error).__name__
            found.append(text)
            time.sleep(1)
            dist.barrier()
    return found[0], found[1]


def latency() -> dict[int, tuple[float, float]]:
    """Return microseconds of an all-reduce through the group and by its communicator, by bytes."""
    gpu = device()
    result = {}
    with backend(60.0):
        for nbytes in (8 << 10, 1 << 20):
            x = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=gpu)
            dist.all_reduce(x)
            comm = dist.group.WORLD._calls[gpu].comm  # type: ignore[union-attr]
            times = []
            for call in (lambda x=x: dist.all_reduce(x), lambda x=x, comm=comm: comm.all_reduce(x, out=x)):
                for _ in range(50):
                    call()
                torch.cuda.synchronize()
                dist.barrier()
                begun = time.perf_counter()
                for _ in range(500):
                    call()
                torch.cuda.synchronize()
                times.append((time.perf_counter() - begun) / 500 * 1e6)
            result[nbytes] = times[0], times[1]
    return result
