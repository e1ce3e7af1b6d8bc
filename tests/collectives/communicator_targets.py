"""Functions that the ranks of tests/collectives/test_cpu.py run, besides those of workers.py for all devices."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import threading
import time
from typing import Any

import expected_results
import pytest
import torch
import torch.distributed as dist
from workers import FLOATS, await_call, check, differing, inputs, shifted

import shotcast
from shotcast import wire
from shotcast.collectives import first_use, reference
from shotcast.memory.host_group import Rendezvous, StoreGroup

DTYPES = {name: getattr(torch, name) for name in wire.DTYPES}
INTEGERS = {torch.uint8, torch.int8, torch.int32, torch.int64}


def patterns(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random bits. They include NaNs with any payload."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.bitwise_and_(1).view(dtype) if dtype is torch.bool else raw.view(dtype)


def same_bits(got: torch.Tensor, wanted: torch.Tensor, what: Any) -> None:
    assert got.shape == wanted.shape, (what, got.shape, wanted.shape)
    assert got.dtype == wanted.dtype, (what, got.dtype)
    assert torch.equal(got.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8)), what


def copies_of_every_dtype(counts: list[int], shift: int) -> int:
    """Check every operation that moves data, over all dtypes, bit by bit. Return the number of cases."""
    done = 0
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        rank, size = comm.rank, comm.world_size
        for (name, dtype), count in itertools.product(DTYPES.items(), counts):
            what = (name, count)
            xs = [patterns(count * size, dtype, 100 * count + r) for r in range(size)]
            x = shifted(xs[rank], shift)
            blocks = [part[rank * count : (rank + 1) * count] for part in xs]
            for algorithm in ("one_shot", "ring", "vendor"):
                same_bits(comm.all_gather(x, algorithm=algorithm), torch.cat(xs), (*what, algorithm))
            lengths = [count * r for r in range(size)]
            pieces = [part[:n] for part, n in zip(xs, lengths, strict=True)]
            for algorithm in ("one_shot", "vendor"):
                got = comm.all_to_all(x, algorithm=algorithm)
                same_bits(got, torch.cat(blocks), (*what, "all_to_all", algorithm))
                got = comm.all_gather(x[: lengths[rank]], sizes=lengths, algorithm=algorithm)
                same_bits(got, torch.cat(pieces), (*what, "uneven", algorithm))
            for root in range(size):
                same_bits(comm.broadcast(x.clone(), root), xs[root], (*what, "broadcast", root))
            # Every rank sends to the next one, around the ring. The odd ranks receive first.
            received = torch.empty_like(x)
            after, before = (rank + 1) % size, (rank - 1) % size
            steps = [lambda x=x, to=after: comm.send(x, to), lambda y=received, of=before: comm.recv(y, of)]
            for step in steps if rank % 2 == 0 else steps[::-1]:
                step()
            same_bits(received, xs[before], (*what, "recv"))
            done += 1
    return done


def reductions_by_gloo() -> None:
    """Compare reductions by Gloo with plain torch."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        rank, size = comm.rank, comm.world_size
        for dtype in (*INTEGERS, torch.bool, torch.float64, torch.complex64, torch.float32, torch.float16):
            generator = torch.Generator().manual_seed(7)
            xs = [torch.randint(1, 4, (6 * size,), generator=generator).to(dtype) for _ in range(size)]
            if dtype is torch.bool:
                raw = [torch.randint(4, (6 * size,), generator=generator) * 85 for _ in range(size)]
                xs = [x.to(torch.uint8).view(dtype) for x in raw]  # a byte that is not 0 is true
            elif dtype.is_complex:
                xs = [x * (1 + 2j) for x in xs]
            for name in wire.REDUCED[str(dtype).removeprefix("torch.")]:
                wanted = expected_results.reduced(xs, name)
                got = comm.all_reduce(xs[rank], reduction=name, algorithm="vendor")
                same_bits(got, wanted, (dtype, name, "all_reduce"))
                got = comm.reduce_scatter(xs[rank], reduction=name, algorithm="vendor")
                same_bits(got, wanted.chunk(size)[rank], (dtype, name, "reduce_scatter"))


TORCH_NAMES = {name: getattr(dist.ReduceOp, {"prod": "product"}.get(name, name).upper()) for name in wire.REDUCTIONS}


def every_reduction(part: int, parts: int, device: str = "cpu") -> None:
    """Compare every reduction of every dtype with plain torch, bit for bit, by its name and by that of PyTorch."""
    with shotcast.Communicator(device=device, timeout_s=60) as comm:
        rank, size = comm.rank, comm.world_size
        every = [(dtype, name) for dtype, names in wire.REDUCED.items() for name in names]
        for seed, (dtype, name) in enumerate(every[part::parts]):
            kind = getattr(torch, dtype)
            count = (1, 3, 67, 1025)[seed % 4]
            xs = [patterns(count * size, kind, 11 * seed + r) for r in range(size)]
            x, wanted = xs[rank].to(comm.device), expected_results.reduced(xs, name)
            for reduction in (name, TORCH_NAMES[name], dist.ReduceOp(TORCH_NAMES[name])):
                got = comm.all_reduce(x, reduction=reduction)
                assert not differing_reals(got.cpu(), wanted), (dtype, name, "all_reduce", got, wanted)
            for algorithm in ("one_shot", "two_shot"):
                out = shifted(x, seed % 2)
                assert comm.all_reduce(out, out=out, reduction=name, algorithm=algorithm) is out
                assert not differing_reals(out.cpu(), wanted), (dtype, name, algorithm, "in place")
            part = wanted.chunk(size)[rank]
            got = comm.reduce_scatter(x, reduction=TORCH_NAMES[name])
            assert not differing_reals(got.cpu(), part), (dtype, name, "reduce_scatter")
            if "few_sms" in comm.candidates(x, sms=2):
                place = comm.empty(x.shape, dtype=x.dtype).copy_(x) if seed % 2 else x
                by = {"reduction": name, "algorithm": "few_sms", "sms": 2}
                got = comm.reduce_scatter(place, **by)
                assert not differing_reals(got.cpu(), part), (dtype, name, "reduce_scatter on few SMs")
                got = comm.all_reduce(place, out=place, **by)
                assert not differing_reals(got.cpu(), wanted), (dtype, name, "all_reduce on few SMs")
            for op in ("all_reduce", "reduce_scatter"):
                assert not comm.explain(x, op, reduction=TORCH_NAMES[name]).by_library, (dtype, name)
        comm.check()


def reductions_in_graphs(part: int, parts: int) -> None:
    """Replay captured reductions of every dtype on changing tensors, beside eager ones."""
    with shotcast.Communicator(device="cuda", timeout_s=60) as comm:
        rank, size = comm.rank, comm.world_size
        every = [(dtype, name) for dtype, names in wire.REDUCED.items() for name in names]
        for seed, (dtype, name) in enumerate(every[part::parts]):
            count = (5, 4099, 100_003)[seed % 3]
            x = torch.empty(count, dtype=getattr(torch, dtype), device=comm.device)
            out = torch.empty_like(x)
            comm.all_reduce(x.zero_(), out=out, reduction=name)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                comm.all_reduce(x, out=out, reduction=name)
            for turn in range(3):
                xs = [patterns(count, x.dtype, 100 * seed + 10 * turn + r) for r in range(size)]
                x.copy_(xs[rank])
                graph.replay()
                wanted = expected_results.reduced(xs, name)
                assert not differing_reals(out.cpu(), wanted), (dtype, name, count, "replayed")
                got = comm.all_reduce(x, out=out, reduction=name)
                assert not differing_reals(got.cpu(), wanted), (dtype, name, count, "eager")
        comm.check()


def integers_in_pieces() -> None:
    """Reduce messages far beyond the room for flag cells of a small workspace, after and before ones that fit."""
    with shotcast.Communicator(device="cpu", max_bytes=4096, timeout_s=60) as comm:
        rank, size = comm.rank, comm.world_size
        for seed, count in enumerate((128, 129, 700, 3)):
            xs = [patterns(count * 8, torch.uint8, 11 * seed + r).view(torch.int64) for r in range(size)]
            got = comm.all_reduce(xs[rank], algorithm="two_shot")
            assert torch.equal(got, expected_results.reduced(xs, "sum")), count
            problem = comm._resolver.problem(wire.Op.ALL_REDUCE, torch.int64, count, "sum", 0, (), None)
            plan = comm._resolver.resolve(problem, "two_shot", False).plan
            assert comm._executor is not None
            assert len(comm._executor.pieces(plan)) == -(-count * 8 // 1024), count
        comm.check()


def differing_reals(got: torch.Tensor, wanted: torch.Tensor) -> int:
    """Return in how many numbers tensors differ, NaN being equal."""
    assert got.dtype is wanted.dtype
    if got.is_complex():
        got, wanted = torch.view_as_real(got), torch.view_as_real(wanted)
    return int(differing(got, wanted))


def sums_and_maxima_in_turn() -> None:
    """Alternate float32 sums and maxima, remembered calls included: the reduction is part of a call's key."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        x = torch.full([5], float(comm.rank + 1))
        for _ in range(3):
            assert comm.all_reduce(x).tolist() == [sum(range(1, comm.world_size + 1))] * 5
            assert comm.all_reduce(x, reduction="max").tolist() == [comm.world_size] * 5
            assert comm.all_reduce(x, reduction="min").tolist() == [1] * 5


def vendor_serves_every_operation() -> None:
    """Check that ``algorithm="vendor"`` gives what our own algorithms give, with empty, odd and uneven parts."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        rank, size = comm.rank, comm.world_size
        for count in (0, 1, 7, 4099):
            xs = [torch.arange(count * size, dtype=torch.float32) + 10 * r for r in range(size)]
            x = xs[rank]
            total = torch.stack(xs).sum(0)
            same_bits(comm.all_reduce(x, algorithm="vendor"), total, ("all_reduce", count))
            y = x.clone()
            assert comm.all_reduce(y, out=y, algorithm="vendor") is y
            same_bits(y, total, ("in place", count))
            got = comm.reduce_scatter(x, algorithm="vendor")
            same_bits(got, total[rank * count : (rank + 1) * count], ("reduce_scatter", count))
            same_bits(comm.all_gather(x, algorithm="vendor"), torch.cat(xs), ("all_gather", count))
            lengths = [count * (size - r) for r in range(size)]
            got = comm.all_gather(x[: lengths[rank]], sizes=lengths, algorithm="vendor")
            same_bits(got, torch.cat([p[:n] for p, n in zip(xs, lengths, strict=True)]), ("uneven", count))
            blocks = [p[rank * count : (rank + 1) * count] for p in xs]
            same_bits(comm.all_to_all(x, algorithm="vendor"), torch.cat(blocks), ("all_to_all", count))
            same_bits(comm.broadcast(x.clone(), size - 1, algorithm="vendor"), xs[-1], ("broadcast", count))


def shapes() -> None:
    """Check that results have the shapes that the equations state, and that calls return ``out``."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        rank, size = comm.rank, comm.world_size
        x = torch.full((2 * size, 3, 1), float(rank))
        assert comm.all_reduce(x).shape == x.shape
        assert comm.reduce_scatter(x).shape == (2, 3, 1)
        assert comm.all_gather(x).shape == (2 * size * size, 3, 1)
        assert comm.all_to_all(x).shape == x.shape
        assert comm.all_gather(torch.tensor(float(rank))).tolist() == list(range(size))
        assert comm.all_reduce(torch.tensor(1.0)).shape == ()
        for call, shape in ((comm.all_reduce, x.shape), (comm.reduce_scatter, (2, 3, 1)), (comm.all_to_all, x.shape)):
            out = torch.empty(shape)
            assert call(x, out=out) is out
        out = torch.empty(2 * size * size, 3, 1)
        assert comm.all_gather(x, out=out) is out
        assert comm.broadcast(x, 0) is x
        lengths = list(range(size))
        rows = torch.full((rank, 2), float(rank))
        wanted = [[float(r)] * 2 for r in range(size) for _ in range(r)]
        assert comm.all_gather(rows, sizes=lengths).tolist() == wanted
        assert comm.barrier() is None


def first_calls_in_inference_mode() -> None:
    """Make the first calls of each kind in inference mode, and later ones in it and outside, also on its tensors."""

    def calls(x: torch.Tensor, flags: torch.Tensor) -> None:
        size = comm.world_size
        for algorithm in ("auto", "vendor"):
            assert comm.all_reduce(x, out=x.clone(), algorithm=algorithm)[0] == size
            assert comm.all_reduce(x, out=out, algorithm=algorithm, reduction="avg")[0] == 1
            assert comm.all_reduce(flags, out=flags, algorithm=algorithm).all()
            assert comm.reduce_scatter(x, algorithm=algorithm)[0] == size
            assert comm.all_gather(x, algorithm=algorithm).sum() == size * x.numel()
            assert comm.all_to_all(x, algorithm=algorithm)[0] == 1
            assert comm.broadcast(x, 0, algorithm=algorithm)[0] == 1
        assert comm.start("all_reduce", x).wait()[0] == size
        comm.barrier()

    with torch.inference_mode():
        comm = shotcast.Communicator(timeout_s=60, device="cpu")
        x, flags = torch.ones(8 * comm.world_size), torch.ones(8, dtype=torch.bool)
        out = torch.empty_like(x)
        calls(x, flags)
    with comm:
        calls(x, flags)
        out = torch.empty_like(out)
        calls(torch.ones(8 * comm.world_size), torch.ones(8, dtype=torch.bool))
        leaf = torch.ones(8 * comm.world_size, requires_grad=True)
        comm.all_reduce(leaf).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad[0] == comm.world_size
        comm.set_timeout(30)
        with torch.inference_mode():
            calls(x, flags)
        comm.reset()
        calls(x, flags)


def calls_with_a_default_device() -> None:
    """Make calls while tensors are made on another device unless somebody says which."""
    torch.set_default_device("meta")
    try:
        with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
            x = torch.ones(6, device="cpu")
            for algorithm in ("auto", "vendor"):
                assert comm.all_reduce(x, algorithm=algorithm).tolist() == [float(comm.world_size)] * 6
                assert comm.all_gather(x[:0], algorithm=algorithm).device.type == "cpu"
            comm.barrier()
    finally:
        torch.set_default_device(None)


def many_different_calls(calls: int) -> tuple[int, bool]:
    """Make more different calls than a communicator remembers, and one again and again.

    Return how many are remembered, and whether that one is among them.
    """
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        x = torch.ones(calls)
        comm.all_reduce(x)
        (hot,) = comm._prepared._calls.values()
        for count in range(calls):
            if count % 1000 == 0:
                comm.all_reduce(x)
            got = comm.all_reduce(x[:count])
            assert got.numel() == count
            assert not count or float(got[-1]) == comm.world_size
        remembered = [*comm._prepared._calls.values(), *comm._prepared._calls._old.values()]
        assert len(comm._calls) + len(comm._calls._old) <= len(remembered)
        return len(remembered), any(call is hot for call in remembered)


def sums_with_chunks(algorithms: list[str]) -> tuple[bytes, str]:
    """Check sums that are launched as the user's table says. Return the bytes of a sum and what explain says of it."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        xs = inputs(20_003, torch.bfloat16, comm.world_size, 4, "cpu")
        for algorithm in algorithms:
            check(comm.all_reduce(xs[comm.rank]), expected_results.all_reduce(xs, algorithm), algorithm)
        got = comm.all_reduce(xs[comm.rank])
        return bytes(got.view(torch.uint8).numpy()), str(comm.explain(xs[comm.rank]))


def sums_with_small_workspaces() -> list[bytes]:
    """Check that the workspace, from which the chunk size follows, does not change the answer.

    Return the sums as bytes.
    """
    found = []
    for max_bytes in (1, 1 << 16, 16 << 20):
        with shotcast.Communicator(device="cpu", max_bytes=max_bytes, timeout_s=100) as comm:
            for algorithm in ("one_shot", "two_shot", "ring"):
                for name, dtype in FLOATS.items():
                    xs = inputs(50_001, dtype, comm.world_size, 6, "cpu")
                    got = comm.all_reduce(xs[comm.rank], algorithm=algorithm)
                    check(got, expected_results.all_reduce(xs, algorithm), (max_bytes, algorithm, name))
                    found.append(bytes(torch.nan_to_num(got.float()).numpy()))
    return found


def messages() -> None:
    """Send through a chain of all ranks, send more than the mailbox holds, and send both ways between collectives."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        rank, size = comm.rank, comm.world_size
        for count in (0, 1, 3, 16_384, 1_500_001):
            x = torch.zeros(count)
            if rank:
                comm.recv(x, rank - 1)
                assert torch.equal(x, torch.arange(count, dtype=torch.float32) + (rank - 1))
            if rank + 1 < size:
                comm.send(torch.arange(count, dtype=torch.float32) + rank, rank + 1)
        assert comm.all_reduce(torch.ones(3)).tolist() == [size] * 3
        # In each pair, the lower rank sends first. The answers go in the other order.
        for low, high in itertools.combinations(range(size), 2):
            x = torch.full([50_000], 10.0 * low + high)
            if rank == low:
                comm.send(x, high)
                comm.recv(x, high)
                assert float(x[0]) == -(10.0 * low + high)
            elif rank == high:
                y = torch.zeros_like(x)
                comm.recv(y, low)
                assert torch.equal(x, y)
                comm.send(-x, low)
        # Several messages wait in the mailbox, and arrive in order.
        if rank == 0:
            for number in range(4):
                comm.send(torch.tensor([number]), 1)
        comm.barrier()
        if rank == 1:
            found = [int(comm.recv(torch.zeros(1, dtype=torch.int64), 0)) for _ in range(4)]
            assert found == [0, 1, 2, 3]
        comm.barrier()


def rms_norms() -> None:
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        rank, size = comm.rank, comm.world_size
        for dtype, (rows, hidden) in itertools.product(FLOATS.values(), ((1, 1), (3, 129), (2, 4096))):
            generator = torch.Generator().manual_seed(hidden)
            xs = [torch.randn(rows, hidden, generator=generator).to(dtype) for _ in range(size)]
            residual = torch.randn(rows, hidden, generator=generator).to(dtype)
            weight = torch.randn(hidden, generator=generator).to(dtype)
            normed, new_residual = comm.all_reduce_rms_norm(xs[rank], residual, weight, 1e-5)
            total = reference.ordered_sum(xs)
            check(new_residual, (total.float() + residual.float()).to(dtype), (dtype, rows, hidden))
            value = new_residual.double()
            wanted = value / (value.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
            # The bound covers the float32 steps (mean of `hidden` squares, rsqrt, two products) and one rounding to the
            # dtype.
            inside = (hidden.bit_length() + 8) * torch.finfo(torch.float32).eps
            bound = (inside + torch.finfo(dtype).eps / 2 * 1.01) * wanted.abs() + torch.finfo(dtype).tiny
            assert bool(((normed.double() - wanted).abs() <= bound).all()), (dtype, rows, hidden)
            assert normed.shape == xs[rank].shape


def two_threads() -> list[str]:
    """Call from a second thread of rank 0 while its first thread waits in a call. Return the errors that rank 0 got."""
    errors: list[str] = []
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        comm.all_reduce(torch.ones(3))
        comm._host.barrier()
        if comm.rank:
            comm._host.barrier()  # rank 0 has made its other calls
            assert comm.all_reduce(torch.ones(3)).tolist() == [comm.world_size] * 3
        else:
            results: list[torch.Tensor] = []
            epoch = comm._executor.epoch + 1
            first = threading.Thread(target=lambda: results.append(comm.all_reduce(torch.ones(3))))
            first.start()
            await_call(comm, 0, epoch)
            own = (
                lambda: comm.all_reduce(torch.ones(3)),
                comm.barrier,
                lambda: comm.send(torch.ones(1), 1),
                comm.reset,
            )
            for call in own:
                try:
                    call()
                except shotcast.ShotcastError as error:
                    errors.append(str(error))
            comm._host.barrier()
            first.join()
            assert results[0].tolist() == [comm.world_size] * 3
        # Calls of several threads one after the other are allowed.
        for _ in range(3):
            later = threading.Thread(target=comm.all_reduce, args=(torch.ones(3),))
            later.start()
            later.join()
        assert comm.all_reduce(torch.ones(2)).tolist() == [comm.world_size] * 2
    return errors


def closed_during_a_call() -> tuple[str, float]:
    """Close rank 0 while another of its threads waits in a call.

    Return how the call ended, and the seconds from its begin to the end of the close.
    """
    comm = shotcast.Communicator(device="cpu", timeout_s=60)
    comm.all_reduce(torch.ones(3))
    comm._host.barrier()
    over = comm._host.store("over")
    if comm.rank:  # a barrier would end as soon as rank 0 has left
        over.wait(["rank 0"])
        comm.close()
        return "", 0.0
    ends: list[str] = []

    def call() -> None:
        try:
            comm.all_reduce(torch.ones(3))
        except shotcast.ShotcastError as error:
            ends.append(type(error).__name__)

    comm.set_timeout(1)
    epoch = comm._executor.epoch + 1
    thread = threading.Thread(target=call)
    started = time.monotonic()
    thread.start()
    await_call(comm, 0, epoch)
    comm.close()
    took = time.monotonic() - started
    thread.join()
    over.set("rank 0", "")
    return ends[0], took


def single_rank() -> None:
    """Check a single rank: every call is the identity, and all arguments are still checked."""
    with shotcast.Communicator(device="cpu") as comm:
        x = torch.arange(6, dtype=torch.float32)
        assert torch.equal(comm.all_reduce(x), x)
        assert comm.all_reduce(x).data_ptr() != x.data_ptr()
        assert torch.equal(comm.reduce_scatter(x), x)
        assert torch.equal(comm.all_gather(x, sizes=[6]), x)
        assert torch.equal(comm.all_to_all(x), x)
        assert comm.broadcast(x, 0) is x
        assert torch.equal(comm.all_reduce(x.long(), reduction="max"), x.long())
        comm.barrier()
        normed, total = comm.all_reduce_rms_norm(x, x, torch.ones(6))
        assert torch.equal(total, 2 * x)
        assert normed.shape == x.shape
        y = x.clone().requires_grad_()
        comm.all_reduce(y).sum().backward()
        assert torch.equal(y.grad, torch.ones(6))
        comm.reset()
        comm.check()
        assert comm.split(0).world_size == 1
        assert comm.split(None) is None


def more_ranks_than_kernels_serve() -> str:
    """Check nine ranks: the vendor library serves all calls. Return what explain says."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        size = comm.world_size
        x = torch.full([size], float(comm.rank))
        assert comm.all_reduce(x).tolist() == [sum(range(size))] * size
        assert comm.all_to_all(x).tolist() == [float(r) for r in range(size)]
        assert comm.broadcast(x, size - 1).tolist() == [size - 1.0] * size
        if comm.rank == 0:
            comm.send(x, 1)
        elif comm.rank == 1:
            comm.recv(x, 0)
        comm.barrier()
        comm.check()
        comm.reset()
        assert "vendor" in repr(comm)
        return str(comm.explain(x))


def states() -> None:
    """Check the context manager, a double close, set_timeout, and the repr of a communicator."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        ranks = f"rank={comm.rank}, world_size={comm.world_size}"
        assert repr(comm) == f"Communicator(name={comm.name!r}, {ranks}, device=cpu, compiled)"
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=r"cannot be pickled or copied.* construct one in each process"):
                copied(comm)
        with pytest.raises(TypeError, match=r"^Communicator\.all_reduce\(\) got an unexpected keyword argument 'op'"):
            comm.all_reduce(torch.ones(3), op="sum")
        assert comm.topology.transport.name == "compiled"
        assert comm.candidates(torch.ones(3)) == ["one_shot", "two_shot", "ring", "vendor"]
        assert comm.candidates(torch.ones(3), "broadcast") == ["one_shot", "vendor"]
        assert comm.candidates(torch.ones(3).long()) == ["one_shot", "two_shot", "vendor"]
        for op in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send", "recv", "barrier"):
            assert comm.explain(torch.ones(4), op).op == op
        epoch = comm._executor.epoch
        comm.check()
        assert comm._executor.epoch == epoch, "check and explain communicate nothing"
        comm.set_timeout(0.3)
        comm._host.barrier()
        started = time.monotonic()
        if comm.rank == 0:
            with pytest.raises(shotcast.CollectiveTimeout) as caught:
                comm.all_reduce(torch.ones(3))
            assert caught.value.timeout_s == 0.3
            assert 0.25 < time.monotonic() - started < 30
        comm.set_timeout(30)
        comm.reset()
        comm.check()
        assert comm.all_reduce(torch.ones(3)).tolist() == [comm.world_size] * 3
    assert "closed" in repr(comm)
    comm.close()
    comm.close()


def repeated_resets() -> list[int]:
    """Check that resets without a failure keep counting epochs, and discard messages that nobody received."""
    epochs = []
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        for _ in range(3):
            comm.all_reduce(torch.ones(5))
            if comm.rank == 0:
                comm.send(torch.full([2], 7.0), 1)
            comm.reset()
            epochs.append(comm._executor.epoch)
            if comm.rank == 0:
                comm.send(torch.full([2], 8.0), 1)
            elif comm.rank == 1:
                assert comm.recv(torch.zeros(2), 0).tolist() == [8.0, 8.0]
    return epochs


def mailbox_capacity() -> list[int]:
    """Return how many messages may wait: of one byte, of more than fits, and of one element by the vendor library."""
    with shotcast.Communicator(device="cpu", max_bytes=1 << 18, timeout_s=100) as comm:
        found = [comm.waiting_messages(torch.zeros(count, dtype=torch.uint8)) for count in (1, 1 << 20)]
    os.environ["SHOTCAST_ALGORITHM"] = "vendor"
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        return [*found, comm.waiting_messages(torch.zeros(1))]


def first_messages() -> float:
    """Return the seconds that the first messages of several dtypes take, in both directions."""
    first_use._MESSAGE_PATIENCE_S = 300.0  # in this process alone
    with shotcast.Communicator(device="cpu", timeout_s=600) as comm:
        comm.barrier()
        started = time.monotonic()
        for dtype in (torch.float32, torch.int8, torch.float64):
            x = torch.ones(5, dtype=dtype)
            if comm.rank == 0:
                comm.send(x, 1)
                comm.recv(x, 1)
            elif comm.rank == 1:
                comm.recv(x, 0)
                comm.send(x, 0)
        return time.monotonic() - started


def epochs_of_a_call_by_gloo() -> int:
    """Return how many epochs one call to Gloo takes: 1 if the ranks compare the call first, otherwise 0."""
    with shotcast.Communicator(device="cpu") as comm:
        assert comm._executor is not None
        before = comm._executor.epoch
        x = torch.full([8], comm.rank + 1.0)
        assert comm.all_reduce(x, algorithm="vendor").tolist() == [3.0] * 8
        return comm._executor.epoch - before


def rendezvous_at_a_file(path: str) -> None:
    """Run ranks that meet at a file. Such a store does not say that a wait ended because the time ran out."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=int(os.environ["RANK"]), world_size=2)
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        assert comm.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
        group = StoreGroup(Rendezvous.of_group(dist.group.WORLD), 20.0)
        if comm.rank == 0:
            with pytest.raises(shotcast.CollectiveTimeout) as caught:
                group.all_gather("here", 1.0, what="setup")
            assert caught.value.missing == (1,)
        comm._host.barrier()
        assert group.all_gather(comm.rank, 20.0) == [0, 1]


def messages_by_gloo(times: int) -> list[float]:
    """Send messages around a ring by the vendor's library, each between two ranks alone; the last rank stays away."""
    got = []
    with shotcast.Communicator(device="cpu", timeout_s=60) as comm:
        assert comm.explain(torch.ones(3), "send").by_library
        for i in range(times):
            if comm.rank == 0:
                comm.send(torch.full([1000], float(i)), 1)
                x = torch.zeros(3, dtype=torch.int16)
                got.append(float(comm.recv(x, 1)[2]))
            elif comm.rank == 1:
                x = torch.zeros(1000)
                comm.recv(x, 0)
                comm.send(x[:3].to(torch.int16) * 2, 0)
        comm.barrier()
    return got


def crossed_messages_by_gloo() -> tuple[shotcast.CollectiveMismatch, float]:
    """Have both ranks send before they receive. Return each rank's error, and after how long."""
    with shotcast.Communicator(device="cpu", timeout_s=300) as comm:
        comm.barrier()
        began = time.monotonic()
        with pytest.raises(shotcast.CollectiveMismatch) as caught:
            comm.send(torch.ones(4), 1 - comm.rank)
        took = time.monotonic() - began
        comm.reset()
        assert float(comm.all_reduce(torch.ones(3), algorithm="one_shot")[0]) == comm.world_size
        return caught.value, took


def different_messages_by_gloo() -> Any:
    """Have rank 0 send floats where rank 1 receives integers. Return each rank's error."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        error = None
        try:
            if comm.rank == 0:
                comm.send(torch.ones(4), 1)
            elif comm.rank == 1:
                comm.recv(torch.ones(4).int(), 0)
        except shotcast.CollectiveMismatch as caught:
            error = caught
        comm.reset()
        assert float(comm.all_reduce(torch.ones(3), algorithm="one_shot")[0]) == comm.world_size
        return error
