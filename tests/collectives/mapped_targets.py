"""Functions that ranks run for the tests of tensors in memory that the ranks map."""

from __future__ import annotations

import pytest
import torch

from shotcast.collectives.communicator import Communicator
from shotcast.errors import ClosedError, CollectiveMismatch, ConfigError

COUNT = 40_000


def is_mapped(comm: Communicator, x: torch.Tensor) -> bool:
    executor = comm._executor
    heap = getattr(executor, "_heap", None)
    if heap is None:
        return False
    begin = executor._regions[comm.rank]  # type: ignore[union-attr]
    return bool(begin + heap.start <= x.data_ptr() < begin + heap.end)


def every_call() -> None:
    """Make every call with mapped tensors, which those that have no form for them stage."""
    with Communicator(device="cpu") as comm:
        rank, ranks = comm.rank, comm.world_size
        total = sum(range(ranks))
        x = comm.empty(ranks, COUNT)
        assert is_mapped(comm, x)
        assert (x.shape, x.dtype, x.device) == ((ranks, COUNT), torch.float32, comm.device)
        assert comm.empty(3, dtype=torch.bfloat16).dtype is torch.bfloat16
        for algorithm in ("auto", "one_shot", "two_shot", "ring", "vendor", "two_shot_fp8"):
            assert comm.all_reduce(x.fill_(rank), out=x, algorithm=algorithm).sub(total).abs().max() < 0.1
        assert comm.all_reduce(x.fill_(rank), reduction="avg").eq(total / ranks).all()
        assert comm.all_reduce(x.fill_(rank), out=x, reduction="max").eq(ranks - 1).all()
        assert comm.reduce_scatter(x.fill_(rank)).eq(total).all()
        assert comm.reduce_scatter(x.fill_(rank), out=x[rank : rank + 1])[0, 0] == total
        x[rank] = rank
        assert comm.all_gather(x[rank : rank + 1], out=x)[:, 5].tolist() == list(range(ranks))
        x[rank] = rank
        assert comm.all_gather(x[rank : rank + 1])[:, 7].tolist() == list(range(ranks))
        sizes = [rank + 1 for rank in range(ranks)]
        rows = comm.empty(rank + 1, COUNT).fill_(rank)
        assert comm.all_gather(rows, sizes=sizes)[:, 3].tolist() == [r for r in range(ranks) for _ in range(r + 1)]
        assert comm.all_to_all(x.fill_(rank))[:, 1].tolist() == list(range(ranks))
        assert comm.broadcast(x.fill_(rank), root=1).eq(1).all()
        assert (got := comm.reduce(x.fill_(rank), root=1)) is None or rank != 1 or got.eq(total).all()
        residual, weight = comm.empty(ranks, COUNT).fill_(1.0), comm.empty(COUNT).fill_(1.0)
        normed, _ = comm.all_reduce_rms_norm(x.fill_(rank + 1.0), residual, weight)
        assert normed.sub(1).abs().max() < 1e-3
        handle = comm.start("all_reduce", x.fill_(rank), out=x)
        assert handle.wait().eq(total).all()
        peer = rank ^ 1
        if peer < ranks:
            comm.batch_send_recv([(x.fill_(rank), peer)], [(residual, peer)])
            assert residual.eq(peer).all()


def shapes() -> None:
    with Communicator(device="cpu") as comm:
        assert comm.empty((2, 3)).shape == comm.empty(torch.Size([2, 3])).shape == comm.empty(2, 3).shape == (2, 3)
        assert comm.empty().shape == ()
        assert comm.empty(0, 4).shape == (0, 4)
        for wrong in ((-1,), (2.0,), (True,), ("ab",), ((2, 3), 4), ([-5000],)):
            with pytest.raises(ConfigError, match="whole numbers from 0 up"):
                comm.empty(*wrong)  # type: ignore[arg-type]


def trained() -> tuple[list[float], list[float]]:
    """Train with parameters and gradients that are mapped, and with ordinary ones; return both results."""
    found = []
    with Communicator(device="cpu") as comm:
        for make in (comm.empty, torch.empty):
            weight = torch.nn.Parameter(make(256, 256).fill_(0.01))
            weight.grad = make(256, 256).zero_()
            optimizer = torch.optim.Adam([weight], lr=0.1)
            for step in range(4):
                optimizer.zero_grad(set_to_none=False)
                generator = torch.Generator().manual_seed(10 * step + comm.rank)
                (torch.randn(16, 256, generator=generator) @ weight).square().sum().backward()
                assert is_mapped(comm, weight.grad) == (make == comm.empty)
                comm.all_reduce(weight.grad, out=weight.grad)
                optimizer.step()
            found.append(weight.detach().sum(0).tolist())
    return found[0], found[1]


def of_several_communicators() -> None:
    with Communicator(device="cpu") as comm:
        rank, ranks = comm.rank, comm.world_size
        part = comm.split(color=rank % 2)
        assert part is not None
        x, y = comm.empty(COUNT), part.empty(COUNT)
        members = range(rank % 2, ranks, 2)
        for _ in range(5):
            assert comm.all_reduce(x.fill_(rank), out=x).eq(sum(range(ranks))).all()
            assert part.all_reduce(y.fill_(rank), out=y).eq(sum(members)).all()
            assert comm.all_reduce(y.fill_(rank), out=y).eq(sum(range(ranks))).all()
            assert part.all_reduce(x.fill_(rank), out=x).eq(sum(members)).all()
        part.close()
        assert comm.all_reduce(y.fill_(rank), out=y).eq(sum(range(ranks))).all()
    assert y.eq(sum(range(ranks))).all()
    with pytest.raises(ClosedError, match="empty"):
        comm.empty(1)


def ordinary() -> None:
    """Make tensors where no memory is mapped for them."""
    with Communicator(device="cpu") as comm:
        x = comm.empty(2, COUNT, dtype=torch.float16)
        assert not is_mapped(comm, x)
        assert (x.shape, x.dtype) == ((2, COUNT), torch.float16)
        assert comm.all_reduce(x.fill_(1), out=x).eq(comm.world_size).all()


def after_a_reset() -> None:
    with Communicator(device="cpu", timeout_s=1.0) as comm:
        x = comm.empty(COUNT)
        with pytest.raises(CollectiveMismatch):
            comm.all_reduce(x[: COUNT // (1 + comm.rank)], algorithm="two_shot")
        comm.reset()
        assert comm.all_reduce(x.fill_(1), out=x).eq(comm.world_size).all()
