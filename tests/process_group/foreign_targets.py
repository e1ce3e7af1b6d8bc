"""The code of ranks in the tests of what programs written for Gloo and NCCL rely on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from group_targets import backend, refused

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
    comm.close()
