"""Functions that the ranks of tests/test_functional.py run."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as pytorch
from torch._dynamo.utils import counters

import shotcast
from shotcast import functional as ours

GLOO_REDUCES = ("sum", "MAX", "min", "product")


def numbers(shape: tuple[int, ...], rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return small whole numbers, whose sums are exact in any order."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def plain(x: Any) -> torch.Tensor:
    return pytorch.wait_tensor(x)


def like_those_of_pytorch() -> int:
    """Compare each function on our communicator with PyTorch on Gloo; return the number of comparisons."""
    done = 0
    warnings.simplefilter("ignore", FutureWarning)
    with shotcast.Communicator(device="cpu", timeout_s=300) as comm:
        n, group = comm.world_size, dist.group.WORLD

        def same(result: torch.Tensor, expected: torch.Tensor, what: object) -> None:
            nonlocal done
            expected = plain(expected)
            assert type(result) is torch.Tensor, what
            assert (result.shape, result.dtype) == (expected.shape, expected.dtype), (
                what,
                result.shape,
                expected.shape,
            )
            assert torch.equal(result, expected), (what, result, expected)
            assert torch.equal(plain(result), result), "PyTorch's wait_tensor takes our results"
            assert ours.wait_tensor(result) is result
            done += 1

        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            x = numbers((2 * n, 3 * n, n), comm.rank, dtype)
            for turned in (x, x.transpose(0, 1)):
                for reduction in GLOO_REDUCES:
                    what = (dtype, reduction)
                    same(ours.all_reduce(turned, reduction, comm), pytorch.all_reduce(turned, reduction, group), what)
                for dim in range(3):
                    gathered = pytorch.all_gather_tensor(turned, dim, group)
                    same(ours.all_gather_tensor(turned, dim, comm), gathered, (dtype, dim))
                    same(ours.all_gather_single_autograd(turned, dim - 3, comm, "tag"), gathered, (dtype, dim - 3))
                    scattered = pytorch.reduce_scatter_tensor(turned, "sum", dim, group)
                    same(ours.reduce_scatter_tensor(turned, "SUM", dim, comm), scattered, (dtype, dim))
                    same(ours.reduce_scatter_single(turned, "sum", dim - 3, comm), scattered, (dtype, dim - 3))
                equal = [turned.shape[0] // n] * n
                for sizes in (None, equal):
                    exchanged = pytorch.all_to_all_single(turned, sizes, sizes, group)
                    same(ours.all_to_all_single(turned, sizes, sizes, comm), exchanged, (dtype, sizes))
                sent = [(comm.rank + peer) % 2 for peer in range(comm.world_size)]  # as many as it gets from each
                exchanged = pytorch.all_to_all_single(turned[: sum(sent)].contiguous(), sent, sent, group)
                same(ours.all_to_all_single(turned[: sum(sent)], sent, sent, comm), exchanged, (dtype, "uneven"))
                for src in range(n):
                    before = turned.clone()
                    same(ours.broadcast(turned, src, comm), pytorch.broadcast(turned, src, group), (dtype, src))
                    assert torch.equal(turned, before)
        # what PyTorch has on its way is waited for, and a number is gathered like a list of one
        late = pytorch.all_reduce(torch.ones(4), "sum", group)
        assert type(late) is pytorch.AsyncCollectiveTensor
        assert ours.all_reduce(late, "sum", comm).tolist() == [float(n * n)] * 4
        assert type(ours.wait_tensor(pytorch.all_reduce(torch.ones(4), "sum", group))) is torch.Tensor
        assert ours.all_gather_tensor(torch.tensor(2.5), 0, comm).tolist() == [2.5] * n
    return done


def averages() -> None:
    """Averages are rounded once, and have derivatives."""
    with shotcast.Communicator(device="cpu", timeout_s=300) as comm:
        n = comm.world_size
        parts = [
            torch.randn(n, 5, generator=torch.Generator().manual_seed(r)).to(torch.bfloat16).requires_grad_()
            for r in range(n)
        ]
        x = parts[comm.rank]
        total = torch.zeros(n, 5)
        for part in parts:
            total = total + part.detach().float()
        expected = (total / n).to(torch.bfloat16)
        result = ours.all_reduce(x, "avg", comm)
        assert torch.equal(result, expected)
        result.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))
        x.grad = None
        result = ours.reduce_scatter_tensor(x, "AVG", 0, comm)
        assert torch.equal(result, expected[comm.rank][None])
        result.sum().backward()
        torch.testing.assert_close(x.grad, torch.full_like(x, 1 / n))
        x.grad = None
        ours.reduce_scatter_tensor(x.t(), "sum", 1, comm).sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))
        ours.all_gather_tensor(x, 1, comm).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 1 + n))
        ours.all_to_all_single(x, None, None, comm).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 2 + n))
        assert not ours.broadcast(x, 0, comm).requires_grad


def refused() -> None:
    with shotcast.Communicator(device="cpu", timeout_s=300) as comm:
        n = comm.world_size
        x = torch.ones(2 * n, 3)
        for error, text, call in [
            (shotcast.ConfigError, "group must be a shotcast.Communicator", lambda: ours.all_reduce(x, "sum", "0")),
            (
                shotcast.ConfigError,
                "group must be a shotcast.Communicator",
                lambda: ours.broadcast(x, 0, dist.group.WORLD),
            ),
            (
                shotcast.ConfigError,
                "one of sum, max, min, avg, band, bor, bxor, product",
                lambda: ours.all_reduce(x, "prod", comm),
            ),
            (shotcast.ConfigError, "one of sum", lambda: ours.all_reduce(x, dist.ReduceOp.SUM, comm)),
            (shotcast.UnsupportedError, "avg takes floating", lambda: ours.all_reduce(x.bool(), "avg", comm)),
            (shotcast.ConfigError, "no dimension 2", lambda: ours.all_gather_tensor(x, 2, comm)),
            (shotcast.ConfigError, "no dimension -3", lambda: ours.reduce_scatter_tensor(x, "sum", -3, comm)),
            (shotcast.ConfigError, "dimension 0 of", lambda: ours.reduce_scatter_tensor(x[1:], "sum", 0, comm)),
            (shotcast.ConfigError, "or both None", lambda: ours.all_to_all_single(x, [1] * n, None, comm)),
            (shotcast.ConfigError, "divided among", lambda: ours.all_to_all_single(x[1:], None, None, comm)),
            (shotcast.ConfigError, "AsyncCollectiveTensor", lambda: comm.all_reduce(pytorch.broadcast(x, 0, [0, 1]))),
        ]:
            with pytest.raises(error, match=text):
                call()


def mixed(backend: str) -> int:
    """Run PyTorch's functions and ours on each other's results in one graph; return the number of compiled graphs."""
    counters.clear()
    with shotcast.Communicator(device="cpu", timeout_s=300) as comm:
        group = dist.group.WORLD

        def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            one = pytorch.all_reduce(x, "sum", group)
            two = ours.all_reduce(one, "max", comm)
            three = pytorch.reduce_scatter_tensor(ours.all_gather_tensor(two, 1, comm), "sum", 0, group)
            four = pytorch.wait_tensor(ours.all_reduce(three, "avg", comm))
            five = ours.reduce_scatter_tensor(
                ours.wait_tensor(pytorch.all_gather_tensor(four, 0, group)), "sum", 1, comm
            )
            return one, two, three, four, five, ours.all_to_all_single(ours.broadcast(five, 1, comm), None, None, comm)

        warnings.simplefilter("ignore", FutureWarning)
        traced = torch.compile(call, fullgraph=True, backend=backend)
        for seed in range(2):
            x = numbers((4, 4), 10 * seed + comm.rank)
            for a, b in zip(traced(x), call(x), strict=True):
                assert torch.equal(plain(a), plain(b))
        return counters["stats"]["unique_graphs"]
