"""Functions that ranks run for the tests of tensors in memory that the ranks map."""

from __future__ import annotations

import gc
import itertools
import random
import time
from typing import Any

import pytest
import torch
from few_sms_targets import KINDS, exact, rank_tensors
from workers import FLOATS, check, settle, straggle

from shotcast.collectives import reference
from shotcast.collectives.communicator import Communicator
from shotcast.errors import ClosedError, CollectiveMismatch, CollectiveTimeout, ConfigError

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
        for algorithm in ("auto", "one_shot", "two_shot", "ring", "vendor"):
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
    with Communicator(device="cpu", timeout_s=100) as comm:
        x = comm.empty(COUNT)
        with pytest.raises(CollectiveMismatch):
            comm.all_reduce(x[: COUNT // (1 + comm.rank)], algorithm="two_shot")
        comm.reset()
        assert comm.all_reduce(x.fill_(1), out=x).eq(comm.world_size).all()


# -- few SMs ----------------------------------------------------------------------------------------------------------


def counted() -> list[int]:
    """Return a list that grows by the number of its program for each interpreted program of a call in place.

    Tiles of mapped tensors are half as long as those of the window, as both have one length in the interpreter.
    """
    from shotcast.transport.triton import few_sms

    few_sms.mapped_block = lambda block, *_: block // 2

    seen: list[int] = []
    original = few_sms.where_they_lie

    def in_place(*arguments: Any) -> Any:
        seen.append(int(few_sms.tl.program_id(0).handle.data[0]))
        return original(*arguments)

    few_sms.where_they_lie = in_place
    return seen


def few_sms_in_place(device: str, counts: list[int], dtypes: list[torch.dtype], max_bytes: int) -> int:
    """Compare calls whose tensors all ranks map, some do, or none; return how many were made in place.

    The result out of place and in place is that of the reference, at whole quads and at odd addresses.
    """
    with Communicator(device=device, timeout_s=60, max_bytes=max_bytes) as comm:
        seen = counted() if comm.device.type == "cpu" else None
        rank, size, own = comm.rank, comm.world_size, random.Random(comm.rank)
        done = expected = 0
        for (number, count), dtype, kind, who in itertools.product(
            enumerate(counts), dtypes, KINDS, ("all", "all but the last", "one", "none")
        ):
            if dtype not in FLOATS.values() and kind in ("all_reduce", "reduce_scatter"):
                continue
            straggle(comm, own)
            shift = (number + done) % 3 // 2
            mapped = {"all": True, "all but the last": rank < size - 1, "one": rank == 0, "none": False}[who]

            def tensor(source: torch.Tensor, mapped: bool = mapped, shift: int = shift) -> torch.Tensor:
                whole = (
                    comm.empty(source.numel() + shift, dtype=source.dtype)
                    if mapped
                    else source.new_empty(source.numel() + shift)
                )
                return whole[shift:].copy_(source)

            before = len(seen or ())
            calls = few_sms_case(comm, kind, dtype, count, tensor, done)
            done += 1
            aligned = not shift * dtype.itemsize % 16
            if seen is not None:
                now = len(seen) - before
                if who != "all" or not aligned:
                    assert now == 0, (kind, who, count, shift)
                elif kind != "uneven" and count:
                    assert now >= calls, (kind, count, now)
                expected += now
        settle(comm)
        assert rank in range(size)
        return expected if seen is not None else done


def few_sms_case(comm: Any, kind: str, dtype: torch.dtype, count: int, tensor: Any, seed: int) -> int:
    """Compare a call, and the same in place; return how many calls were made. ``tensor`` makes one like that given."""
    rank, size = comm.rank, comm.world_size
    what = kind, dtype, count
    by: dict[str, Any] = {"sms": 2, "algorithm": "few_sms"}
    xs = rank_tensors(count, dtype, size, seed, comm.device)
    x = tensor(xs[rank])
    if kind == "all_reduce":
        wanted = reference.ordered_sum(xs)
        check(comm.all_reduce(x, out=tensor(torch.zeros_like(x)), **by), wanted, what)
        check(comm.all_reduce(x, out=x, **by), wanted, (*what, "in place"))
        return 2
    if kind == "broadcast":
        exact(comm.broadcast(x, seed % size, **by), xs[seed % size], what)
        return 1
    if kind == "all_gather":
        exact(comm.all_gather(x, **by), torch.cat(xs), what)
        whole = tensor(torch.zeros_like(torch.cat(xs)))
        mine = whole[rank * count : (rank + 1) * count]
        mine.copy_(xs[rank])
        exact(comm.all_gather(mine, out=whole, **by), torch.cat(xs), (*what, "in place"))
        return 1  # a part may begin at an odd address
    if kind == "uneven":
        lengths = [count * (r + 1) // size for r in range(size)]
        got = comm.all_gather(x[: lengths[rank]], sizes=lengths, **by)
        exact(got, torch.cat([one[:length] for one, length in zip(xs, lengths, strict=True)]), what)
        return 0
    wide = [torch.cat([torch.roll(one, r) for r in range(size)]) for one in xs]
    mine = tensor(wide[rank])
    if kind == "all_to_all":
        exact(comm.all_to_all(mine, **by), torch.cat([torch.roll(one, rank) for one in xs]), what)
        return 1
    wanted = reference.ordered_sum([torch.roll(one, rank) for one in xs])
    check(comm.reduce_scatter(mine, **by), wanted, what)
    place = mine[rank * count : (rank + 1) * count]
    check(comm.reduce_scatter(mine, out=place, **by), wanted, (*what, "in place"))
    return 2


def late_in_place(device: str) -> tuple[str, tuple[int, ...], bool]:
    """Let rank 1 stay away from a call in place; return what rank 0 saw, and whether calls go on after a reset."""
    with Communicator(device=device, timeout_s=100) as comm:
        x = comm.empty(5000).fill_(1)
        by: dict[str, Any] = {"sms": 2, "algorithm": "few_sms"}
        comm.all_reduce(x, out=x, **by)
        seen: tuple[str, tuple[int, ...]] = "", ()
        if comm.rank == 0:
            comm.set_timeout(4)
            try:
                comm.all_reduce(x, out=x, **by)
                settle(comm)
                comm.check()
            except CollectiveTimeout as error:
                seen = error.reason, tuple(error.missing)
        comm._host.barrier()
        comm.set_timeout(100)
        comm.reset()
        y = comm.empty(5000).fill_(comm.rank)
        good = comm.all_reduce(y, out=y, **by).eq(sum(range(comm.world_size))).all()
        return *seen, bool(good)


def replayed_in_place() -> int:
    """Replay a captured call in place on changed inputs; return how often it was right. A capture maps no tensor."""
    with Communicator(device="cuda", timeout_s=100) as comm:
        x, out = comm.empty(100_000), comm.empty(100_000)
        assert comm._executor.places(x.data_ptr()) != [0]  # type: ignore[union-attr]
        by: dict[str, Any] = {"sms": 8, "algorithm": "few_sms"}
        comm.all_reduce(x.fill_(1), out=out, **by)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inside = comm.empty(100)
            assert comm._executor.places(inside.data_ptr()) == [0]  # type: ignore[union-attr]
            comm.all_reduce(x, out=out, **by)
        right = 0
        for turn in range(20):
            x.fill_(turn * (comm.rank + 1))
            graph.replay()
            right += bool(out.eq(turn * sum(range(1, comm.world_size + 1))).all())
        settle(comm)
        return right


def made_beside_a_wait() -> tuple[float, bool]:
    """Make tensors on the ranks but the last while their calls wait for it; return how long that took."""
    with Communicator(device="cuda", timeout_s=100) as comm:
        y = torch.ones(1000, device=comm.device)
        comm.all_reduce(y, out=y)
        settle(comm)
        took, x = 0.0, None
        last = comm.rank == comm.world_size - 1
        if last:
            time.sleep(2.0)
        comm.all_reduce(y, out=y)
        if not last:
            begun = time.monotonic()
            x = comm.empty(1_000_000)
            took = time.monotonic() - begun
        settle(comm)
        return took, last or comm._executor.places(x.data_ptr()) != [0]  # type: ignore[union-attr]


def many_tensors() -> tuple[int, int]:
    """Make and drop tensors of many sizes; return the bytes of the GPU they took, and those left after the end."""
    comm = Communicator(device="cuda", timeout_s=100)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    draw = random.Random(comm.rank)
    live: list[torch.Tensor] = []
    for turn in range(2000):
        live.append(comm.empty(draw.randrange(1, 4 << 20)).fill_(turn))
        if len(live) > 4:
            dead = live.pop(draw.randrange(len(live)))
            assert dead[0] == dead[-1]
    comm._host.barrier()
    grown = before - torch.cuda.mem_get_info()[0]
    live.clear()
    del dead
    comm.close()
    gc.collect()
    Communicator(device="cuda", timeout_s=100).close()
    torch.cuda.empty_cache()
    return grown, before - torch.cuda.mem_get_info()[0]
